// Runs a 4-bit GEMM (SOURCE, KERNEL) on the played GPU, for test_int4_cuda.py.
#include SOURCE

#include <algorithm>

#include "run_grid.hpp"

// The number of flags that are left set.
extern "C" int run(const int* launch, const void* const* tensors, const long long* numbers) {
    const auto codes = (const uint4*)tensors[1];
    const auto scale = (const Scale*)tensors[2];
    const auto zero = (const unsigned char*)tensors[3];
    const auto out = (unsigned short*)tensors[4];
    const auto [rows, outputs, inputs, chunks, out_stride] = *(const long long(*)[5])numbers;
#ifdef ROWS
    const RowMap x = {(const unsigned short*)tensors[0], rows, inputs, ROWS};
    std::vector<float> left((size_t)launch[0] * ROWS * WARPGROUPS * 64, NAN);
    std::vector<int> flags(launch[0], 0);
    run_grid(launch, [&, rows = rows, outputs = outputs, inputs = inputs, chunks = chunks, out_stride = out_stride] {
        KERNEL(x, codes, scale, zero, out, rows, outputs, inputs, chunks, out_stride, left.data(), flags.data());
    });
    return (int)std::count(flags.begin(), flags.end(), 1);
#else
    const auto x = (const unsigned short*)tensors[0];
    run_grid(launch, [=, rows = rows, outputs = outputs, inputs = inputs, chunks = chunks, out_stride = out_stride] {
        KERNEL(x, codes, scale, zero, out, rows, outputs, inputs, chunks, out_stride);
    });
    return 0;
#endif
}
