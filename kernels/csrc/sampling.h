// Sampling a token from one row of logits. The specification is kernels/plait_kernels/sampling/reference.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "scratch.h"
#include "row_ops.h"

namespace plait {

constexpr int64_t kBlock = 256;
// A weight is exp(-x) with x below this, or 0.
constexpr float kMaxExponent = 87.3f;
// The token of a row without a softmax: one of its logits is NaN, or the largest is not finite.
constexpr int64_t kNoToken = -1;

// As kernels/plait_kernels/cpu/library.py declares it.
struct Filters {
    const float* temperature;
    const int64_t* top_k;  // 0 keeps all
    const float* top_p;
    const float* min_p;
    const double* uniform;
};

// The largest value; NaN if any is.
inline float largest_of(const float* values, int64_t count) {
    Floats best = all(-std::numeric_limits<float>::infinity());
    Ints unknown{};
    float rest = best[0];
    bool is_unknown = false;
    for_each_vector(
        count,
        [&](int64_t i) {
            const Floats value = load<Floats>(values + i);
            best = largest(best, value);
            unknown |= value != value;
        },
        [&](int64_t i) {
            rest = std::max(rest, values[i]);
            is_unknown |= std::isnan(values[i]);
        });
    if (is_unknown || sum(unknown) != 0) return std::numeric_limits<float>::quiet_NaN();
    return std::max(rest, largest_lane(best));
}

inline int64_t sample_greedy(const float* logits, int64_t vocab) {
    const float best = largest_of(logits, vocab);
    return std::isfinite(best) ? std::find(logits, logits + vocab, best) - logits : kNoToken;
}

// exp((logit - best) / temperature) of every token.
inline void exp_weights(const float* logits, int64_t vocab, float best, float temperature, float* weights) {
    const float factor = 1.0f / temperature;
    for_each_vector(
        vocab, [&](int64_t i) { store(weights + i, exponential((load<Floats>(logits + i) - best) * factor)); },
        [&](int64_t i) { weights[i] = exponential(all((logits[i] - best) * factor))[0]; });
}

inline double mass(const float* weights, int64_t count) {
    Floats sums{};
    float rest = 0;
    for_each_vector(
        count, [&](int64_t i) { sums += load<Floats>(weights + i); }, [&](int64_t i) { rest += weights[i]; });
    return double(sum(sums)) + rest;
}

// The first token, in vocabulary order, whose cumulative weight exceeds `uniform` of the total.
inline int64_t sample_random(const float* logits, int64_t vocab, float temperature, float min_p, double uniform) {
    const float best = largest_of(logits, vocab);
    if (!std::isfinite(best)) return kNoToken;
    float* weights = scratch<float, 6>(vocab);
    exp_weights(logits, vocab, best, temperature, weights);
    for (int64_t i = 0; i < vocab; ++i) weights[i] = weights[i] < min_p ? 0.0f : weights[i];
    const int64_t blocks = (vocab + kBlock - 1) / kBlock;
    double* masses = scratch<double, 7>(blocks);
    for (int64_t b = 0; b < blocks; ++b)
        masses[b] = mass(weights + b * kBlock, std::min(kBlock, vocab - b * kBlock));
    const double target = uniform * std::accumulate(masses, masses + blocks, 0.0);
    double before = 0;
    int64_t last = 0;  // the last token of any weight, for when rounding leaves none above the target
    for (int64_t b = 0; b < blocks; before += masses[b++]) {
        if (before + masses[b] <= target && b + 1 < blocks && masses[b + 1] > 0) continue;
        double cumulative = before;
        for (int64_t i = b * kBlock; i < std::min(vocab, (b + 1) * kBlock); ++i) {
            if (weights[i] == 0) continue;
            last = i;
            if ((cumulative += weights[i]) > target) return i;
        }
    }
    return last;
}

// One row's tokens by logit, best first, ties by the lower id.
//
// Buckets of equal width in the logit hold them; only buckets with a filter's boundary or the sampled token are sorted.
// Every filter keeps a prefix of the order.
class Order {
public:
    static constexpr int kBuckets = 4096;

    // End of a prefix: all buckets before this one, and so many tokens of it.
    struct End {
        int bucket = kBuckets;
        int64_t tokens = 0;
        bool operator<(const End& other) const {
            return std::pair(bucket, tokens) < std::pair(other.bucket, other.tokens);
        }
    };

    // `best` is the largest of the logits.
    Order(const float* logits, int64_t vocab, float best, float temperature) : logits_(logits), vocab_(vocab) {
        const float width = kBuckets / (kMaxExponent * temperature);
        weights_ = scratch<float, 6>(vocab);
        buckets_ = scratch<int16_t, 8>(vocab);
        counts_ = scratch<int64_t, 9>(kBuckets);
        masses_ = scratch<double, 10>(kBuckets);
        exp_weights(logits, vocab, best, temperature, weights_);
        std::fill(counts_, counts_ + kBuckets, 0);
        std::fill(masses_, masses_ + kBuckets, 0.0);
        for (int64_t i = 0; i < vocab; ++i)
            buckets_[i] = weights_[i] > 0 ? int16_t(std::min(float(kBuckets - 1), (best - logits[i]) * width)) : -1;
        for (int64_t i = 0; i < vocab; ++i) {
            if (buckets_[i] < 0) continue;  // of weight 0, after all others
            ++counts_[buckets_[i]];
            masses_[buckets_[i]] += weights_[i];
        }
    }

    // The prefix of the k best.
    End first(int64_t k) const {
        for (int bucket = 0; bucket < kBuckets; ++bucket) {
            if (k <= counts_[bucket]) return {bucket, k};
            k -= counts_[bucket];
        }
        return {};
    }

    // The prefix of tokens, at least one, whose predecessors weigh less than `needed` together.
    End lighter(double needed) {
        double before = 0;
        for (int bucket = 0; bucket < kBuckets; before += masses_[bucket++]) {
            if (counts_[bucket] == 0 || before + masses_[bucket] < needed) continue;
            int64_t tokens = 0;
            for (double sum = before; int64_t token : sorted(bucket)) {
                if (sum >= needed && (bucket > 0 || tokens > 0)) break;
                sum += weights_[token];
                ++tokens;
            }
            return {bucket, tokens};
        }
        return {};
    }

    // The prefix of tokens that weigh at least `least`; always the best one.
    End heavier(float least) const {
        const auto count = std::count_if(weights_, weights_ + vocab_, [&](float w) { return w >= least; });
        return first(std::max<int64_t>(1, count));
    }

    double mass_of(const End& end) {
        double total = std::accumulate(masses_, masses_ + end.bucket, 0.0);
        if (end.bucket < kBuckets)
            for (int64_t i = 0; i < end.tokens; ++i) total += weights_[sorted(end.bucket)[i]];
        return total;
    }

    // The first token before the end whose cumulative weight exceeds the target, or the last before it.
    int64_t find(double target, const End& end) {
        double before = 0;
        int64_t last = 0;
        for (int bucket = 0; bucket < kBuckets && bucket <= end.bucket; before += masses_[bucket++]) {
            if (counts_[bucket] == 0) continue;
            const bool is_last = is_last_before(bucket, end);
            if (before + masses_[bucket] <= target && !is_last) continue;
            const auto& tokens = sorted(bucket);
            const int64_t count = bucket == end.bucket ? end.tokens : int64_t(tokens.size());
            double cumulative = before;
            for (int64_t i = 0; i < count; ++i) {
                last = tokens[i];
                if ((cumulative += weights_[last]) > target) return last;
            }
            if (is_last) return last;
        }
        return last;
    }

private:
    // Whether no token before the end lies in a later bucket.
    bool is_last_before(int bucket, const End& end) const {
        for (int next = bucket + 1; next < kBuckets && next <= end.bucket; ++next)
            if (counts_[next] > 0 && (next < end.bucket || end.tokens > 0)) return false;
        return true;
    }

    const std::vector<int32_t>& sorted(int bucket) {
        for (auto& [known, tokens] : sorted_)
            if (known == bucket) return tokens;
        std::vector<int32_t> tokens;
        for (int64_t i = 0; i < vocab_; ++i)
            if (buckets_[i] == bucket) tokens.push_back(int32_t(i));
        std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t a, int32_t b) { return logits_[a] > logits_[b]; });
        return sorted_.emplace_back(bucket, std::move(tokens)).second;
    }

    const float* logits_;
    int64_t vocab_;
    float* weights_;
    int16_t* buckets_;
    int64_t* counts_;
    double* masses_;
    std::vector<std::pair<int, std::vector<int32_t>>> sorted_;
};

// The same as sample_random after top-k, top-p and min-p, where the distribution runs from the best token to the worst.
inline int64_t sample_filtered(const float* logits, int64_t vocab, const Filters& filters, int64_t row) {
    const float best = largest_of(logits, vocab);
    if (!std::isfinite(best)) return kNoToken;
    Order order(logits, vocab, best, filters.temperature[row]);
    const int64_t top_k = filters.top_k[row];
    Order::End end = top_k > 0 ? order.first(top_k) : Order::End{};
    if (filters.top_p[row] < 1) end = std::min(end, order.lighter(double(filters.top_p[row]) * order.mass_of(end)));
    if (filters.min_p[row] > 0) end = std::min(end, order.heavier(filters.min_p[row]));
    return order.find(filters.uniform[row] * order.mass_of(end), end);
}

}  // namespace plait
