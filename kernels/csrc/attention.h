// Attention over a paged cache [pages, 2, kv heads, page size, head dim], straight from the pages.
//
// Keys are taken 64 at a time with a running maximum and sum (arXiv 2205.14135), in float32. Shapes: M query heads of
// one key-value head, D numbers in a head.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "matrix.h"
#include "room.h"
#include "rows.h"

namespace plait {

constexpr int64_t kKeys = 64;

// A piece of work: some query tokens of one row. As plait_kernels/cpu/library.py declares it.
struct Piece {
    int32_t row;
    int32_t first;  // query token in the row
    int32_t count;
};

// The rows of one step. As plait_kernels/cpu/library.py declares it.
struct Rows {
    const int64_t* starts;        // [rows]: tokens of context before the row's first one
    const int64_t* first_tokens;  // [rows + 1]: where each row's tokens begin in the batch
    const int32_t* table;         // [rows, table_width]
    const Piece* pieces;
    int64_t num_rows;
    int64_t num_pieces;
    int64_t table_width;
    int64_t page_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    double scale;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t num_tokens() const { return first_tokens[num_rows]; }
    int64_t row_of(int64_t token) const {
        return std::upper_bound(first_tokens, first_tokens + num_rows, token) - first_tokens - 1;
    }
    // Index of a key's first number in a layer's pages; its value lies value_offset() further.
    int64_t place(int64_t row, int64_t position, int64_t head) const {
        const int64_t page = table[row * table_width + position / page_size];
        return ((page * 2 * num_kv_heads + head) * page_size + position % page_size) * head_dim;
    }
    int64_t value_offset() const { return num_kv_heads * page_size * head_dim; }
};

// Softmax as far as one query's keys were seen.
struct Running {
    float largest = -std::numeric_limits<float>::infinity();
    float total = 0;

    // Turns the scores of the next 64 keys, of which `visible` count, into weights; returns the factor of what was
    // summed before.
    float take(float* scores, float scale, int64_t visible) {
        if (visible <= 0) {
            std::fill(scores, scores + kKeys, 0.0f);
            return 1.0f;
        }
        const Floats lowest = all(-std::numeric_limits<float>::infinity());
        Floats best = lowest;
        for (int64_t i = 0; i < kKeys; i += kLanes) {
            Floats score = load<Floats>(scores + i) * scale;
            if (visible < kKeys) score = lane_numbers() + int32_t(i) < int32_t(visible) ? score : lowest;
            store(scores + i, score);
            best = plait::largest(best, score);
        }
        const float before = largest;
        largest = std::max(before, largest_lane(best));
        Floats sums{};
        for (int64_t i = 0; i < kKeys; i += kLanes) {
            const Floats weight = exponential(load<Floats>(scores + i) - largest);
            store(scores + i, weight);
            sums += weight;
        }
        const float factor = before == largest ? 1.0f : exponential(all(before - largest))[0];
        total = total * factor + sum(sums);
        return factor;
    }
};

inline void scale_row(float* row, int64_t count, float factor) {
    if (factor != 1.0f)
        for (int64_t i = 0; i < count; ++i) row[i] *= factor;
}

// The sum of one query's weighted values, divided by the sum of its weights.
template <class Type>
inline void finish(const float* sums, int64_t count, float total, typename Type::Raw* out) {
    const float factor = total > 0 ? 1.0f / total : 0.0f;
    in_vectors(
        count, [&](int64_t i) { Type::write(out + i, load<Floats>(sums + i) * factor); },
        [&](int64_t i) { Type::write_one(out + i, sums[i] * factor); });
}

// Keys [key][head dim] of up to 64 tokens as panels of 32 keys: [2][cells of head dim][32].
template <class Type>
void pack_keys(const typename Type::Raw* const* keys, int64_t count, int64_t depth, uint32_t* panels) {
    for (int64_t key = 0; key < kKeys; ++key) {
        uint32_t* to = panels + key / kPanel * depth * kPanel + key % kPanel;
        const auto* from = reinterpret_cast<const uint32_t*>(keys[std::min(key, count - 1)]);
        for (int64_t cell = 0; cell < depth; ++cell) to[cell * kPanel] = from[cell];
    }
}

// Values as panels of 32 dimensions: [panels][cells of 64 keys][32]; zero behind the last key and dimension.
template <class Type>
void pack_values(const typename Type::Raw* const* values, int64_t count, int64_t dim, uint32_t* panels) {
    constexpr int64_t depth = kKeys / Type::kPerCell;
    std::fill(panels, panels + (dim + kPanel - 1) / kPanel * depth * kPanel, 0u);
    for (int64_t key = 0; key < count; ++key) {
        const auto* from = values[key];
        for (int64_t first = 0; first < dim; first += kPanel) {
            auto* to = reinterpret_cast<typename Type::Raw*>(panels + (first * depth) + key / Type::kPerCell * kPanel) +
                       key % Type::kPerCell;
            const int64_t width = std::min<int64_t>(kPanel, dim - first);
            for (int64_t i = 0; i < width; ++i) to[i * Type::kPerCell] = from[first + i];
        }
    }
}

// Each token's keys and values [kv heads, D] into the pages that its row's table names.
template <class Type>
void store_rows(const Rows& rows, const typename Type::Raw* keys, int64_t key_stride,
                const typename Type::Raw* values, int64_t value_stride, typename Type::Raw* pages) {
    const int64_t dim = rows.head_dim;
    for (int64_t row = 0; row < rows.num_rows; ++row)
        for (int64_t token = rows.first_tokens[row]; token < rows.first_tokens[row + 1]; ++token)
            for (int64_t head = 0; head < rows.num_kv_heads; ++head) {
                const int64_t position = rows.starts[row] + token - rows.first_tokens[row];
                auto* key = pages + rows.place(row, position, head);
                std::memcpy(key, keys + token * key_stride + head * dim, dim * sizeof *key);
                std::memcpy(key + rows.value_offset(), values + token * value_stride + head * dim, dim * sizeof *key);
            }
}

// Queries, cache and result of one layer.
template <class Type>
struct Attention {
    using Raw = typename Type::Raw;

    const Rows& rows;
    const Raw* queries;  // token t's head h at t * query_stride + h * D
    int64_t query_stride;
    const Raw* pages;
    Raw* out;  // [tokens, heads, D]

    const Raw* query(int64_t token, int64_t head) const { return queries + token * query_stride + head * rows.head_dim; }
    Raw* result(int64_t token, int64_t head) const {
        return out + (token * rows.num_heads + head) * rows.head_dim;
    }

    void run(Team& team) const {
        const int64_t heads = rows.num_kv_heads;
        team.each(rows.num_pieces * heads, [&](int64_t item) {
            const Piece& piece = rows.pieces[item / heads];
            if (piece.count == 1)
                attend_one(piece, item % heads);
            else
                attend_many(piece, item % heads);
        });
    }

private:
    // Where the keys and values of up to 64 positions lie; returns how many.
    int64_t find(const Piece& piece, int64_t head, int64_t begin, int64_t end, const Raw** keys,
                 const Raw** values) const {
        const int64_t count = std::min(kKeys, end - begin);
        for (int64_t i = 0; i < count;) {
            const Raw* first = pages + rows.place(piece.row, begin + i, head);
            const int64_t in_page = std::min(count - i, rows.page_size - (begin + i) % rows.page_size);
            for (int64_t j = 0; j < in_page; ++j, ++i) {
                keys[i] = first + j * rows.head_dim;
                values[i] = keys[i] + rows.value_offset();
            }
        }
        return count;
    }

    // Asks for a key or value that is read soon.
    void fetch(const Raw* from) const {
        for (int64_t i = 0; i < rows.head_dim; i += 64 / int64_t(sizeof(Raw))) __builtin_prefetch(from + i, 0, 2);
    }

    // One query token: its heads read each key and value where it lies.
    void attend_one(const Piece& piece, int64_t head) const {
        const int64_t group = rows.group(), dim = rows.head_dim, token = rows.first_tokens[piece.row] + piece.first;
        const int64_t end = rows.starts[piece.row] + piece.first + 1;
        float* sums = room<float, 0>(group * dim);
        float* scores = room<float, 1>(group * kKeys);
        Running* running = room<Running, 2>(group);
        std::fill(sums, sums + group * dim, 0.0f);
        std::fill(running, running + group, Running{});
        const Raw *keys[kKeys], *values[kKeys], *later_keys[kKeys], *later_values[kKeys];
        int64_t later = find(piece, head, 0, end, later_keys, later_values);
        for (int64_t begin = 0; begin < end; begin += kKeys) {
            const int64_t count = later;
            std::copy_n(later_keys, count, keys);
            std::copy_n(later_values, count, values);
            if (begin + kKeys < end) {
                later = find(piece, head, begin + kKeys, end, later_keys, later_values);
                for (int64_t i = 0; i < later; ++i) {
                    fetch(later_keys[i]);
                    fetch(later_values[i]);
                }
            }
            for (int64_t i = 0; i < group; ++i) {
                score(query(token, head * group + i), keys, count, scores + i * kKeys);
                scale_row(sums + i * dim, dim, running[i].take(scores + i * kKeys, float(rows.scale), count));
            }
            in_tiles<4>(group, [&]<int Heads>(int64_t first) {
                add_values<Heads>(scores + first * kKeys, values, count, sums + first * dim);
            });
        }
        for (int64_t i = 0; i < group; ++i)
            finish<Type>(sums + i * dim, dim, running[i].total, result(token, head * group + i));
    }

    void score(const Raw* query, const Raw* const* keys, int64_t count, float* scores) const {
        const int64_t depth = rows.head_dim / Type::kPerCell;
        if (depth == kLanes) return score_vectors<1>(query, keys, count, scores);
        if (depth == 2 * kLanes) return score_vectors<2>(query, keys, count, scores);
        if (depth == 4 * kLanes) return score_vectors<4>(query, keys, count, scores);
        score_any(query, keys, count, depth, scores);
    }

    // Heads of so many whole vectors: the query stays in registers, a vector of keys' sums hide each other's latency.
    template <int Vectors>
    static void score_vectors(const Raw* query, const Raw* const* keys, int64_t count, float* scores) {
        Cells q[Vectors];
        for (int v = 0; v < Vectors; ++v) q[v] = load<Cells>(reinterpret_cast<const uint32_t*>(query) + v * kLanes);
        for (int64_t first = 0; first < count; first += kLanes) {
            Floats products[kLanes];
            for (int64_t j = 0; j < kLanes; ++j) {
                const auto* k = reinterpret_cast<const uint32_t*>(keys[std::min(first + j, count - 1)]);
                products[j] = Floats{};
                for (int v = 0; v < Vectors; ++v)
                    products[j] = Type::multiply(products[j], load<Cells>(k + v * kLanes), q[v]);
            }
            store(scores + first, sums(products));
        }
    }

    static void score_any(const Raw* query, const Raw* const* keys, int64_t count, int64_t depth, float* scores) {
        const auto* q = reinterpret_cast<const uint32_t*>(query);
        for (int64_t key = 0; key < count; ++key) {
            const auto* k = reinterpret_cast<const uint32_t*>(keys[key]);
            Floats products{};
            float rest = 0;
            in_vectors(
                depth,
                [&](int64_t i) { products = Type::multiply(products, load<Cells>(k + i), load<Cells>(q + i)); },
                [&](int64_t i) { rest += Type::multiply(Floats{}, all(k[i]), all(q[i]))[0]; });
            scores[key] = sum(products) + rest;
        }
    }

    template <int Heads>
    void add_values(const float* weights, const Raw* const* values, int64_t count, float* sums) const {
        const int64_t dim = rows.head_dim;
        in_vectors(
            dim,
            [&](int64_t i) {
                Floats totals[Heads];
                for (int head = 0; head < Heads; ++head) totals[head] = load<Floats>(sums + head * dim + i);
                for (int64_t key = 0; key < count; ++key) {
                    const Floats value = Type::read(values[key] + i);
                    for (int head = 0; head < Heads; ++head) totals[head] += weights[head * kKeys + key] * value;
                }
                for (int head = 0; head < Heads; ++head) store(sums + head * dim + i, totals[head]);
            },
            [&](int64_t i) {
                for (int64_t key = 0; key < count; ++key)
                    for (int head = 0; head < Heads; ++head)
                        sums[head * dim + i] += weights[head * kKeys + key] * Type::read_one(values[key] + i);
            });
    }

    // Several query tokens: their heads are the rows of two products, with keys and values put into panels.
    void attend_many(const Piece& piece, int64_t head) const {
        const int64_t group = rows.group(), dim = rows.head_dim, depth = dim / Type::kPerCell;
        const int64_t count = piece.count * group, width = (dim + kPanel - 1) / kPanel * kPanel;
        const int64_t token = rows.first_tokens[piece.row] + piece.first;
        const int64_t position = rows.starts[piece.row] + piece.first, end = position + piece.count;
        float* sums = room<float, 0>(count * width);
        Running* running = room<Running, 2>(count);
        Raw* gathered = room<Raw, 3>(count * dim);
        uint32_t* key_panels = room<uint32_t, 4>(kKeys * depth);
        uint32_t* value_panels = room<uint32_t, 5>(kKeys / Type::kPerCell * width);
        std::fill(sums, sums + count * width, 0.0f);
        std::fill(running, running + count, Running{});
        for (int64_t i = 0; i < count; ++i)
            std::memcpy(gathered + i * dim, query(token + i / group, head * group + i % group), dim * sizeof(Raw));
        const Raw *keys[kKeys], *values[kKeys];
        for (int64_t begin = 0; begin < end; begin += kKeys) {
            const int64_t found = find(piece, head, begin, end, keys, values);
            pack_keys<Type>(keys, found, depth, key_panels);
            pack_values<Type>(values, found, dim, value_panels);
            in_tiles<kTileRows>(count, [&]<int Height>(int64_t first) {
                // Query i sees the keys up to its own position.
                const auto visible = [&](int64_t i) { return std::min(found, position + i / group + 1 - begin); };
                if (visible(first + Height - 1) <= 0) return;
                tile<Height>(gathered + first * dim, key_panels, value_panels, sums + first * width, running + first,
                             [&](int64_t i) { return visible(first + i); });
            });
        }
        for (int64_t i = 0; i < count; ++i)
            finish<Type>(sums + i * width, dim, running[i].total, result(token + i / group, head * group + i % group));
    }

    template <int Height, class Visible>
    void tile(const Raw* queries, const uint32_t* key_panels, const uint32_t* value_panels, float* sums,
              Running* running, const Visible& visible) const {
        const int64_t dim = rows.head_dim, depth = dim / Type::kPerCell, width = (dim + kPanel - 1) / kPanel * kPanel;
        constexpr int64_t cells = kKeys / Type::kPerCell;
        alignas(64) float scores[Height][kKeys];
        alignas(64) Raw weights[Height][kKeys];
        for (int64_t panel = 0; panel < kKeys / kPanel; ++panel) {
            Tile<Type, Height, 1> products;
            products.clear();
            products.add(reinterpret_cast<const uint32_t*>(queries), depth, key_panels + panel * depth * kPanel, 0,
                         depth);
            for (int i = 0; i < Height; ++i)
                for (int v = 0; v < kVectors; ++v) store(scores[i] + panel * kPanel + v * kLanes, products.sums[i][v]);
        }
        for (int i = 0; i < Height; ++i) {
            scale_row(sums + i * width, width, running[i].take(scores[i], float(rows.scale), visible(i)));
            for (int64_t key = 0; key < kKeys; key += kLanes)
                Type::write(weights[i] + key, load<Floats>(scores[i] + key));
        }
        for (int64_t first = 0; first < width; first += kPanel) {
            Tile<Type, Height, 1> products;
            for (int i = 0; i < Height; ++i)
                for (int v = 0; v < kVectors; ++v)
                    products.sums[i][v] = load<Floats>(sums + i * width + first + v * kLanes);
            products.add(reinterpret_cast<const uint32_t*>(weights), cells, value_panels + first * cells, 0, cells);
            for (int i = 0; i < Height; ++i)
                for (int v = 0; v < kVectors; ++v)
                    store(sums + i * width + first + v * kLanes, products.sums[i][v]);
        }
    }
};

}  // namespace plait
