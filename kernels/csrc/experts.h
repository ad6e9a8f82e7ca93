// Mixture of experts in one call: (token, expert) pairs are grouped by expert, and each expert's gated MLP runs over
// its own rows.
#pragma once

#include <mutex>
#include <vector>

#include "gemm.h"

namespace plait {

// The experts' matrices, of one shape: all dense, or all of GGUF blocks. As plait_kernels/cpu/library.py declares it.
struct Experts {
    const Matrix* gate_ups;  // outputs are gates, then ups: a multiple of 32 each
    const Matrix* downs;
    int64_t num_experts;
};

// Pair p is token p / top_k and its expert number p % top_k. As plait_kernels/cpu/library.py declares it.
struct Pairs {
    const int64_t* order;  // [tokens * top_k]: the pairs by expert
    const int64_t* ends;   // [experts]: end of each expert's pairs in that order
    const float* weights;  // [tokens, top_k]
    int64_t num_tokens;
    int64_t top_k;

    int64_t count() const { return num_tokens * top_k; }
};

// Scratch buffers of a call; they keep the size of the largest call.
template <class Type>
struct ExpertScratch {
    std::vector<typename Type::Raw> gathered, gated;
    QuantisedScratch quantised, quantised_gated;
    std::vector<int64_t> rows;   // of the quantised ones, in the pairs' order by expert: each expert begins a group
    std::vector<float> results;  // by pair
};

// Calls work(expert, index of its first pair in the order, number of its pairs).
template <class Work>
void for_each_expert(const Experts& experts, const Pairs& pairs, const Work& work) {
    for (int64_t expert = 0, begin = 0; expert < experts.num_experts; begin = pairs.ends[expert++])
        if (begin < pairs.ends[expert]) work(expert, begin, pairs.ends[expert] - begin);
}

// Numbers the pairs' quantised rows; returns how many there are with those that fill an expert's last group.
inline int64_t place_rows(const Experts& experts, const Pairs& pairs, std::vector<int64_t>& rows) {
    int64_t next = 0;
    fit(rows, pairs.count());
    for_each_expert(experts, pairs, [&](int64_t, int64_t begin, int64_t count) {
        for (int64_t i = 0; i < count; ++i) rows[begin + i] = next + i;
        next += num_groups(count) * kGroupRows;
    });
    return next;
}

template <class Type>
void run_experts(ThreadPool& pool, const Experts& experts, const Pairs& pairs, const typename Type::Raw* x,
                 ExpertScratch<Type>& scratch, typename Type::Raw* out) {
    using Raw = typename Type::Raw;
    const int64_t hidden = experts.gate_ups->inputs, width = experts.downs->inputs;
    const Inputs<Type> gathered(*experts.gate_ups, scratch.gathered.data(), scratch.quantised);
    const Inputs<Type> gated(*experts.downs, scratch.gated.data(), scratch.quantised_gated);
    const int64_t* rows = scratch.rows.data();
    float* results = scratch.results.data();
    for_each_row(pool, pairs.count(), [&](int64_t index) {
        const Raw* from = x + pairs.order[index] / pairs.top_k * hidden;
        if (gathered.num_bytes > 0)
            gathered.quantise_row(rows[index], from);
        else
            std::memcpy(gathered.x + index * hidden, from, hidden * sizeof(Raw));
    });
    for_each_expert(experts, pairs, [&](int64_t expert, int64_t begin, int64_t count) {
        gate_up_silu<Type>(pool, experts.gate_ups[expert], gathered.from(rows[begin], begin, hidden), count,
                           gated.from(rows[begin], begin, width));
    });
    for_each_expert(experts, pairs, [&](int64_t expert, int64_t begin, int64_t count) {
        const Matrix& down = experts.downs[expert];
        const Inputs<Type> inputs = gated.from(rows[begin], begin, width);
        gemm<Type>(pool, down, inputs, count, [&](int64_t row, int64_t first, Floats* sums, int exist) {
            write_panel<Float32>(results + pairs.order[begin + row] * hidden + first, sums, exist);
        });
    });
    for_each_row(pool, pairs.num_tokens, [&](int64_t token) {
        const float *weights = pairs.weights + token * pairs.top_k, *own = results + token * pairs.top_k * hidden;
        const auto total = [&]<class Value>(Value value, const auto& read) {
            for (int64_t i = 0; i < pairs.top_k; ++i) value += weights[i] * read(own + i * hidden);
            return value;
        };
        Raw* to = out + token * hidden;
        for_each_vector(
            hidden,
            [&](int64_t i) {
                Type::write(to + i, total(Floats{}, [&](const float* from) { return load<Floats>(from + i); }));
            },
            [&](int64_t i) { Type::write_one(to + i, total(0.0f, [&](const float* from) { return from[i]; })); });
    });
}

template <class Type>
void experts(const Experts& experts, const Pairs& pairs, const typename Type::Raw* x, typename Type::Raw* out) {
    static std::mutex mutex;
    static ExpertScratch<Type> scratch;
    std::lock_guard lock(mutex);
    const int64_t hidden = experts.gate_ups->inputs, width = experts.downs->inputs;
    fit(scratch.gathered, pairs.count() * hidden);
    fit(scratch.gated, pairs.count() * width);
    fit(scratch.results, pairs.count() * hidden);
    const int64_t num_rows = place_rows(experts, pairs, scratch.rows);
    if (!experts.gate_ups->is_dense()) scratch.quantised.fit(num_rows, hidden);
    if (!experts.downs->is_dense()) scratch.quantised_gated.fit(num_rows, width);
    ThreadPool::get().run([&](ThreadPool& pool) { run_experts<Type>(pool, experts, pairs, x, scratch, out); });
}

}  // namespace plait
