// The C interface, declared for Python in kernels/plait_kernels/cpu/library.py. Built once for each instruction set.
//
// `type` is 0 for bfloat16 and 1 for float32. Pointers are to contiguous arrays of the sizes given; nothing is kept.
// Every function returns a Status.
#include <exception>
#include <system_error>

#include "decoder.h"
#include "experts.h"
#include "sampling.h"

namespace {

using plait::BFloat16;
using plait::Float32;
using plait::Team;

// work.operator()<Type>() for the type that a number names.
template <class Work>
void typed(int type, const Work& work) {
    if (type == 0)
        work.template operator()<BFloat16>();
    else
        work.template operator()<Float32>();
}

// As kernels/plait_kernels/cpu/library.py declares it.
enum Status : int { kDone, kNoMemory, kNoThreads };

// Does the work; no exception leaves the library.
template <class Work>
Status guarded(const Work& work) noexcept {
    try {
        work();
        return kDone;
    } catch (const std::system_error&) {
        return kNoThreads;
    } catch (const std::exception&) {  // bad_alloc, or length_error
        return kNoMemory;
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int plait_set_threads(int num_threads) {
    return guarded([&] { Team::get().resize(num_threads); });
}

int plait_pack(const void* weight, int64_t outputs, int64_t inputs, int type, uint32_t* panels) {
    return guarded([&] {
        typed(type, [&]<class Type>() {
            Team::get().run([&](Team& team) { plait::pack<Type>(team, weight, outputs, inputs, panels); });
        });
    });
}

// blocks [outputs, inputs / 32] of a GGUF.
int plait_pack_blocks(const uint8_t* blocks, int64_t outputs, int64_t inputs, int64_t storage, uint8_t* panels) {
    return guarded([&] {
        plait::of_format(plait::Storage(storage), [&]<class Format>() {
            Team::get().run([&](Team& team) { plait::pack_blocks<Format>(team, blocks, outputs, inputs, panels); });
        });
    });
}

int plait_linear(const plait::Matrix* matrix, const void* x, int64_t rows, int type, int type_out, void* out) {
    return guarded([&] {
        static std::mutex alone;
        static plait::RoundedRoom room;
        std::lock_guard lock(alone);
        if (matrix->storage != plait::Storage::kCells) room.fit(rows, matrix->inputs);
        typed(type, [&]<class Type>() {
            typed(type_out, [&]<class Out>() {
                using Raw = typename Type::Raw;
                const plait::Inputs<Type> inputs(*matrix, static_cast<Raw*>(const_cast<void*>(x)), room);
                Team::get().run([&](Team& team) {
                    inputs.round_all(team, rows);
                    plait::linear<Type, Out>(team, *matrix, inputs, rows, out);
                });
            });
        });
    });
}

int plait_rms_norm(const void* x, const void* weight, int64_t rows, int64_t stride, int64_t width, double eps,
                   int type, void* out) {
    return guarded([&] {
        typed(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            for (int64_t row = 0; row < rows; ++row)
                plait::rms_norm<Type, Type>(static_cast<const Raw*>(x) + row * stride, static_cast<const Raw*>(weight),
                                            width, float(eps), static_cast<Raw*>(out) + row * width);
        });
    });
}

int plait_attend(const plait::Rows* rows, const void* queries, int64_t query_stride, const plait::Cached* keys,
                 const plait::Cached* values, int type, void* out, float* lse) {
    return guarded([&] {
        typed(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            Team::get().run([&](Team& team) {
                plait::Attention<Type>{*rows,   static_cast<const Raw*>(queries), query_stride, *keys,
                                       *values, static_cast<Raw*>(out),           lse}
                    .run(team);
            });
        });
    });
}

int plait_store(const plait::Rows* rows, const void* keys, int64_t key_stride, const void* values,
                int64_t value_stride, int type, void* pages) {
    return guarded([&] {
        typed(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            plait::store_rows<Type>(*rows, static_cast<const Raw*>(keys), key_stride, static_cast<const Raw*>(values),
                                    value_stride, static_cast<Raw*>(pages));
        });
    });
}

// x and out [tokens, inputs].
int plait_experts(const plait::Experts* experts, const plait::Pairs* pairs, const void* x, int type, void* out) {
    return guarded([&] {
        typed(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            plait::experts<Type>(*experts, *pairs, static_cast<const Raw*>(x), static_cast<Raw*>(out));
        });
    });
}

int plait_decode(const plait::Decoder* decoder, const plait::Rows* rows, const plait::Activations* step, int type) {
    return guarded([&] {
        typed(type, [&]<class Type>() { plait::decode<Type>(*decoder, *rows, *step); });
    });
}

// Ids [rows] from logits [rows, vocab].
int plait_pick_greedy(const float* logits, int64_t rows, int64_t vocab, int64_t* ids) {
    return guarded([&] {
        Team::get().run([&](Team& team) {
            team.each(rows, [&](int64_t row) { ids[row] = plait::sample_greedy(logits + row * vocab, vocab); });
        });
    });
}

int plait_pick_random(const float* logits, int64_t rows, int64_t vocab, const plait::Filters* filters, int64_t* ids) {
    return guarded([&] {
        Team::get().run([&](Team& team) {
            team.each(rows, [&](int64_t row) {
                ids[row] = plait::sample_random(logits + row * vocab, vocab, filters->temperature[row], filters->min_p[row],
                                              filters->uniform[row]);
            });
        });
    });
}

int plait_pick_filtered(const float* logits, int64_t rows, int64_t vocab, const plait::Filters* filters,
                        int64_t* ids) {
    return guarded([&] {
        Team::get().run([&](Team& team) {
            team.each(rows, [&](int64_t row) {
                ids[row] = plait::sample_filtered(logits + row * vocab, vocab, *filters, row);
            });
        });
    });
}

}  // extern "C"
#pragma GCC visibility pop
