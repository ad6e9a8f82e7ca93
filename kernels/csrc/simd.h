// Vectors of float in GCC's and clang's vector extension: one source, compiled once for each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace plait {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

template <class Vector, class Source>
inline Vector load(const Source* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class Vector, class Target>
inline void store(Target* to, Vector value) {
    std::memcpy(to, &value, sizeof value);
}

template <class To, class From>
inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To same;
    std::memcpy(&same, &value, sizeof same);
    return same;
}

inline Floats all(float value) { return value - Floats{}; }
inline Words all(uint32_t value) { return value - Words{}; }
inline Ints all(int32_t value) { return value - Ints{}; }

inline Ints largest(Ints a, Ints b) { return a > b ? a : b; }

// Of a NaN and a number: the number, if it is b.
inline Floats largest(Floats a, Floats b) { return a > b ? a : b; }
inline Floats least(Floats a, Floats b) { return a < b ? a : b; }

inline float sum(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(values));
#else
    float total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += values[lane];
    return total;
#endif
}

// The sums of kLanes vectors, side by side.
inline Floats sums(const Floats* values) {
#if defined(__AVX512F__)
    // A transposing tree: neighbours within each quarter of a vector first, then across quarters.
    __m512 quarters[4];
    for (int i = 0; i < 4; ++i) {
        __m512 v[4];
        for (int j = 0; j < 4; ++j) v[j] = reinterpret_cast<__m512>(values[4 * i + j]);
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        quarters[i] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quarters[0], quarters[1], 0x88),
                                     _mm512_shuffle_f32x4(quarters[0], quarters[1], 0xdd));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quarters[2], quarters[3], 0x88),
                                      _mm512_shuffle_f32x4(quarters[2], quarters[3], 0xdd));
    return reinterpret_cast<Floats>(
        _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd)));
#else
    Floats totals;
    for (int i = 0; i < kLanes; ++i) totals[i] = sum(values[i]);
    return totals;
#endif
}

inline int32_t sum(Ints values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(values));
#else
    int32_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += values[lane];
    return total;
#endif
}

inline int32_t largest_lane(Ints values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(values));
#else
    int32_t best = values[0];
    for (int lane = 1; lane < kLanes; ++lane) best = best < values[lane] ? values[lane] : best;
    return best;
#endif
}

inline float largest_lane(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(reinterpret_cast<__m512>(values));
#else
    float best = values[0];
    for (int lane = 1; lane < kLanes; ++lane) best = best < values[lane] ? values[lane] : best;
    return best;
#endif
}

// a * b, rounded to float32 on its own.
inline Floats rounded_mul(Floats a, Floats b) {
    Floats result = a * b;
#if defined(__x86_64__)
    asm("" : "+v"(result));  // or the compiler would fuse it with an addition
#elif defined(__aarch64__)
    asm("" : "+w"(result));
#endif
    return result;
}

inline Ints lane_numbers() {
    Ints numbers;
    for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
    return numbers;
}

// acc + the dot product of each lane's four bytes, unsigned in w and signed in x.
inline Ints dot_bytes(Ints acc, Words w, Words x) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w),
                                                      reinterpret_cast<__m512i>(x)));
#else
    for (int byte = 0; byte < 4; ++byte)
        acc += bits<Ints>(w >> (8 * byte) & 0xffu) * (bits<Ints>(x << (24 - 8 * byte)) >> 24);
    return acc;
#endif
}

inline Floats read_float16(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(load<__m256i>(from)));
#else
    // A multiplication moves the exponent by 127 - 15, which is right for subnormals too; weights are finite.
    const Words raw = __builtin_convertvector(load<Halves>(from), Words);
    const Floats size = bits<Floats>((raw & 0x7fffu) << 13) * 0x1p112f;
    return bits<Floats>(bits<Words>(size) | (raw & 0x8000u) << 16);
#endif
}

inline Floats read_int8(const uint8_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from))));
#else
    return __builtin_convertvector(load<Bytes>(from), Floats);
#endif
}

// e^x within 2 units in the last place; 0 below -87.3 and e^88 above 88 (Cephes' expf).
inline Floats exponential(Floats x) {
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    // In this order a NaN propagates.
    Floats clamped = least(all(88.0f), largest(all(-87.3f), x));
    Floats exponents = (clamped * 1.44269504088896341f + magic) - magic;
    Floats rest = clamped - exponents * 0.693359375f + exponents * 2.12194440e-4f;
    Floats series = all(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    Ints exponent = (__builtin_convertvector(exponents, Ints) + 127) << 23;
    Floats power = series * bits<Floats>(exponent);
    return x < all(-87.3f) ? Floats{} : power;
}

// The two types of weights, activations and cache. A word is the 32 bits that one lane multiplies at a time: a packed
// pair of neighbouring bfloat16 elements (VNNI layout), or one float32.
struct BFloat16 {
    using Raw = uint16_t;
    static constexpr int kPerWord = 2;
    static constexpr int64_t kRun = INT64_MAX;  // words of one sum; rounding of the inputs is far larger

    static Floats read(const Raw* from) { return bits<Floats>(upcast(from) << 16); }
    static void write(Raw* to, Floats value) {
#if defined(__AVX512BF16__)
        store(to, _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value)));
#else
        store(to, __builtin_convertvector(rounded_words(value) >> 16, Halves));
#endif
    }
    static float read_one(const Raw* from) { return bits<float>(uint32_t(*from) << 16); }
    static void write_one(Raw* to, float value) {
        uint32_t raw = bits<uint32_t>(value);
        *to = Raw((raw + 0x7fff + ((raw >> 16) & 1)) >> 16);
    }

    // Elements i.. of the first row and of the second, if there is one, interleaved as pairs.
    static Words pack_words(const Raw* const* rows, int64_t count, int64_t i) {
        const Words first = upcast(rows[0] + i);
        return count > 1 ? first | upcast(rows[1] + i) << 16 : first;
    }

    // acc + w[even] * x[even] + w[odd] * x[odd] in every lane.
    static Floats dot_add(Floats acc, Words w, Words x) {
#if defined(__AVX512BF16__)
        return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(w),
                                                         reinterpret_cast<__m512bh>(x)));
#else
        acc += bits<Floats>(w << 16) * bits<Floats>(x << 16);
        return acc + bits<Floats>(w & 0xffff0000u) * bits<Floats>(x & 0xffff0000u);
#endif
    }

private:
    // GCC 12 splits a conversion of sixteen elements into scalars.
    static Words upcast(const Raw* from) {
#if defined(__AVX512F__)
        return bits<Words>(_mm512_cvtepu16_epi32(load<__m256i>(from)));
#else
        return __builtin_convertvector(load<Halves>(from), Words);
#endif
    }
    static Words rounded_words(Floats value) {
        Words raw = bits<Words>(value);
        return raw + 0x7fff + ((raw >> 16) & 1);
    }
};

struct Float32 {
    using Raw = float;
    static constexpr int kPerWord = 1;
    static constexpr int64_t kRun = 128;

    static Floats read(const Raw* from) { return load<Floats>(from); }
    static void write(Raw* to, Floats value) { store(to, value); }
    static float read_one(const Raw* from) { return *from; }
    static void write_one(Raw* to, float value) { *to = value; }
    static Words pack_words(const Raw* const* rows, int64_t, int64_t i) { return load<Words>(rows[0] + i); }
    static Floats dot_add(Floats acc, Words w, Words x) { return acc + bits<Floats>(w) * bits<Floats>(x); }
};

}  // namespace plait
