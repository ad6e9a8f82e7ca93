// Attention over keys and values that lie in pages, straight from the pages.
//
// Keys are taken 64 at a time with a running maximum and sum (arXiv 2205.14135), in float32. Shapes: M query heads of
// one key-value head; numbers of a head: D where keys and values are as wide, else E in a query or key, V in a value.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "matrix.h"
#include "room.h"
#include "rows.h"

namespace plait {

constexpr int64_t kKeys = 64;
// Up to so many heads of one query token read keys and values where they lie: putting those into panels takes longer.
constexpr int64_t kFewHeads = 8;

// A piece of work: some query tokens of one row. As plait_kernels/cpu/library.py declares it.
struct Piece {
    int32_t row;
    int32_t first;  // query token in the row
    int32_t count;
};

// The rows of one step. As plait_kernels/cpu/library.py declares it.
struct Rows {
    const int64_t* starts;        // [rows]: position of the row's first token
    const int64_t* ends;          // [rows]: positions from here on are nobody's to see
    const int64_t* first_tokens;  // [rows + 1]: where each row's tokens begin in the batch
    const int32_t* table;         // [rows, table_width]
    const Piece* pieces;
    int64_t num_rows;
    int64_t num_pieces;
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

// Keys, or values, in pages. As plait_kernels/cpu/library.py declares it; strides count numbers.
struct Cached {
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

// Of pages [pages, 2, kv heads, page size, D].
template <class Raw>
struct PagedHeads {
    Cached keys, values;

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
    const int64_t whole = dim / kLanes * kLanes;
    std::fill(panels, panels + (dim + kPanel - 1) / kPanel * depth * kPanel, 0u);
    for (int64_t key = 0; key < count; key += Type::kPerCell) {
        const auto place = [&](int64_t i) { return panels + (i / kPanel * depth + key / Type::kPerCell) * kPanel + i % kPanel; };
        for (int64_t i = 0; i < whole; i += kLanes) store(place(i), Type::cells(values + key, count - key, i));
        for (int64_t i = whole; i < dim; ++i)
            for (int64_t j = 0; j < std::min<int64_t>(Type::kPerCell, count - key); ++j)
                reinterpret_cast<typename Type::Raw*>(place(i))[j] = values[key + j][i];
    }
}

// Each token's keys and values [kv heads, D] into the pages that its row's table names.
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
    Cached key_cache, value_cache;
    Raw* out;    // [tokens, heads, V]
    float* lse;  // [tokens, heads], base 2, or null

    const Raw* query(int64_t token, int64_t head) const { return queries + token * query_stride + head * rows.key_dim; }

    void run(Team& team) const {
        const int64_t heads = rows.num_kv_heads;
        team.each(rows.num_pieces * heads, [&](int64_t item) {
            const Piece& piece = rows.pieces[item / heads];
            if (piece.count == 1 && rows.group() <= kFewHeads)
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
            const Raw* key = key_cache.at<Raw>(rows, piece.row, begin + i, head);
            const Raw* value = value_cache.at<Raw>(rows, piece.row, begin + i, head);
            const int64_t in_page = std::min(count - i, rows.page_size - (begin + i) % rows.page_size);
            for (int64_t j = 0; j < in_page; ++j, ++i) {
                keys[i] = key + j * key_cache.token_stride;
                values[i] = value + j * value_cache.token_stride;
            }
        }
        return count;
    }

    // The first position that none of the piece's tokens sees.
    int64_t end_of(const Piece& piece) const {
        return std::min(rows.starts[piece.row] + piece.first + piece.count, rows.ends[piece.row]);
    }

    // Writes what one query has found.
    void end(const float* sums, const Running& running, int64_t token, int64_t head) const {
        const int64_t place = token * rows.num_heads + head;
        finish<Type>(sums, rows.value_dim, running.total, out + place * rows.value_dim);
        if (lse) lse[place] = running.largest * 1.44269504088896341f + std::log2(running.total);
    }

    // Asks for a key or value of `dim` numbers that is read soon.
    static void fetch(const Raw* from, int64_t dim) {
        for (int64_t i = 0; i < dim; i += 64 / int64_t(sizeof(Raw))) __builtin_prefetch(from + i, 0, 2);
    }

    // One query token: its heads read each key and value where it lies.
    void attend_one(const Piece& piece, int64_t head) const {
        const int64_t group = rows.group(), dim = rows.value_dim, token = rows.first_tokens[piece.row] + piece.first;
        const int64_t last = end_of(piece);
        float* sums = room<float, 0>(group * dim);
        float* scores = room<float, 1>(group * kKeys);
        Running* running = room<Running, 2>(group);
        std::fill(sums, sums + group * dim, 0.0f);
        std::fill(running, running + group, Running{});
        const Raw *keys[kKeys], *values[kKeys], *later_keys[kKeys], *later_values[kKeys];
        int64_t later = find(piece, head, 0, last, later_keys, later_values);
        for (int64_t begin = 0; begin < last; begin += kKeys) {
            const int64_t count = later;
            std::copy_n(later_keys, count, keys);
            std::copy_n(later_values, count, values);
            if (begin + kKeys < last) {
                later = find(piece, head, begin + kKeys, last, later_keys, later_values);
                for (int64_t i = 0; i < later; ++i) {
                    fetch(later_keys[i], rows.key_dim);
                    fetch(later_values[i], dim);
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
        for (int64_t i = 0; i < group; ++i) end(sums + i * dim, running[i], token, head * group + i);
    }

    void score(const Raw* query, const Raw* const* keys, int64_t count, float* scores) const {
        const int64_t depth = rows.key_dim / Type::kPerCell;
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
        const int64_t dim = rows.value_dim;
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
        const int64_t group = rows.group(), dim = rows.key_dim, depth = dim / Type::kPerCell;
        const int64_t count = piece.count * group, width = (rows.value_dim + kPanel - 1) / kPanel * kPanel;
        const int64_t token = rows.first_tokens[piece.row] + piece.first;
        const int64_t position = rows.starts[piece.row] + piece.first, last = end_of(piece);
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
        for (int64_t begin = 0; begin < last; begin += kKeys) {
            const int64_t found = find(piece, head, begin, last, keys, values);
            pack_keys<Type>(keys, found, depth, key_panels);
            pack_values<Type>(values, found, rows.value_dim, value_panels);
            in_tiles<kTileRows>(count, [&]<int Height>(int64_t first) {
                // Query i sees the keys up to its own position.
                const auto visible = [&](int64_t i) { return std::min(found, position + i / group + 1 - begin); };
                if (visible(first + Height - 1) <= 0) return;
                tile<Height>(gathered + first * dim, key_panels, value_panels, sums + first * width, running + first,
                             [&](int64_t i) { return visible(first + i); });
            });
        }
        for (int64_t i = 0; i < count; ++i)
            end(sums + i * width, running[i], token + i / group, head * group + i % group);
    }

    template <int Height, class Visible>
    void tile(const Raw* queries, const uint32_t* key_panels, const uint32_t* value_panels, float* sums,
              Running* running, const Visible& visible) const {
        const int64_t depth = rows.key_dim / Type::kPerCell, width = (rows.value_dim + kPanel - 1) / kPanel * kPanel;
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
