// Runs the FP8 GEMM of copied rows on the played GPU, for test_fp8_cuda.py.
#include "fp8_tma_gemm.cu"

#include "run_grid.hpp"

extern "C" void run(const int* launch, const void* const* tensors, const long long* numbers) {
    const auto [num_rows, outputs, inputs] = *(const long long(*)[3])numbers;
    const RowMap rows = {tensors[0], num_rows, inputs, ROWS, 1}, weights = {tensors[2], outputs, inputs, OUTPUTS, 1};
    run_grid(launch, [=] {
        fp8_tma_gemm(rows, (const float*)tensors[1], weights, (const float*)tensors[3], (unsigned short*)tensors[4],
                     numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]);
    });
}
