// What the GEMMs on Hopper's tensor cores (wgmma) share: how they find an operand, and how the sums of a cluster's blocks,
// of OUTPUTS outputs and ROWS rows each, are added and written by THREADS threads.
#pragma once
#include "gemm_ptx.cuh"

constexpr int SUM_STRIDE = OUTPUTS + 4;  // floats of a row; the 4 spread rows over the banks

// Rows of 128 bytes, of which 16 bytes each are where the tensor cores look for them: 8 rows are an atom.
__device__ unsigned long long operand_at(unsigned address) {
    return (unsigned long long)(address >> 4 & 0x3FFF) | 1ull << 16 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ void keep_sums(float* kept, const float (&sums)[ROWS / 2]) {
    const int lane = threadIdx.x % 32, output = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) {
        const int row = each / 4 * 8 + lane % 4 * 2 + each % 2;
        kept[row * SUM_STRIDE + output + each / 2 % 2 * 8] = sums[each];
    }
}

__device__ void write_four(unsigned short* out, float4 sums) {
    const unsigned low = bfloat16_pair(sums.x, sums.y), high = bfloat16_pair(sums.z, sums.w);
    if (((unsigned long long)out & 7) == 0) {
        *(uint2*)out = make_uint2(low, high);
    } else {
        out[0] = (unsigned short)low, out[1] = (unsigned short)(low >> 16);
        out[2] = (unsigned short)high, out[3] = (unsigned short)(high >> 16);
    }
}

// This block's share of the rows, of all blocks of the cluster in their order.
__device__ void write_sums(unsigned short* out, long long out_stride, int num_rows, int num_outputs, int first_row,
                           int first_output, unsigned kept) {
    constexpr int FOURS = OUTPUTS / 4;
    const int splits = cluster_size(), share = (ROWS + splits - 1) / splits;
    const int first = blockIdx.x % splits * share, end = min(min(first + share, ROWS), num_rows - first_row);
    for (int each = threadIdx.x; each < (end - first) * FOURS; each += THREADS) {
        const int row = first + each / FOURS, own = each % FOURS * 4, output = first_output + own;
        if (output >= num_outputs) continue;
        float4 sums = make_float4(0, 0, 0, 0);
        for (int other = 0; other < splits; ++other) {
            const float4 more = sums_of(kept + (row * SUM_STRIDE + own) * 4, other);
            sums.x += more.x, sums.y += more.y, sums.z += more.z, sums.w += more.w;
        }
        write_four(out + (first_row + row) * out_stride + output, sums);
    }
}
