// Element-wise operations on rows between the GEMMs: norms, rope, the gate.
#pragma once

#include <cmath>

#include "simd.h"

namespace plait {

// Calls whole(i) for each full vector of `count` elements and single(i) for each remaining element.
template <class Whole, class Single>
inline void for_each_vector(int64_t count, const Whole& whole, const Single& single) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) whole(i);
    for (; i < count; ++i) single(i);
}

template <class Type>
inline float sum_of_squares(const typename Type::Raw* x, int64_t count) {
    Floats squares{};
    float rest = 0;
    for_each_vector(
        count, [&](int64_t i) { squares += Type::read(x + i) * Type::read(x + i); },
        [&](int64_t i) { rest += Type::read_one(x + i) * Type::read_one(x + i); });
    return sum(squares) + rest;
}

// 1 / sqrt(mean(x^2) + eps).
template <class From>
inline float rms_factor(const typename From::Raw* x, int64_t count, float eps) {
    return 1.0f / std::sqrt(sum_of_squares<From>(x, count) / float(count) + eps);
}

// x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).
template <class From, class Type>
inline void rms_norm(const typename From::Raw* x, const typename Type::Raw* weight, int64_t count, float eps,
                     typename Type::Raw* out) {
    const float factor = rms_factor<From>(x, count, eps);
    for_each_vector(
        count, [&](int64_t i) { Type::write(out + i, From::read(x + i) * factor * Type::read(weight + i)); },
        [&](int64_t i) { Type::write_one(out + i, From::read_one(x + i) * factor * Type::read_one(weight + i)); });
}

// total += x, rounded once.
template <class From, class Type>
inline void add(const typename From::Raw* x, int64_t count, typename Type::Raw* total) {
    for_each_vector(
        count, [&](int64_t i) { Type::write(total + i, Type::read(total + i) + From::read(x + i)); },
        [&](int64_t i) { Type::write_one(total + i, Type::read_one(total + i) + From::read_one(x + i)); });
}

// [a, b] -> [a cos - b sin, b cos + a sin] in halves; the tables are as plait_kernels.rope makes them.
template <class Type>
inline void rotate(const typename Type::Raw* x, const float* cos, const float* sin, int64_t count,
                   typename Type::Raw* out) {
    const int64_t half = count / 2;
    for_each_vector(
        half,
        [&](int64_t i) {
            const Floats a = Type::read(x + i), b = Type::read(x + i + half);
            Type::write(out + i, a * load<Floats>(cos + i) + b * load<Floats>(sin + i));
            Type::write(out + i + half, b * load<Floats>(cos + i + half) + a * load<Floats>(sin + i + half));
        },
        [&](int64_t i) {
            const float a = Type::read_one(x + i), b = Type::read_one(x + i + half);
            Type::write_one(out + i, a * cos[i] + b * sin[i]);
            Type::write_one(out + i + half, b * cos[i + half] + a * sin[i + half]);
        });
}

inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

// silu(gate) * up of the two halves of a row of 2 * count elements.
template <class Type>
inline void silu_mul(const typename Type::Raw* gate_up, int64_t count, typename Type::Raw* out) {
    const auto* up = gate_up + count;
    for_each_vector(
        count, [&](int64_t i) { Type::write(out + i, silu(Type::read(gate_up + i)) * Type::read(up + i)); },
        [&](int64_t i) {
            Type::write_one(out + i, silu(all(Type::read_one(gate_up + i)))[0] * Type::read_one(up + i));
        });
}

}  // namespace plait
