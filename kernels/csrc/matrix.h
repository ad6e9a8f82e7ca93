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

// How a matrix lies in memory: cells of its type, or a GGUF's blocks (blocks.h).
enum class Storage : int64_t { kCells, kQ4_0, kQ4_1, kQ8_0 };

// As kernels/plait_kernels/cpu/library.py declares it.
struct Matrix {
    const void* weights;  // cells [panels, inputs / per cell, 32], or blocks [panels, inputs / 32]
    const void* bias;     // [outputs] in the type of the activations, or null
    int64_t outputs;
    int64_t inputs;
    Storage storage;
    int64_t row_bits;  // where it is in blocks: 8 or 16 of each input

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    template <class Type>
    int64_t depth() const { return inputs / Type::kPerCell; }
    template <class Type>
    const uint32_t* panel(int64_t index) const {
        return static_cast<const uint32_t*>(weights) + index * depth<Type>() * kPanel;
    }
};

// One row's sums over some panels.
template <int Panels>
using Sums = Floats[Panels * kVectors];

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

template <class Type, int Rows, int Panels>
__attribute__((noinline)) void sum_cells(const uint32_t* x, int64_t stride, const uint32_t* w, int64_t apart,
                                         int64_t depth, Sums<Panels>* out) {
    Tile<Type, Rows, Panels> tile;
    tile.clear();
    tile.sum(x, stride, w, apart, depth);
    for (int row = 0; row < Rows; ++row)
        for (int v = 0; v < Panels * kVectors; ++v) out[row][v] = tile.sums[row][v];
}

// Calls work.template operator()<Rows>(first row) over `rows` rows in tiles of nearly equal height, at most MaxRows.
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
