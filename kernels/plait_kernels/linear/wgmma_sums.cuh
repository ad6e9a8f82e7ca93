// What the GEMMs on Hopper's tensor cores (wgmma) share: where operands lie, how a block of a cluster keeps its sums, of
// OUTPUTS outputs and ROWS rows, for the others, and how they are written.
#pragma once
#include "gemm_ptx.cuh"

// Rows of 128 bytes, of which 16 bytes each are where the tensor cores look for them: 8 rows are an atom.
__device__ unsigned long long operand_at(unsigned address) {
    return (unsigned long long)(address >> 4 & 0x3FFF) | 1ull << 16 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}

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

// Of this block's share of the rows, the sums of all blocks of the cluster in their order; its first COUNT threads read
// some fours at a time. `kept` is where each block has its own; this one is number `split` of them.
template <int COUNT>
__device__ void write_share(unsigned short* out, long long out_stride, int num_outputs, int num_rows, int first_output,
                            int first_row, int splits, int split, unsigned kept) {
    constexpr int FOURS = OUTPUTS / 4, AT_ONCE = 4;
    const int share = (ROWS + splits - 1) / splits, first = split * share;
    const int all = (min(min(first + share, ROWS), num_rows - first_row) - first) * FOURS;
    for (int begin = threadIdx.x; begin < all; begin += AT_ONCE * COUNT) {
        float4 sums[AT_ONCE] = {};
        for (int other = 0; other < splits; ++other)
#pragma unroll
            for (int each = 0; each < AT_ONCE; ++each) {
                const int four = min(begin + each * COUNT, all - 1);
                const float4 more = sums_of(kept + ((first + four / FOURS) * SUM_STRIDE + four % FOURS * 4) * 4, other);
                sums[each].x += more.x, sums[each].y += more.y, sums[each].z += more.z, sums[each].w += more.w;
            }
#pragma unroll
        for (int each = 0; each < AT_ONCE; ++each) {
            const int four = begin + each * COUNT, output = first_output + four % FOURS * 4;
            if (four >= all || output >= num_outputs) continue;
            write_four(out + (first_row + first + four / FOURS) * out_stride + output,
                       bfloat16_pair(sums[each].x, sums[each].y), bfloat16_pair(sums[each].z, sums[each].w));
        }
    }
}
