// A block's sum of its threads' values, which every thread gets.
#pragma once

__device__ float block_sum(float value) {
    __shared__ float of_warp[32];
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();  // the row before has been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    const int warps = (blockDim.x + 31) / 32;
    value = threadIdx.x % 32 < warps ? of_warp[threadIdx.x % 32] : 0.0f;
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}
