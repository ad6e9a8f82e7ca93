// GEMM of rows with a packed matrix, dense or of GGUF blocks, on the thread pool.
#pragma once

#include "gguf.h"

namespace plait {

// Runs of panels for each worker: one that loses its core delays only a short run.
constexpr int64_t kRuns = 6;

// Calls work(row) for each row, in whole groups. A worker mostly gets the rows that for_each_panel gives it too.
template <class Work>
void for_each_row(ThreadPool& pool, int64_t rows, const Work& work) {
    pool.parallel_for_affine(num_groups(rows), [&](int64_t group) {
        for (int64_t row = group * kGroupRows; row < std::min((group + 1) * kGroupRows, rows); ++row) work(row);
    });
}

// A GEMM's input rows: elements of the type, or quantised for a matrix of GGUF blocks.
template <class Type>
struct Inputs {
    using Raw = typename Type::Raw;

    Raw* x;  // [rows, inputs]
    QuantisedRows quantised;
    int num_bytes;  // of a quantised element; 0 if the GEMM reads x

    Inputs(const Matrix& matrix, Raw* x, QuantisedScratch& scratch)
        : x(x),
          quantised(scratch.rows(matrix.inputs)),
          num_bytes(int(matrix.activation_bits / 8)) {}

    // Rows from `row` on, which begins a group of the quantised ones; in x it is row `x_row`.
    Inputs from(int64_t row, int64_t x_row, int64_t width) const {
        Inputs rest = *this;
        rest.x += x_row * width;
        rest.quantised.first_group += row / kGroupRows;
        return rest;
    }

    // Rows that are no GEMM's input.
    explicit Inputs(Raw* x) : x(x), quantised{}, num_bytes(0) {}

    // Writes 32 inputs of a row.
    void put(int64_t row, int64_t first, int64_t width, const Floats* values) const {
        if (num_bytes > 0) return quantise(row, first / kBlockInputs, values);
        for (int v = 0; v < kVectors; ++v) Type::write(x + row * width + first + v * kLanes, values[v]);
    }

    // Quantises block `block` of a row.
    void quantise(int64_t row, int64_t block, const Floats* values) const {
        if (num_bytes == 1)
            quantise_block<1>(values, row % kGroupRows, quantised.group<1>(row / kGroupRows)[block]);
        else
            quantise_block<2>(values, row % kGroupRows, quantised.group<2>(row / kGroupRows)[block]);
    }

    // Quantises all blocks of a row.
    void quantise_row(int64_t row, const Raw* from) const {
        for (int64_t block = 0; block < quantised.num_blocks; ++block, from += kBlockInputs) {
            Floats values[kBlockInputs / kLanes];
            for (int v = 0; v < kBlockInputs / kLanes; ++v) values[v] = Type::read(from + v * kLanes);
            quantise(row, block, values);
        }
    }

    // Quantises all of x if the GEMM needs it.
    void quantise_all(ThreadPool& pool, int64_t rows) const {
        if (num_bytes == 0) return;
        const int64_t width = quantised.num_blocks * kBlockInputs;
        for_each_row(pool, rows, [&](int64_t row) { quantise_row(row, x + row * width); });
    }
};

// Parts of the rows' tiles: their inputs fit the L2 cache, and workers get equally many unless parts become less than
// half as large.
inline int64_t num_parts(int64_t tiles, int64_t tiles_together, int64_t workers) {
    const int64_t least = (tiles + tiles_together - 1) / tiles_together;
    const int64_t sharing = std::max<int64_t>(1, std::min(workers, 2 * tiles / tiles_together));
    return (least + sharing - 1) / sharing * sharing;
}

// Calls work(first tile, number of tiles, panel): some tiles of rows use one panel before the next is read.
// Many rows are divided among the workers, and each worker reads all panels: its rows stay in its caches from one GEMM
// to the next. Few rows are one part: workers then take runs of adjacent panels, which memory delivers fastest.
template <class Work>
void for_each_panel(ThreadPool& pool, int64_t tiles, int64_t tiles_together, int64_t panels, const Work& work) {
    const int64_t parts = num_parts(tiles, tiles_together, pool.size());
    const int64_t runs = std::min<int64_t>(panels, kRuns * pool.size());
    pool.parallel_for_affine(parts * runs, [&](int64_t item) {
        const int64_t part = item / runs, run = item % runs, begin = tiles * part / parts;
        for (int64_t panel = panels * run / runs; panel < panels * (run + 1) / runs; ++panel)
            work(begin, tiles * (part + 1) / parts - begin, panel);
    });
}

// Over `Panels` panels at a time, which lie panels / Panels apart: end(row, first output of the first one, all sums).
template <class Type, int Panels, class End>
void gemm_dense(ThreadPool& pool, const Matrix& matrix, const void* x, int64_t rows, const End& end) {
    constexpr int kMost = Panels == 1 ? kTileRows : kPairRows;
    const auto* words = static_cast<const uint32_t*>(x);
    const int64_t num_words = matrix.num_words<Type>(), panels = matrix.panels() / Panels;
    for_each_panel(pool, rows, kBlockRows, panels, [&](int64_t begin, int64_t count, int64_t panel) {
        for_each_tile<kMost>(count, [&]<int Rows>(int64_t first) {
            Sums<Panels> sums[Rows];
            dense_tile<Type, Rows, Panels>(words + (begin + first) * num_words, num_words, matrix.panel<Type>(panel),
                                          panels * num_words * kPanel, num_words, sums);
            for (int row = 0; row < Rows; ++row) end(begin + first + row, panel * kPanel, sums[row]);
        });
    });
}

template <class Type, int NumBytes, int Panels, class End>
void gemm_gguf(ThreadPool& pool, const Matrix& matrix, const QuantisedRows& x, int64_t rows, const End& end) {
    const int64_t panels = matrix.panels() / Panels;
    const int64_t groups = num_groups(rows), groups_together = kBlockRows / kGroupRows;
    for_each_panel(pool, groups, groups_together, panels, [&](int64_t begin, int64_t count, int64_t panel) {
        for (int64_t group = begin; group < begin + count; ++group) {
            const int64_t first = group * kGroupRows;
            for_each_tile<kGroupRows>(std::min<int64_t>(kGroupRows, rows - first), [&]<int Rows>(int64_t) {
                Sums<Panels> sums[Rows];
                for (int i = 0; i < Panels; ++i)
                    with_panel(matrix, i * panels + panel, [&]<class Format>(const uint8_t* weights) {
                        gguf_tile<Format, NumBytes, Rows>(x, group, weights, sums[0] + i * kVectors,
                                                           Panels * kVectors);
                    });
                for (int row = 0; row < Rows; ++row) end(first + row, panel * kPanel, sums[row]);
            });
        }
    });
}

template <class Type, int Panels, class End>
void gemm_panels(ThreadPool& pool, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, const End& end) {
    if (inputs.num_bytes == 0)
        gemm_dense<Type, Panels>(pool, matrix, inputs.x, rows, end);
    else if (inputs.num_bytes == 1)
        gemm_gguf<Type, 1, Panels>(pool, matrix, inputs.quantised, rows, end);
    else
        gemm_gguf<Type, 2, Panels>(pool, matrix, inputs.quantised, rows, end);
}

// x [rows, inputs] times the matrix: end(row, first output, sums of 32 outputs, number of them that exist).
template <class Type, class End>
void gemm(ThreadPool& pool, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, const End& end) {
    gemm_panels<Type, 1>(pool, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* sums) {
        end(row, first, sums, int(std::min<int64_t>(kPanel, matrix.outputs - first)));
    });
}

// As gemm, over panels j and j + panels / 2 together: end(row, first output, gate sums, up sums). Gates and ups are a
// multiple of 32 each.
template <class Type, class End>
void gemm_gate_up(ThreadPool& pool, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, const End& end) {
    gemm_panels<Type, 2>(pool, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* sums) {
        end(row, first, sums, sums + kVectors);
    });
}

// Adds the bias of outputs first.. to a panel's sums.
template <class Type>
inline void add_bias(const Matrix& matrix, int64_t first, int exist, Floats* sums) {
    if (matrix.bias == nullptr) return;
    const auto* bias = static_cast<const typename Type::Raw*>(matrix.bias) + first;
    for (int i = 0; i < exist; ++i) sums[i / kLanes][i % kLanes] += Type::read_one(bias + i);
}

// Writes the outputs of a panel that exist.
template <class Type>
inline void write_panel(typename Type::Raw* to, const Floats* sums, int exist) {
    if (exist == kPanel) {
        for (int v = 0; v < kVectors; ++v) Type::write(to + v * kLanes, sums[v]);
        return;
    }
    for (int i = 0; i < exist; ++i) Type::write_one(to + i, sums[i / kLanes][i % kLanes]);
}

// out [rows, outputs] in type Out.
template <class Type, class Out>
void linear(ThreadPool& pool, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, void* out) {
    auto* to = static_cast<typename Out::Raw*>(out);
    gemm<Type>(pool, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* sums, int exist) {
        add_bias<Type>(matrix, first, exist, sums);
        write_panel<Out>(to + row * matrix.outputs + first, sums, exist);
    });
}

// silu(gate) * up of a GEMM whose outputs are gates, then ups.
template <class Type>
void gate_up_silu(ThreadPool& pool, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows,
                  const Inputs<Type>& out) {
    const int64_t width = matrix.outputs / 2;
    gemm_gate_up<Type>(pool, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* gate, Floats* up) {
        add_bias<Type>(matrix, first, kPanel, gate);
        add_bias<Type>(matrix, first + width, kPanel, up);
        for (int v = 0; v < kVectors; ++v) gate[v] = silu(gate[v]) * up[v];
        out.put(row, first, width, gate);
    });
}

}  // namespace plait
