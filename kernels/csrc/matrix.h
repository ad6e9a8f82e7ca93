// Weight matrices packed into panels once, and the GEMM micro-kernel over them.
//
// A panel holds 32 outputs: for each word of the input (a pair of bfloat16 elements or one float32), the 32 outputs'
// words side by side. Every output is summed in the order of the inputs, whatever the number of rows, so that a row's
// result does not depend on its batch.
#pragma once

#include <algorithm>

#include "simd.h"
#include "thread_pool.h"

namespace plait {

constexpr int kPanel = 32;
constexpr int kVectors = kPanel / kLanes;
// Rows of a register tile: its accumulators, a row's words and the panel's vectors fill the registers.
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;
constexpr int kPairRows = kLanes == 16 ? 6 : 1;
// Rows that share a panel before the next one is read: their inputs stay in the L2 cache.
constexpr int64_t kBlockRows = 96;

// As kernels/plait_kernels/cpu/library.py numbers them; gguf_formats.h has them.
enum class BlockFormat : int64_t { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

// Some panels of a matrix in GGUF blocks. As kernels/plait_kernels/cpu/library.py declares it.
struct BlockPanels {
    const uint8_t* panels;
    int64_t num_panels;
    BlockFormat format;
};

// As kernels/plait_kernels/cpu/library.py declares it.
struct Matrix {
    const void* weights;  // words [panels, inputs / per word, 32], or BlockPanels, one below the other
    const void* bias;     // [outputs] in the type of the activations, or null
    int64_t outputs;
    int64_t inputs;
    int64_t activation_bits;  // for GGUF blocks: 8 or 16 bits of each input; 0 for words

    bool is_dense() const { return activation_bits == 0; }
    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    template <class Type>
    int64_t num_words() const { return inputs / Type::kPerWord; }
    template <class Type>
    const uint32_t* panel(int64_t index) const {
        return static_cast<const uint32_t*>(weights) + index * num_words<Type>() * kPanel;
    }
};

// One row's sums over some panels.
template <int Panels>
using Sums = Floats[Panels * kVectors];

// Accumulators of `Rows` rows of x, `stride` words apart, over `Panels` panels, `apart` words apart.
template <class Type, int Rows, int Panels>
struct Tile {
    Floats sums[Rows][Panels * kVectors];

    void clear() {
        for (auto& row : sums)
            for (auto& each : row) each = Floats{};
    }

    // All inputs. Long sums are made of runs, so that float32 loses no more than a run's rounding.
    __attribute__((always_inline)) void sum(const uint32_t* x, int64_t stride, const uint32_t* w, int64_t apart,
                                            int64_t num_words) {
        add(x, stride, w, apart, std::min(num_words, Type::kRun));
        for (int64_t begin = std::min(num_words, Type::kRun); begin < num_words; begin += Type::kRun) {
            Tile run;
            run.clear();
            run.add(x + begin, stride, w + begin * kPanel, apart, std::min(Type::kRun, num_words - begin));
            for (int row = 0; row < Rows; ++row)
                for (int v = 0; v < Panels * kVectors; ++v) sums[row][v] += run.sums[row][v];
        }
    }

    __attribute__((always_inline)) void add(const uint32_t* x, int64_t stride, const uint32_t* w, int64_t apart,
                                            int64_t num_words) {
        for (int64_t word = 0; word < num_words; ++word) {
            Words columns[Panels * kVectors];
            for (int v = 0; v < Panels * kVectors; ++v)
                columns[v] = load<Words>(w + (v / kVectors) * apart + word * kPanel + (v % kVectors) * kLanes);
            for (int row = 0; row < Rows; ++row) {
                const Words value = all(x[row * stride + word]);
                for (int v = 0; v < Panels * kVectors; ++v)
                    sums[row][v] = Type::dot_add(sums[row][v], columns[v], value);
            }
        }
    }
};

template <class Type, int Rows, int Panels>
__attribute__((noinline)) void dense_tile(const uint32_t* x, int64_t stride, const uint32_t* w, int64_t apart,
                                         int64_t num_words, Sums<Panels>* out) {
    Tile<Type, Rows, Panels> tile;
    tile.clear();
    tile.sum(x, stride, w, apart, num_words);
    for (int row = 0; row < Rows; ++row)
        for (int v = 0; v < Panels * kVectors; ++v) out[row][v] = tile.sums[row][v];
}

// Calls work.template operator()<Rows>(first row) over `rows` rows in tiles of nearly equal height, at most MaxRows.
template <int MaxRows, class Work>
void for_each_tile(int64_t rows, const Work& work) {
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
void pack(ThreadPool& pool, const void* weight, int64_t outputs, int64_t inputs, uint32_t* panels) {
    const int64_t num_words = inputs / Type::kPerWord;
    const auto* words = static_cast<const uint32_t*>(weight);
    pool.parallel_for((outputs + kPanel - 1) / kPanel, [&](int64_t panel) {
        uint32_t* to = panels + panel * num_words * kPanel;
        for (int64_t word = 0; word < num_words; ++word)
            for (int64_t i = 0; i < kPanel; ++i) {
                const int64_t output = panel * kPanel + i;
                *to++ = output < outputs ? words[output * num_words + word] : 0;
            }
    });
}

}  // namespace plait
