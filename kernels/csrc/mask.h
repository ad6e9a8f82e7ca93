// Logits of one row under a mask of one bit a token. The specification is kernels/plait_kernels/sampling/mask.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "adjust.h"

namespace plait {

constexpr int64_t kMaskBits = 32;

constexpr std::array<uint32_t, kMaskBits> single_bits() {
    std::array<uint32_t, kMaskBits> bits{};
    for (int64_t i = 0; i < kMaskBits; ++i) bits[i] = uint32_t(1) << i;
    return bits;
}

inline void mask_logits(const float* logits, int64_t vocab, const uint32_t* mask, float* out) {
    static constexpr std::array<uint32_t, kMaskBits> kBits = single_bits();
    const int64_t num_whole = vocab / kMaskBits;
    for (int64_t word = 0; word < num_whole; ++word, logits += kMaskBits, out += kMaskBits) {
        const uint32_t bits = mask[word];
        if (bits == 0)
            std::fill(out, out + kMaskBits, kNotAllowed);
        else
            for (int64_t i = 0; i < kMaskBits; ++i) out[i] = (bits & kBits[i]) != 0 ? logits[i] : kNotAllowed;
    }
    for (int64_t i = 0; i < vocab % kMaskBits; ++i)
        out[i] = (mask[num_whole] & kBits[i]) != 0 ? logits[i] : kNotAllowed;
}

}  // namespace plait
