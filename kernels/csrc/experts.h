// Gated MLPs of which every token passes a few, in one call.
//
// Pairs of token and expert are put in the order of the experts, so that each multiplies its own rows.
#pragma once

#include <mutex>
#include <vector>

#include "products.h"

namespace plait {

// Their matrices, all of one shape, in cells. As plait_kernels/cpu/library.py declares it.
struct Experts {
    const Matrix* gate_ups;  // outputs are gates, then as many ups: each a multiple of 32
    const Matrix* downs;
    int64_t num_experts;
};

// Pair p is token p / top_k and its expert number p % top_k. As plait_kernels/cpu/library.py declares it.
struct Pairs {
    const int64_t* order;  // [tokens * top_k]: the pairs by expert
    const int64_t* ends;   // [experts]: where each one's pairs end in that order
    const float* weights;  // [tokens, top_k]
    int64_t num_tokens;
    int64_t top_k;

    int64_t count() const { return num_tokens * top_k; }
};

// Memory of a call: as much as the largest one took.
template <class Type>
struct ExpertRoom {
    std::vector<typename Type::Raw> gathered, gated;
    std::vector<float> results;  // by pair
};

// Each expert's rows: work(expert, its first place in the order, how many).
template <class Work>
void over_experts(const Experts& experts, const Pairs& pairs, const Work& work) {
    for (int64_t expert = 0, begin = 0; expert < experts.num_experts; begin = pairs.ends[expert++])
        if (begin < pairs.ends[expert]) work(expert, begin, pairs.ends[expert] - begin);
}

template <class Type>
void run_experts(Team& team, const Experts& experts, const Pairs& pairs, const typename Type::Raw* x,
                 ExpertRoom<Type>& room, typename Type::Raw* out) {
    using Raw = typename Type::Raw;
    const int64_t hidden = experts.gate_ups->inputs, width = experts.downs->inputs;
    Raw *gathered = room.gathered.data(), *gated_rows = room.gated.data();
    float* results = room.results.data();
    over_groups(team, pairs.count(), [&](int64_t place) {
        std::memcpy(gathered + place * hidden, x + pairs.order[place] / pairs.top_k * hidden, hidden * sizeof(Raw));
    });
    over_experts(experts, pairs, [&](int64_t expert, int64_t begin, int64_t count) {
        gated<Type>(team, experts.gate_ups[expert], Inputs<Type>(gathered + begin * hidden), count,
                    Inputs<Type>(gated_rows + begin * width));
    });
    over_experts(experts, pairs, [&](int64_t expert, int64_t begin, int64_t count) {
        const Inputs<Type> inputs(gated_rows + begin * width);
        multiply<Type>(team, experts.downs[expert], inputs, count, [&](int64_t row, int64_t first, Floats* sums, int exist) {
            write_panel<Float32>(results + pairs.order[begin + row] * hidden + first, sums, exist);
        });
    });
    over_groups(team, pairs.num_tokens, [&](int64_t token) {
        const float *weights = pairs.weights + token * pairs.top_k, *own = results + token * pairs.top_k * hidden;
        const auto total = [&]<class Value>(Value value, const auto& read) {
            for (int64_t i = 0; i < pairs.top_k; ++i) value += weights[i] * read(own + i * hidden);
            return value;
        };
        Raw* to = out + token * hidden;
        in_vectors(
            hidden,
            [&](int64_t i) { Type::write(to + i, total(Floats{}, [&](const float* from) { return load<Floats>(from + i); })); },
            [&](int64_t i) { Type::write_one(to + i, total(0.0f, [&](const float* from) { return from[i]; })); });
    });
}

template <class Type>
void experts(const Experts& experts, const Pairs& pairs, const typename Type::Raw* x, typename Type::Raw* out) {
    static std::mutex alone;
    static ExpertRoom<Type> room;
    std::lock_guard lock(alone);
    const int64_t hidden = experts.gate_ups->inputs, width = experts.downs->inputs;
    fit(room.gathered, pairs.count() * hidden);
    fit(room.gated, pairs.count() * width);
    fit(room.results, pairs.count() * hidden);
    Team::get().run([&](Team& team) { run_experts<Type>(team, experts, pairs, x, room, out); });
}

}  // namespace plait
