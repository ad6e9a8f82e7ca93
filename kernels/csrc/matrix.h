// Products with a matrix that was put into panels once.
//
// A panel holds 32 outputs: for each cell of the input (two bfloat16 numbers or one float32), the 32 outputs' cells
// side by side. Every output is summed in the order of the inputs, whatever the number of rows, so that a row's result
// does not depend on the batch it is in.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace plait {

constexpr int kPanel = 32;
constexpr int kVectors = kPanel / kLanes;
// Rows of a tile: its sums, a row of cells and the panel's vectors fill the registers.
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;
constexpr int kPairRows = kLanes == 16 ? 6 : 1;
// Rows that go over one panel before the next: their inputs stay in the second-level cache.
constexpr int64_t kBlockRows = 96;

// As kernels/plait_kernels/cpu/library.py declares it.
struct Matrix {
    const uint32_t* cells;  // [panels, inputs / per cell, 32]
    const void* bias;       // [outputs] in the matrix's type, or null
    int64_t outputs;
    int64_t inputs;

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    template <class Type>
    int64_t depth() const { return inputs / Type::kPerCell; }
    template <class Type>
    const uint32_t* panel(int64_t index) const { return cells + index * depth<Type>() * kPanel; }
};

// Sums of `Rows` rows of x, whose cells lie `stride` apart, over `Panels` panels that lie `apart` apart.
template <class Type, int Rows, int Panels>
struct Tile {
    Floats sums[Rows][Panels * kVectors];

    void clear() {
        for (auto& row : sums)
            for (auto& each : row) each = Floats{};
    }

    // The whole of a product. Long sums are made of runs, so that float32 loses no more than a run's rounding.
    __attribute__((always_inline)) void sum(const uint32_t* x, int64_t stride, const uint32_t* w, int64_t apart,
                                            int64_t depth) {
        add(x, stride, w, apart, std::min(depth, Type::kRun));
        for (int64_t begin = std::min(depth, Type::kRun); begin < depth; begin += Type::kRun) {
            Tile run;
            run.clear();
            run.add(x + begin, stride, w + begin * kPanel, apart, std::min(Type::kRun, depth - begin));
            for (int row = 0; row < Rows; ++row)
                for (int v = 0; v < Panels * kVectors; ++v) sums[row][v] += run.sums[row][v];
        }
    }

    __attribute__((always_inline)) void add(const uint32_t* x, int64_t stride, const uint32_t* w, int64_t apart,
                                            int64_t depth) {
        for (int64_t cell = 0; cell < depth; ++cell) {
            Cells columns[Panels * kVectors];
            for (int v = 0; v < Panels * kVectors; ++v)
                columns[v] = load<Cells>(w + (v / kVectors) * apart + cell * kPanel + (v % kVectors) * kLanes);
            for (int row = 0; row < Rows; ++row) {
                const Cells value = all(x[row * stride + cell]);
                for (int v = 0; v < Panels * kVectors; ++v)
                    sums[row][v] = Type::multiply(sums[row][v], columns[v], value);
            }
        }
    }
};

// Calls work.template tile<Rows>(first row) over `rows` rows in tiles of nearly equal height, at most MaxRows.
template <int MaxRows, class Work>
void in_tiles(int64_t rows, const Work& work) {
    const int64_t tiles = (rows + MaxRows - 1) / MaxRows;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t first = rows * i / tiles, height = rows * (i + 1) / tiles - first;
        [&]<int... Heights>(std::integer_sequence<int, Heights...>) {
            (void)((height == Heights + 1 && (work.template operator()<Heights + 1>(first), true)) || ...);
        }(std::make_integer_sequence<int, MaxRows>{});
    }
}

// x [rows, inputs] times each panel; end(row, first output, sums of 32 outputs, number of them that exist).
template <class Type, class End>
void multiply(Team& team, const Matrix& matrix, const void* x, int64_t rows, const End& end) {
    const auto* cells = static_cast<const uint32_t*>(x);
    const int64_t depth = matrix.depth<Type>(), panels = matrix.panels();
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    team.each(blocks * panels, [&](int64_t item) {
        const int64_t block = item / panels, panel = item % panels;
        const int64_t begin = rows * block / blocks, count = rows * (block + 1) / blocks - begin;
        const int exist = int(std::min<int64_t>(kPanel, matrix.outputs - panel * kPanel));
        in_tiles<kTileRows>(count, [&]<int Rows>(int64_t first) {
            Tile<Type, Rows, 1> tile;
            tile.clear();
            tile.sum(cells + (begin + first) * depth, depth, matrix.panel<Type>(panel), 0, depth);
            for (int row = 0; row < Rows; ++row) end(begin + first + row, panel * kPanel, tile.sums[row], exist);
        });
    });
}

// As multiply, over panels j and j + panels / 2 together: end(row, first output, sums of both, number that exist).
// The outputs are two halves of a multiple of 32.
template <class Type, class End>
void multiply_halves(Team& team, const Matrix& matrix, const void* x, int64_t rows, const End& end) {
    const auto* cells = static_cast<const uint32_t*>(x);
    const int64_t depth = matrix.depth<Type>(), panels = matrix.panels() / 2;
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    team.each(blocks * panels, [&](int64_t item) {
        const int64_t block = item / panels, panel = item % panels;
        const int64_t begin = rows * block / blocks, count = rows * (block + 1) / blocks - begin;
        in_tiles<kPairRows>(count, [&]<int Rows>(int64_t first) {
            Tile<Type, Rows, 2> tile;
            tile.clear();
            tile.sum(cells + (begin + first) * depth, depth, matrix.panel<Type>(panel), panels * depth * kPanel, depth);
            for (int row = 0; row < Rows; ++row)
                end(begin + first + row, panel * kPanel, tile.sums[row], tile.sums[row] + kVectors);
        });
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
void linear(Team& team, const Matrix& matrix, const void* x, int64_t rows, void* out) {
    auto* to = static_cast<typename Out::Raw*>(out);
    multiply<Type>(team, matrix, x, rows, [&](int64_t row, int64_t first, Floats* sums, int exist) {
        add_bias<Type>(matrix, first, exist, sums);
        write_panel<Out>(to + row * matrix.outputs + first, sums, exist);
    });
}

// weight [outputs, inputs] into panels; outputs beyond the last are zero.
template <class Type>
void pack(Team& team, const void* weight, int64_t outputs, int64_t inputs, uint32_t* panels) {
    const int64_t depth = inputs / Type::kPerCell;
    const auto* cells = static_cast<const uint32_t*>(weight);
    team.each((outputs + kPanel - 1) / kPanel, [&](int64_t panel) {
        uint32_t* to = panels + panel * depth * kPanel;
        for (int64_t cell = 0; cell < depth; ++cell)
            for (int64_t i = 0; i < kPanel; ++i) {
                const int64_t output = panel * kPanel + i;
                *to++ = output < outputs ? cells[output * depth + cell] : 0;
            }
    });
}

}  // namespace plait
