// The C interface, declared for Python in kernels/plait_kernels/cpu/library.py. Built once for each instruction set.
//
// `type` is 0 for bfloat16 and 1 for float32. Pointers are to contiguous arrays of the sizes given; nothing is kept.
// Every function returns a Status.
#include <exception>
#include <system_error>

#include "adjust.h"
#include "decoder.h"
#include "experts.h"
#include "mask.h"
#include "sampling.h"

namespace {

using plait::BFloat16;
using plait::Float32;
using plait::ThreadPool;

// Calls work.operator()<Type>() for a type's number.
template <class Work>
void dispatch_dtype(int type, const Work& work) {
    if (type == 0)
        work.template operator()<BFloat16>();
    else
        work.template operator()<Float32>();
}

// As kernels/plait_kernels/cpu/library.py declares it.
enum Status : int { kDone, kNoMemory, kNoThreads };

// Runs the work; no exception leaves the library.
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
    return guarded([&] { ThreadPool::get().resize(num_threads); });
}

int plait_pack_dense(const void* weight, int64_t outputs, int64_t inputs, int type, uint32_t* panels) {
    return guarded([&] {
        dispatch_dtype(type, [&]<class Type>() {
            ThreadPool::get().run([&](ThreadPool& pool) { plait::pack<Type>(pool, weight, outputs, inputs, panels); });
        });
    });
}

// blocks [outputs, inputs / a block's] of a GGUF.
int plait_pack_blocks(const uint8_t* blocks, int64_t outputs, int64_t inputs, int64_t format, uint8_t* panels) {
    return guarded([&] {
        plait::dispatch_format(plait::BlockFormat(format), [&]<class Format>() {
            ThreadPool::get().run(
                [&](ThreadPool& pool) { plait::pack_blocks<Format>(pool, blocks, outputs, inputs, panels); });
        });
    });
}

int plait_gemm(const plait::Matrix* matrix, const void* x, int64_t rows, int type, int type_out, void* out) {
    return guarded([&] {
        static std::mutex mutex;
        static plait::QuantisedScratch scratch;
        std::lock_guard lock(mutex);
        if (!matrix->is_dense()) scratch.fit(rows, matrix->inputs);
        dispatch_dtype(type, [&]<class Type>() {
            dispatch_dtype(type_out, [&]<class Out>() {
                using Raw = typename Type::Raw;
                const plait::Inputs<Type> inputs(*matrix, static_cast<Raw*>(const_cast<void*>(x)), scratch);
                ThreadPool::get().run([&](ThreadPool& pool) {
                    inputs.quantise_all(pool, rows);
                    plait::linear<Type, Out>(pool, *matrix, inputs, rows, out);
                });
            });
        });
    });
}

int plait_rms_norm(const void* x, const void* weight, int64_t rows, int64_t stride, int64_t width, double eps,
                   int type, void* out) {
    return guarded([&] {
        dispatch_dtype(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            for (int64_t row = 0; row < rows; ++row)
                plait::rms_norm<Type, Type>(static_cast<const Raw*>(x) + row * stride, static_cast<const Raw*>(weight),
                                            width, float(eps), static_cast<Raw*>(out) + row * width);
        });
    });
}

int plait_attention(const plait::Rows* rows, const void* queries, int64_t query_stride, const plait::KvView* keys,
                    const plait::KvView* values, int type, void* out, float* lse) {
    return guarded([&] {
        dispatch_dtype(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            ThreadPool::get().run([&](ThreadPool& pool) {
                plait::Attention<Type>{*rows,   static_cast<const Raw*>(queries), query_stride, *keys,
                                       *values, static_cast<Raw*>(out),           lse}
                    .run(pool);
            });
        });
    });
}

int plait_store_kv(const plait::Rows* rows, const void* keys, int64_t key_stride, const void* values,
                int64_t value_stride, int type, void* pages) {
    return guarded([&] {
        dispatch_dtype(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            plait::store_rows<Type>(*rows, static_cast<const Raw*>(keys), key_stride, static_cast<const Raw*>(values),
                                    value_stride, static_cast<Raw*>(pages));
        });
    });
}

// x and out [tokens, inputs].
int plait_moe(const plait::Experts* experts, const plait::Pairs* pairs, const void* x, int type, void* out) {
    return guarded([&] {
        dispatch_dtype(type, [&]<class Type>() {
            using Raw = typename Type::Raw;
            plait::experts<Type>(*experts, *pairs, static_cast<const Raw*>(x), static_cast<Raw*>(out));
        });
    });
}

int plait_decoder_stack(const plait::Decoder* decoder, const plait::Rows* rows, const plait::Activations* step,
                        int type) {
    return guarded([&] {
        dispatch_dtype(type, [&]<class Type>() { plait::decode<Type>(*decoder, *rows, *step); });
    });
}

// Ids [rows] from logits [rows, vocab].
int plait_sample_greedy(const float* logits, int64_t rows, int64_t vocab, int64_t* ids) {
    return guarded([&] {
        ThreadPool::get().run([&](ThreadPool& pool) {
            pool.parallel_for(rows, [&](int64_t row) { ids[row] = plait::sample_greedy(logits + row * vocab, vocab); });
        });
    });
}

int plait_sample_random(const float* logits, int64_t rows, int64_t vocab, const plait::Filters* filters, int64_t* ids) {
    return guarded([&] {
        ThreadPool::get().run([&](ThreadPool& pool) {
            pool.parallel_for(rows, [&](int64_t row) {
                ids[row] = plait::sample_random(logits + row * vocab, vocab, filters->temperature[row],
                                                filters->min_p[row], filters->uniform[row]);
            });
        });
    });
}

int plait_sample_filtered(const float* logits, int64_t rows, int64_t vocab, const plait::Filters* filters,
                        int64_t* ids) {
    return guarded([&] {
        ThreadPool::get().run([&](ThreadPool& pool) {
            pool.parallel_for(rows, [&](int64_t row) {
                ids[row] = plait::sample_filtered(logits + row * vocab, vocab, *filters, row);
            });
        });
    });
}

// New logits [rows, vocab].
int plait_adjust_logits(const float* logits, int64_t rows, int64_t vocab, const plait::Adjustments* changes,
                        float* out) {
    return guarded([&] {
        ThreadPool::get().run([&](ThreadPool& pool) {
            pool.parallel_for(rows, [&](int64_t row) {
                plait::adjust_logits(logits + row * vocab, vocab, *changes, row, out + row * vocab);
            });
        });
    });
}

// New logits [rows, vocab]; masks are [M, words] and mask_rows name one for each row.
int plait_mask_logits(const float* logits, int64_t rows, int64_t vocab, const uint32_t* masks, int64_t words,
                      const int64_t* mask_rows, float* out) {
    return guarded([&] {
        ThreadPool::get().run([&](ThreadPool& pool) {
            pool.parallel_for(rows, [&](int64_t row) {
                plait::mask_logits(logits + row * vocab, vocab, masks + mask_rows[row] * words, out + row * vocab);
            });
        });
    });
}

}  // extern "C"
#pragma GCC visibility pop
