// Runs the FP8 GEMM of copied rows on the played GPU, for test_fp8_cuda.py.
#include "fp8_tma_gemm.cu"

#include "run_grid.hpp"

extern "C" void run(const int* launch, const void* const* tensors, const long long* numbers) {
    const auto [num_rows, outputs, inputs, out_stride] = *(const long long(*)[4])numbers;
    const RowMap rows = {tensors[0], num_rows, inputs, ROWS, 1}, weights = {tensors[2], outputs, inputs, OUTPUTS, 1};
    run_grid(launch, [=, num_rows = num_rows, outputs = outputs, inputs = inputs, out_stride = out_stride] {
        fp8_tma_gemm(rows, (const float*)tensors[1], weights, (const float*)tensors[3], (unsigned short*)tensors[4],
                     num_rows, outputs, inputs, out_stride);
    });
}
