// The values of 4-bit codes in the tensor cores' left operand, from the words in which `int4.py` stores them.
#pragma once
#include "gemm_ptx.cuh"

#if SCALE_KIND == 2
typedef float Scale;
#else
typedef unsigned short Scale;
#endif

constexpr int CHUNK = 128;
constexpr int SCALES = GROUP == 32 ? 4 : GROUP == 64 ? 2 : 1;  // of an output's chunk

// What the kernels are given of a matrix.
struct Matrix {
    const uint4* codes;
    const Scale* scale;
    const unsigned char* zero;
    int num_outputs, num_inputs, num_chunks;

    __device__ int tiles() const { return num_outputs / 16; }

    // Of an output's `part` of a chunk; what lies behind the end has the last group's.
    __device__ int scale_at(int chunk, int part, int output) const {
        const int group = min((chunk * CHUNK + part * (CHUNK / SCALES)) / GROUP, (num_inputs - 1) / GROUP);
        return group * num_outputs + output;
    }

    // A thread's 16 bytes of a tile of 16 outputs.
    __device__ const uint4* words_at(int chunk, int half, int tile, int lane) const {
        return codes + (((chunk * 2 + half) * tiles() + tile) * 32 + lane);
    }
};

__device__ float float_of_scale(unsigned bits) {
#if SCALE_KIND == 0
    return float_of_half((unsigned short)bits);
#elif SCALE_KIND == 1
    return __uint_as_float(bits << 16);
#else
    return __uint_as_float(bits);
#endif
}

// Minus 128 and the zero, twice in bfloat16: its mantissa has 7 bits.
__device__ unsigned less_of(unsigned zero) { return (0xC300 + zero) * 0x10001; }

// Codes less their zeros, two at a time: an integer below 128 in the mantissa of 128 is 128 more than itself.
__device__ unsigned code_pair(unsigned words, int quarter, unsigned less) {
    return fma2(codes_over_128(words >> 4 * quarter), 0x3F803F80, less);
}
