// Vectors of eight 16-bit elements in memory that peers write into, and what marks those that nobody has written.
#pragma once

constexpr int MAX_RANKS = 8;
// Two elements of minus zero; a rank sends plus zeros instead. No weight or id has these bits.
constexpr unsigned EMPTY = 0x80008000u;
constexpr unsigned SPINS_BETWEEN_LOOKS = 1024;

__device__ float low(unsigned word) {
#ifdef IS_HALF
    float number;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(number) : "r"(word));
    return number;
#else
    return __uint_as_float(word << 16);
#endif
}

__device__ float high(unsigned word) {
#ifdef IS_HALF
    float number;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(number) : "r"(word));
    return number;
#else
    return __uint_as_float(word & 0xffff0000u);
#endif
}

__device__ unsigned pack(float low, float high) {
    unsigned word;
#ifdef IS_HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

__device__ void add(float (&sum)[8], uint4 vector) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[2 * i] += low(words[i]), sum[2 * i + 1] += high(words[i]);
}

__device__ void add(float (&sum)[8], uint4 vector, float weight) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[2 * i] += weight * low(words[i]), sum[2 * i + 1] += weight * high(words[i]);
}

__device__ uint4 rounded(const float (&sum)[8]) {
    return {pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7])};
}

__device__ unsigned filled(unsigned word) { return word == EMPTY ? 0u : word; }

__device__ uint4 filled(uint4 vector) {
    return {filled(vector.x), filled(vector.y), filled(vector.z), filled(vector.w)};
}

__device__ bool is_there(uint4 vector) {
    return vector.x != EMPTY && vector.y != EMPTY && vector.z != EMPTY && vector.w != EMPTY;
}

__device__ uint4 peek(const uint4* address) {
    uint4 vector;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "l"(address)
                 : "memory");
    return vector;
}

__device__ void push(uint4* address, uint4 vector) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(vector.x), "r"(vector.y),
                 "r"(vector.z), "r"(vector.w)
                 : "memory");
}

__device__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}
