// What the GEMMs on Hopper's tensor cores (wgmma) share: how a block of a cluster keeps its sums, of OUTPUTS outputs and
// ROWS rows, for the others, and how they are written.
#pragma once
#include "gemm_ptx.cuh"

constexpr int SUM_STRIDE = OUTPUTS + 4;  // floats of a row; the 4 spread rows over the banks

__device__ void keep_sums(float* kept, const float (&sums)[ROWS / 2]) {
    const int lane = threadIdx.x % 32, output = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) {
        const int row = each / 4 * 8 + lane % 4 * 2 + each % 2;
        kept[row * SUM_STRIDE + output + each / 2 % 2 * 8] = sums[each];
    }
}

// Of bfloat16, in two words.
__device__ void write_four(unsigned short* out, unsigned low, unsigned high) {
    if (((unsigned long long)out & 7) == 0) {
        *(uint2*)out = make_uint2(low, high);
    } else {
        out[0] = (unsigned short)low, out[1] = (unsigned short)(low >> 16);
        out[2] = (unsigned short)high, out[3] = (unsigned short)(high >> 16);
    }
}
