// Paged attention: keys and values are read from the pages, 64 keys at a time, with an online softmax in float32
// (arXiv 2205.14135).
//
// Shapes: M query heads of one key-value head; dims of a head: D where keys and values are as wide, else E of a query
// or key, V of a value.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "matrix.h"
#include "scratch.h"
#include "row_ops.h"

namespace plait {

constexpr int64_t kKeys = 64;
// Up to so many heads of one query token read keys and values in place: packing them into panels takes longer.
constexpr int64_t kFewHeads = 8;

// Some query tokens of one row, one item of work. As plait_kernels/cpu/library.py declares it.
struct QueryTile {
    int32_t row;
    int32_t first;  // query token in the row
    int32_t count;
};

// The rows of one step. As plait_kernels/cpu/library.py declares it.
struct Rows {
    const int64_t* starts;        // [rows]: position of the row's first token
    const int64_t* ends;          // [rows]: positions from here on are masked
    const int64_t* first_tokens;  // [rows + 1]: where each row's tokens begin in the batch
    const int32_t* table;         // [rows, table_width]
    const QueryTile* query_tiles;
    int64_t num_rows;
    int64_t num_query_tiles;
    int64_t table_width;
    int64_t page_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    double scale;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t num_tokens() const { return first_tokens[num_rows]; }
    int64_t row_of(int64_t token) const {
        return std::upper_bound(first_tokens, first_tokens + num_rows, token) - first_tokens - 1;
    }
};

// Keys, or values, in pages; strides in elements. As plait_kernels/cpu/library.py declares it.
struct KvView {
    void* first;
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;

    template <class Raw>
    Raw* at(const Rows& rows, int64_t row, int64_t position, int64_t head) const {
        const int64_t page = rows.table[row * rows.table_width + position / rows.page_size];
        return static_cast<Raw*>(first) + page * page_stride + position % rows.page_size * token_stride +
               head * head_stride;
    }
};

// Keys and values of pages [pages, 2, kv heads, page size, D].
template <class Raw>
struct PagedHeads {
    KvView keys, values;

    PagedHeads(const Rows& rows, Raw* pages) {
        const int64_t head = rows.page_size * rows.key_dim, half = rows.num_kv_heads * head;
        keys = {pages, 2 * half, rows.key_dim, head};
        values = {pages + half, 2 * half, rows.key_dim, head};
    }

    Raw* key(const Rows& rows, int64_t row, int64_t position, int64_t head) const {
        return keys.at<Raw>(rows, row, position, head);
    }
    Raw* value(const Rows& rows, int64_t row, int64_t position, int64_t head) const {
        return values.at<Raw>(rows, row, position, head);
    }
};

// One query's online softmax.
struct Running {
    float largest = -std::numeric_limits<float>::infinity();
    float total = 0;

    // Makes weights of the next 64 keys' scores, of which `visible` count; returns the factor for earlier sums.
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
    for_each_vector(
        count, [&](int64_t i) { Type::write(out + i, load<Floats>(sums + i) * factor); },
        [&](int64_t i) { Type::write_one(out + i, sums[i] * factor); });
}

// Keys [key][head dim] of up to 64 tokens as panels of 32 keys: [2][words of head dim][32].
template <class Type>
void pack_keys(const typename Type::Raw* const* keys, int64_t count, int64_t num_words, uint32_t* panels) {
    for (int64_t key = 0; key < kKeys; ++key) {
        uint32_t* to = panels + key / kPanel * num_words * kPanel + key % kPanel;
        const auto* from = reinterpret_cast<const uint32_t*>(keys[std::min(key, count - 1)]);
        for (int64_t word = 0; word < num_words; ++word) to[word * kPanel] = from[word];
    }
}

// Values as panels of 32 dimensions: [panels][words of 64 keys][32]; zero after the last key and dimension.
template <class Type>
void pack_values(const typename Type::Raw* const* values, int64_t count, int64_t dim, uint32_t* panels) {
    constexpr int64_t num_words = kKeys / Type::kPerWord;
    const int64_t whole = dim / kLanes * kLanes;
    std::fill(panels, panels + (dim + kPanel - 1) / kPanel * num_words * kPanel, 0u);
    for (int64_t key = 0; key < count; key += Type::kPerWord) {
        const auto at = [&](int64_t i) {
            return panels + (i / kPanel * num_words + key / Type::kPerWord) * kPanel + i % kPanel;
        };
        for (int64_t i = 0; i < whole; i += kLanes) store(at(i), Type::pack_words(values + key, count - key, i));
        for (int64_t i = whole; i < dim; ++i)
            for (int64_t j = 0; j < std::min<int64_t>(Type::kPerWord, count - key); ++j)
                reinterpret_cast<typename Type::Raw*>(at(i))[j] = values[key + j][i];
    }
}

// Writes each token's keys and values [kv heads, D] into the pages of its row's table.
template <class Type>
void store_rows(const Rows& rows, const typename Type::Raw* keys, int64_t key_stride,
                const typename Type::Raw* values, int64_t value_stride, typename Type::Raw* pages) {
    using Raw = typename Type::Raw;
    const int64_t dim = rows.key_dim;
    const PagedHeads<Raw> cache(rows, pages);
    for (int64_t row = 0; row < rows.num_rows; ++row)
        for (int64_t token = rows.first_tokens[row]; token < rows.first_tokens[row + 1]; ++token)
            for (int64_t head = 0; head < rows.num_kv_heads; ++head) {
                const int64_t position = rows.starts[row] + token - rows.first_tokens[row];
                std::memcpy(cache.key(rows, row, position, head), keys + token * key_stride + head * dim,
                            dim * sizeof(Raw));
                std::memcpy(cache.value(rows, row, position, head), values + token * value_stride + head * dim,
                            dim * sizeof(Raw));
            }
}

// Queries, cache and result of one layer.
template <class Type>
struct Attention {
    using Raw = typename Type::Raw;

    const Rows& rows;
    const Raw* queries;  // token t's head h at t * query_stride + h * E
    int64_t query_stride;
    KvView key_cache, value_cache;
    Raw* out;    // [tokens, heads, V]
    float* lse;  // [tokens, heads], base 2, or null

    const Raw* query(int64_t token, int64_t head) const { return queries + token * query_stride + head * rows.key_dim; }

    void run(ThreadPool& pool) const {
        const int64_t heads = rows.num_kv_heads;
        pool.parallel_for(rows.num_query_tiles * heads, [&](int64_t item) {
            const QueryTile& tile = rows.query_tiles[item / heads];
            if (tile.count == 1 && rows.group() <= kFewHeads)
                attend_one_query(tile, item % heads);
            else
                attend_many_queries(tile, item % heads);
        });
    }

private:
    // Addresses of the keys and values of up to 64 positions; returns how many.
    int64_t find(const QueryTile& tile, int64_t head, int64_t begin, int64_t end, const Raw** keys,
                 const Raw** values) const {
        const int64_t count = std::min(kKeys, end - begin);
        for (int64_t i = 0; i < count;) {
            const Raw* key = key_cache.at<Raw>(rows, tile.row, begin + i, head);
            const Raw* value = value_cache.at<Raw>(rows, tile.row, begin + i, head);
            const int64_t in_page = std::min(count - i, rows.page_size - (begin + i) % rows.page_size);
            for (int64_t j = 0; j < in_page; ++j, ++i) {
                keys[i] = key + j * key_cache.token_stride;
                values[i] = value + j * value_cache.token_stride;
            }
        }
        return count;
    }

    // The first position that no token of the tile sees.
    int64_t end_of(const QueryTile& tile) const {
        return std::min(rows.starts[tile.row] + tile.first + tile.count, rows.ends[tile.row]);
    }

    // Writes one query's output.
    void end(const float* sums, const Running& running, int64_t token, int64_t head) const {
        const int64_t index = token * rows.num_heads + head;
        finish<Type>(sums, rows.value_dim, running.total, out + index * rows.value_dim);
        if (lse) lse[index] = running.largest * 1.44269504088896341f + std::log2(running.total);
    }

    // Prefetches a key or value of `dim` elements.
    static void prefetch(const Raw* from, int64_t dim) {
        for (int64_t i = 0; i < dim; i += 64 / int64_t(sizeof(Raw))) __builtin_prefetch(from + i, 0, 2);
    }

    // One query token: its heads read each key and value in place.
    void attend_one_query(const QueryTile& tile, int64_t head) const {
        const int64_t group = rows.group(), dim = rows.value_dim, token = rows.first_tokens[tile.row] + tile.first;
        const int64_t last = end_of(tile);
        float* sums = scratch<float, 0>(group * dim);
        float* scores = scratch<float, 1>(group * kKeys);
        Running* running = scratch<Running, 2>(group);
        std::fill(sums, sums + group * dim, 0.0f);
        std::fill(running, running + group, Running{});
        const Raw *keys[kKeys], *values[kKeys], *later_keys[kKeys], *later_values[kKeys];
        int64_t later = find(tile, head, 0, last, later_keys, later_values);
        for (int64_t begin = 0; begin < last; begin += kKeys) {
            const int64_t count = later;
            std::copy_n(later_keys, count, keys);
            std::copy_n(later_values, count, values);
            if (begin + kKeys < last) {
                later = find(tile, head, begin + kKeys, last, later_keys, later_values);
                for (int64_t i = 0; i < later; ++i) {
                    prefetch(later_keys[i], rows.key_dim);
                    prefetch(later_values[i], dim);
                }
            }
            for (int64_t i = 0; i < group; ++i) {
                score(query(token, head * group + i), keys, count, scores + i * kKeys);
                scale_row(sums + i * dim, dim, running[i].take(scores + i * kKeys, float(rows.scale), count));
            }
            for_each_tile<4>(group, [&]<int Heads>(int64_t first) {
                add_values<Heads>(scores + first * kKeys, values, count, sums + first * dim);
            });
        }
        for (int64_t i = 0; i < group; ++i) end(sums + i * dim, running[i], token, head * group + i);
    }

    void score(const Raw* query, const Raw* const* keys, int64_t count, float* scores) const {
        const int64_t num_words = rows.key_dim / Type::kPerWord;
        if (num_words == kLanes) return score_vectors<1>(query, keys, count, scores);
        if (num_words == 2 * kLanes) return score_vectors<2>(query, keys, count, scores);
        if (num_words == 4 * kLanes) return score_vectors<4>(query, keys, count, scores);
        score_any(query, keys, count, num_words, scores);
    }

    // Heads of whole vectors: the query stays in registers, and the sums of several keys hide each other's latency.
    template <int Vectors>
    static void score_vectors(const Raw* query, const Raw* const* keys, int64_t count, float* scores) {
        Words q[Vectors];
        for (int v = 0; v < Vectors; ++v) q[v] = load<Words>(reinterpret_cast<const uint32_t*>(query) + v * kLanes);
        for (int64_t first = 0; first < count; first += kLanes) {
            Floats dots[kLanes];
            for (int64_t j = 0; j < kLanes; ++j) {
                const auto* k = reinterpret_cast<const uint32_t*>(keys[std::min(first + j, count - 1)]);
                dots[j] = Floats{};
                for (int v = 0; v < Vectors; ++v)
                    dots[j] = Type::dot_add(dots[j], load<Words>(k + v * kLanes), q[v]);
            }
            store(scores + first, sums(dots));
        }
    }

    static void score_any(const Raw* query, const Raw* const* keys, int64_t count, int64_t num_words, float* scores) {
        const auto* q = reinterpret_cast<const uint32_t*>(query);
        for (int64_t key = 0; key < count; ++key) {
            const auto* k = reinterpret_cast<const uint32_t*>(keys[key]);
            Floats dots{};
            float rest = 0;
            for_each_vector(
                num_words,
                [&](int64_t i) { dots = Type::dot_add(dots, load<Words>(k + i), load<Words>(q + i)); },
                [&](int64_t i) { rest += Type::dot_add(Floats{}, all(k[i]), all(q[i]))[0]; });
            scores[key] = sum(dots) + rest;
        }
    }

    template <int Heads>
    void add_values(const float* weights, const Raw* const* values, int64_t count, float* sums) const {
        const int64_t dim = rows.value_dim;
        for_each_vector(
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

    // Several query tokens: their heads are the rows of two GEMMs, with keys and values packed into panels.
    void attend_many_queries(const QueryTile& tile, int64_t head) const {
        const int64_t group = rows.group(), dim = rows.key_dim, num_words = dim / Type::kPerWord;
        const int64_t count = tile.count * group, width = (rows.value_dim + kPanel - 1) / kPanel * kPanel;
        const int64_t token = rows.first_tokens[tile.row] + tile.first;
        const int64_t position = rows.starts[tile.row] + tile.first, last = end_of(tile);
        float* sums = scratch<float, 0>(count * width);
        Running* running = scratch<Running, 2>(count);
        Raw* gathered = scratch<Raw, 3>(count * dim);
        uint32_t* key_panels = scratch<uint32_t, 4>(kKeys * num_words);
        uint32_t* value_panels = scratch<uint32_t, 5>(kKeys / Type::kPerWord * width);
        std::fill(sums, sums + count * width, 0.0f);
        std::fill(running, running + count, Running{});
        for (int64_t i = 0; i < count; ++i)
            std::memcpy(gathered + i * dim, query(token + i / group, head * group + i % group), dim * sizeof(Raw));
        const Raw *keys[kKeys], *values[kKeys];
        for (int64_t begin = 0; begin < last; begin += kKeys) {
            const int64_t found = find(tile, head, begin, last, keys, values);
            pack_keys<Type>(keys, found, num_words, key_panels);
            pack_values<Type>(values, found, rows.value_dim, value_panels);
            for_each_tile<kTileRows>(count, [&]<int Height>(int64_t first) {
                // Query i sees the keys up to its own position.
                const auto visible = [&](int64_t i) { return std::min(found, position + i / group + 1 - begin); };
                if (visible(first + Height - 1) <= 0) return;
                attend_tile<Height>(gathered + first * dim, key_panels, value_panels, sums + first * width,
                                    running + first, [&](int64_t i) { return visible(first + i); });
            });
        }
        for (int64_t i = 0; i < count; ++i)
            end(sums + i * width, running[i], token + i / group, head * group + i % group);
    }

    template <int Height, class Visible>
    void attend_tile(const Raw* queries, const uint32_t* key_panels, const uint32_t* value_panels, float* sums,
              Running* running, const Visible& visible) const {
        const int64_t num_words = rows.key_dim / Type::kPerWord;
        const int64_t width = (rows.value_dim + kPanel - 1) / kPanel * kPanel;
        constexpr int64_t key_words = kKeys / Type::kPerWord;
        alignas(64) float scores[Height][kKeys];
        alignas(64) Raw weights[Height][kKeys];
        for (int64_t panel = 0; panel < kKeys / kPanel; ++panel) {
            Tile<Type, Height, 1> gemm;
            gemm.clear();
            gemm.add(reinterpret_cast<const uint32_t*>(queries), num_words, key_panels + panel * num_words * kPanel, 0,
                     num_words);
            for (int i = 0; i < Height; ++i)
                for (int v = 0; v < kVectors; ++v) store(scores[i] + panel * kPanel + v * kLanes, gemm.sums[i][v]);
        }
        for (int i = 0; i < Height; ++i) {
            scale_row(sums + i * width, width, running[i].take(scores[i], float(rows.scale), visible(i)));
            for (int64_t key = 0; key < kKeys; key += kLanes)
                Type::write(weights[i] + key, load<Floats>(scores[i] + key));
        }
        for (int64_t first = 0; first < width; first += kPanel) {
            Tile<Type, Height, 1> gemm;
            for (int i = 0; i < Height; ++i)
                for (int v = 0; v < kVectors; ++v)
                    gemm.sums[i][v] = load<Floats>(sums + i * width + first + v * kLanes);
            gemm.add(reinterpret_cast<const uint32_t*>(weights), key_words, value_panels + first * key_words, 0,
                     key_words);
            for (int i = 0; i < Height; ++i)
                for (int v = 0; v < kVectors; ++v)
                    store(sums + i * width + first + v * kLanes, gemm.sums[i][v]);
        }
    }
};

}  // namespace plait
