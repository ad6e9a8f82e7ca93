// Products of many rows with a matrix, however it is stored, by a team.
#pragma once

#include "blocks.h"

namespace plait {

// Pieces of a matrix for each member, so that one that loses its core holds up a small one.
constexpr int64_t kRuns = 6;

// Calls work(row) for each: whole groups, and mostly those rows of a member that over_panels gives it too.
template <class Work>
void over_groups(Team& team, int64_t rows, const Work& work) {
    team.shares(num_groups(rows), [&](int64_t group) {
        for (int64_t row = group * kGroupRows; row < std::min((group + 1) * kGroupRows, rows); ++row) work(row);
    });
}

// Rows of a product's inputs: numbers of the type, or what a matrix in blocks takes of them.
template <class Type>
struct Inputs {
    using Raw = typename Type::Raw;

    Raw* x;  // [rows, inputs]
    Rounded rounded;
    int num_bytes;  // of a rounded number; 0 where the product takes x

    Inputs(const Matrix& matrix, Raw* x, RoundedRoom& room)
        : x(x),
          rounded(room.rows(matrix.inputs)),
          num_bytes(matrix.storage == Storage::kCells ? 0 : int(matrix.row_bits / 8)) {}

    // Rows that nothing is multiplied by here.
    explicit Inputs(Raw* x) : x(x), rounded{}, num_bytes(0) {}

    // Puts in 32 inputs of a row.
    void put(int64_t row, int64_t first, int64_t width, const Floats* values) const {
        if (num_bytes > 0) return round(row, first / kBlockInputs, values);
        for (int v = 0; v < kVectors; ++v) Type::write(x + row * width + first + v * kLanes, values[v]);
    }

    // The same, of block `block`, where the product takes them rounded.
    void round(int64_t row, int64_t block, const Floats* values) const {
        if (num_bytes == 1)
            round_block<1>(values, row % kGroupRows, rounded.group<1>(row / kGroupRows)[block]);
        else
            round_block<2>(values, row % kGroupRows, rounded.group<2>(row / kGroupRows)[block]);
    }

    // Puts in all of x where the product takes something else.
    void round_all(Team& team, int64_t rows) const {
        if (num_bytes == 0) return;
        over_groups(team, rows, [&](int64_t row) {
            for (int64_t block = 0; block < rounded.num_blocks; ++block) {
                Floats values[kBlockInputs / kLanes];
                const Raw* from = x + (row * rounded.num_blocks + block) * kBlockInputs;
                for (int v = 0; v < kBlockInputs / kLanes; ++v) values[v] = Type::read(from + v * kLanes);
                round(row, block, values);
            }
        });
    }
};

// Parts that a product's tiles are divided into: as large as their inputs' place in the second-level cache, and as many
// for one member as for another where that leaves each half of it.
inline int64_t num_parts(int64_t tiles, int64_t tiles_together, int64_t members) {
    const int64_t least = (tiles + tiles_together - 1) / tiles_together;
    const int64_t sharing = std::max<int64_t>(1, std::min(members, 2 * tiles / tiles_together));
    return (least + sharing - 1) / sharing * sharing;
}

// Calls work(first tile, number of tiles, panel): some tiles of rows go over one panel before the next. Many rows are
// divided among the members, each of which reads all panels: rows then stay on a core from one product to the next,
// while the few that share one part are read by all, who take panels that lie together, as memory gives them fastest.
template <class Work>
void over_panels(Team& team, int64_t tiles, int64_t tiles_together, int64_t panels, const Work& work) {
    const int64_t parts = num_parts(tiles, tiles_together, team.size());
    const int64_t runs = std::min<int64_t>(panels, kRuns * team.size());
    team.shares(parts * runs, [&](int64_t item) {
        const int64_t part = item / runs, run = item % runs, begin = tiles * part / parts;
        for (int64_t panel = panels * run / runs; panel < panels * (run + 1) / runs; ++panel)
            work(begin, tiles * (part + 1) / parts - begin, panel);
    });
}

// Of `Panels` panels that lie num_panels apart: end(row, first output of the first panel, sums of them all).
template <class Type, int Panels, class End>
void multiply_cells(Team& team, const Matrix& matrix, const void* x, int64_t rows, const End& end) {
    constexpr int kMost = Panels == 1 ? kTileRows : kPairRows;
    const auto* cells = static_cast<const uint32_t*>(x);
    const int64_t depth = matrix.depth<Type>(), panels = matrix.panels() / Panels;
    over_panels(team, rows, kBlockRows, panels, [&](int64_t begin, int64_t count, int64_t panel) {
        in_tiles<kMost>(count, [&]<int Rows>(int64_t first) {
            Sums<Panels> sums[Rows];
            sum_cells<Type, Rows, Panels>(cells + (begin + first) * depth, depth, matrix.panel<Type>(panel),
                                          panels * depth * kPanel, depth, sums);
            for (int row = 0; row < Rows; ++row) end(begin + first + row, panel * kPanel, sums[row]);
        });
    });
}

template <class Type, int NumBytes, int Panels, class End>
void multiply_blocks(Team& team, const Matrix& matrix, const Rounded& x, int64_t rows, const End& end) {
    const int64_t panels = matrix.panels() / Panels;
    of_format(matrix.storage, [&]<class Format>() {
        over_panels(team, num_groups(rows), kBlockRows / kGroupRows, panels, [&](int64_t begin, int64_t count, int64_t panel) {
            for (int64_t group = begin; group < begin + count; ++group) {
                const int64_t first = group * kGroupRows;
                in_tiles<kGroupRows>(std::min<int64_t>(kGroupRows, rows - first), [&]<int Rows>(int64_t) {
                    Sums<Panels> sums[Rows];
                    for (int i = 0; i < Panels; ++i)
                        sum_blocks<Format, NumBytes, Rows>(x, group, block_panel<Format>(matrix, i * panels + panel),
                                                           sums[0] + i * kVectors, Panels * kVectors);
                    for (int row = 0; row < Rows; ++row) end(first + row, panel * kPanel, sums[row]);
                });
            }
        });
    });
}

template <class Type, int Panels, class End>
void multiply_panels(Team& team, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, const End& end) {
    if (inputs.num_bytes == 0)
        multiply_cells<Type, Panels>(team, matrix, inputs.x, rows, end);
    else if (inputs.num_bytes == 1)
        multiply_blocks<Type, 1, Panels>(team, matrix, inputs.rounded, rows, end);
    else
        multiply_blocks<Type, 2, Panels>(team, matrix, inputs.rounded, rows, end);
}

// x [rows, inputs] times each panel; end(row, first output, sums of 32 outputs, number of them that exist).
template <class Type, class End>
void multiply(Team& team, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, const End& end) {
    multiply_panels<Type, 1>(team, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* sums) {
        end(row, first, sums, int(std::min<int64_t>(kPanel, matrix.outputs - first)));
    });
}

// As multiply, over panels j and j + panels / 2 together: end(row, first output, sums of one, sums of the other).
// The outputs are two halves of a multiple of 32.
template <class Type, class End>
void multiply_halves(Team& team, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, const End& end) {
    multiply_panels<Type, 2>(team, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* sums) {
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
void linear(Team& team, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, void* out) {
    auto* to = static_cast<typename Out::Raw*>(out);
    multiply<Type>(team, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* sums, int exist) {
        add_bias<Type>(matrix, first, exist, sums);
        write_panel<Out>(to + row * matrix.outputs + first, sums, exist);
    });
}

// silu(gate) * up of a product whose outputs are gates, then ups.
template <class Type>
void gated(Team& team, const Matrix& matrix, const Inputs<Type>& inputs, int64_t rows, const Inputs<Type>& out) {
    const int64_t width = matrix.outputs / 2;
    multiply_halves<Type>(team, matrix, inputs, rows, [&](int64_t row, int64_t first, Floats* gate, Floats* up) {
        add_bias<Type>(matrix, first, kPanel, gate);
        add_bias<Type>(matrix, first + width, kPanel, up);
        for (int v = 0; v < kVectors; ++v) gate[v] = silu(gate[v]) * up[v];
        out.put(row, first, width, gate);
    });
}

}  // namespace plait
