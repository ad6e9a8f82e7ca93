// A stack of dense decoder blocks in one call: x + attention(norm(x)), then x + mlp(norm(x)), layer after layer.
//
// The residual stream is float32: it is not rounded between the layers.
#pragma once

#include <mutex>
#include <vector>

#include "attention.h"
#include "gemm.h"

namespace plait {

// One decoder layer's weights and cache. As kernels/plait_kernels/cpu/library.py declares it.
struct Layer {
    Matrix qkv;
    Matrix output;
    Matrix gate_up;
    Matrix down;
    const void* attention_norm;
    const void* mlp_norm;
    const void* q_norm;  // null if heads are not normalised
    const void* k_norm;
    void* pages;
};

// As kernels/plait_kernels/cpu/library.py declares it.
struct Decoder {
    const Layer* layers;
    const void* norm;
    int64_t num_layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    double eps;
};

// One step's tensors.
struct Activations {
    const float* cos;  // [tokens, D]
    const float* sin;
    void* hidden;  // [tokens, hidden]: embeddings in, normalised states out
};

// Scratch buffers of a step; they keep the size of the largest step.
template <class Type>
struct Buffers {
    using Raw = typename Type::Raw;
    std::vector<float> residual;
    std::vector<Raw> qkv, attended, gated;
    QuantisedScratch scratch, gate_scratch;
};

// Normalises one token's query and key heads if the model does, rotates them, and writes keys and values to the pages.
template <class Type>
void rope_and_cache_token(const Rows& rows, const Layer& layer, const Activations& step, float eps, int64_t token,
                 typename Type::Raw* qkv) {
    using Raw = typename Type::Raw;
    const int64_t dim = rows.key_dim, row = rows.row_of(token);
    const int64_t position = rows.starts[row] + token - rows.first_tokens[row];
    const float *cos = step.cos + token * dim, *sin = step.sin + token * dim;
    const PagedHeads<Raw> cache(rows, static_cast<Raw*>(layer.pages));
    const auto rotate_head = [&](Raw* head, const void* norm, Raw* out) {
        if (norm) rms_norm<Type, Type>(head, static_cast<const Raw*>(norm), dim, eps, head);
        rotate<Type>(head, cos, sin, dim, out);
    };
    for (int64_t head = 0; head < rows.num_heads; ++head, qkv += dim) rotate_head(qkv, layer.q_norm, qkv);
    for (int64_t head = 0; head < rows.num_kv_heads; ++head, qkv += dim)
        rotate_head(qkv, layer.k_norm, cache.key(rows, row, position, head));
    for (int64_t head = 0; head < rows.num_kv_heads; ++head, qkv += dim)
        std::memcpy(cache.value(rows, row, position, head), qkv, dim * sizeof(Raw));
}

// Normalises one row of the residual stream into the next GEMM's input.
template <class Type>
void normalise_row(const float* residual, const typename Type::Raw* weight, int64_t count, float eps, int64_t row,
                   const Inputs<Type>& out) {
    if (out.num_bytes == 0) return rms_norm<Float32, Type>(residual, weight, count, eps, out.x + row * count);
    const float factor = rms_factor<Float32>(residual, count, eps);
    for (int64_t block = 0; block < count / kBlockInputs; ++block) {
        Floats values[kBlockInputs / kLanes];
        for (int v = 0; v < kBlockInputs / kLanes; ++v) {
            const int64_t i = block * kBlockInputs + v * kLanes;
            values[v] = load<Floats>(residual + i) * factor * Type::read(weight + i);
        }
        out.quantise(row, block, values);
    }
}

// Adds a GEMM's result to the residual stream, unrounded.
template <class Type>
void gemm_add(ThreadPool& pool, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, float* residual) {
    gemm<Type>(pool, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* sums, int exist) {
        add_bias<Type>(matrix, first, exist, sums);
        float* to = residual + row * matrix.outputs + first;
        if (exist == kPanel)
            for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, load<Floats>(to + v * kLanes) + sums[v]);
        else
            for (int i = 0; i < exist; ++i) to[i] += sums[i / kLanes][i % kLanes];
    });
}

template <class Type>
void decode_layers(ThreadPool& pool, const Decoder& decoder, const Rows& rows, const Activations& step,
                   Buffers<Type>& buffers) {
    using Raw = typename Type::Raw;
    const int64_t tokens = rows.num_tokens(), hidden = decoder.hidden_size, dim = rows.key_dim;
    const int64_t width = (rows.num_heads + 2 * rows.num_kv_heads) * dim;
    const float eps = float(decoder.eps);
    float* residual = buffers.residual.data();
    QuantisedScratch &scratch = buffers.scratch, &gate_scratch = buffers.gate_scratch;
    Raw *x = static_cast<Raw*>(step.hidden), *qkv = buffers.qkv.data();
    Raw *attended = buffers.attended.data(), *gates = buffers.gated.data();
    const auto normalise = [&](const void* weight, const Inputs<Type>& out) {
        for_each_row(pool, tokens, [&](int64_t token) {
            normalise_row<Type>(residual + token * hidden, static_cast<const Raw*>(weight), hidden, eps, token, out);
        });
    };
    for_each_row(pool, tokens, [&](int64_t token) {
        const Raw* from = x + token * hidden;
        float* to = residual + token * hidden;
        for_each_vector(
            hidden, [&](int64_t i) { store(to + i, Type::read(from + i)); },
            [&](int64_t i) { to[i] = Type::read_one(from + i); });
    });
    for (int64_t index = 0; index < decoder.num_layers; ++index) {
        const Layer& layer = decoder.layers[index];
        const Inputs<Type> to_attention(layer.qkv, x, scratch), to_mlp(layer.gate_up, x, scratch);
        const Inputs<Type> from_attention(layer.output, attended, scratch), to_down(layer.down, gates, gate_scratch);
        normalise(layer.attention_norm, to_attention);
        linear<Type, Type>(pool, layer.qkv, to_attention, tokens, qkv);
        for_each_row(pool, tokens, [&](int64_t token) {
            rope_and_cache_token<Type>(rows, layer, step, eps, token, qkv + token * width);
        });
        const PagedHeads<Raw> cache(rows, static_cast<Raw*>(layer.pages));
        Attention<Type>{rows, qkv, width, cache.keys, cache.values, attended, nullptr}.run(pool);
        from_attention.quantise_all(pool, tokens);
        gemm_add<Type>(pool, layer.output, from_attention, tokens, residual);
        normalise(layer.mlp_norm, to_mlp);
        gate_up_silu<Type>(pool, layer.gate_up, to_mlp, tokens, to_down);
        gemm_add<Type>(pool, layer.down, to_down, tokens, residual);
    }
    normalise(decoder.norm, Inputs<Type>(x));
}

// The most inputs of a matrix of GGUF blocks.
inline int64_t most_quantised_inputs(const Decoder& decoder) {
    int64_t widest = 0;
    for (const Layer* layer = decoder.layers; layer < decoder.layers + decoder.num_layers; ++layer)
        for (const Matrix* matrix : {&layer->qkv, &layer->output, &layer->gate_up, &layer->down})
            if (!matrix->is_dense()) widest = std::max(widest, matrix->inputs);
    return widest;
}

template <class Type>
void decode(const Decoder& decoder, const Rows& rows, const Activations& step) {
    static std::mutex mutex;
    static Buffers<Type> buffers;
    std::lock_guard lock(mutex);
    const int64_t tokens = rows.num_tokens(), widest = most_quantised_inputs(decoder);
    fit(buffers.residual, tokens * decoder.hidden_size);
    fit(buffers.qkv, tokens * (rows.num_heads + 2 * rows.num_kv_heads) * rows.key_dim);
    fit(buffers.attended, tokens * rows.num_heads * rows.key_dim);
    fit(buffers.gated, tokens * decoder.intermediate_size);
    buffers.scratch.fit(tokens, widest);
    buffers.gate_scratch.fit(tokens, widest);
    ThreadPool::get().run([&](ThreadPool& pool) { decode_layers<Type>(pool, decoder, rows, step, buffers); });
}

}  // namespace plait
