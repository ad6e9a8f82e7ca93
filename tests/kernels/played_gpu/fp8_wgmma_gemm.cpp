// Runs the FP8 GEMM on tensor cores on the played GPU, for test_fp8_cuda.py.
#include "fp8_wgmma_gemm.cu"

#include "run_grid.hpp"

extern "C" void run(const int* launch, const void* const* tensors, const long long* numbers) {
    run_grid(launch, [=] {
        fp8_wgmma_gemm((const unsigned char*)tensors[0], (const float*)tensors[1], (const unsigned char*)tensors[2],
                       (const float*)tensors[3], (unsigned short*)tensors[4], numbers[0], numbers[1], numbers[2],
                       numbers[3], numbers[4], numbers[5]);
    });
}
