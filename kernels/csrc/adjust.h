// Changes of one row's logits. The specification is kernels/plait_kernels/sampling/adjust.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace plait {

constexpr float kMostAdjusted = 20000.0f;
constexpr float kNotAllowed = -60000.0f;

// As kernels/plait_kernels/cpu/library.py declares it.
struct Adjustments {
    const int32_t* counts;   // [R, vocab]: twice the times in the output, and one if the prompt has it
    const int64_t* rows;     // of counts
    const float* penalties;  // [S, 3]: presence, frequency, repetition
    const int64_t* ends;     // of a row's listed tokens
    const int64_t* ids;
    const float* bias;
    const bool* only_listed;
};

inline float penalise(float logit, int32_t count, const float* penalties) {
    if (count == 0) return logit;
    const int32_t times = count >> 1;
    logit = logit > 0 ? logit / penalties[2] : logit * penalties[2];
    logit -= penalties[1] * float(times);
    if (times > 0) logit -= penalties[0];
    if (logit > kMostAdjusted) return kMostAdjusted;
    return logit < -kMostAdjusted ? -kMostAdjusted : logit;  // NaN stays
}

inline void adjust_logits(const float* logits, int64_t vocab, const Adjustments& changes, int64_t row, float* out) {
    const int32_t* counts = changes.counts + changes.rows[row] * vocab;
    const float* penalties = changes.penalties + 3 * row;
    if (changes.only_listed[row])
        std::fill(out, out + vocab, kNotAllowed);
    else
        for (int64_t i = 0; i < vocab; ++i) out[i] = penalise(logits[i], counts[i], penalties);
    for (int64_t e = row > 0 ? changes.ends[row - 1] : 0; e < changes.ends[row]; ++e) {
        const int64_t id = changes.ids[e];
        out[id] = penalise(logits[id], counts[id], penalties) + changes.bias[e];
    }
}

}  // namespace plait
