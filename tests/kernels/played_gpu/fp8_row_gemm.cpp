// Runs the FP8 GEMV on the played GPU, for test_fp8_cuda.py.
#include "fp8_row_gemm.cu"

#include "run_grid.hpp"

extern "C" void run(const int* launch, const void* const* tensors, const long long* numbers, double eps) {
    run_grid(launch, [=] {
        fp8_row_gemm((const unsigned short*)tensors[0], (const unsigned short*)tensors[1],
                     (const unsigned short*)tensors[2], (const unsigned char*)tensors[3], (const float*)tensors[4],
                     (unsigned short*)tensors[5], (unsigned short*)tensors[6], numbers[0], numbers[1], numbers[2], eps);
    });
}
