// GEMM tile over weights in GGUF blocks of 32 inputs, kept as in the file: a few bits each, and a scale.
//
// A row of inputs is quantised to 8 or 16 bits, each 32 elements by their largest. A block's dot product is then exact
// in integers; it is scaled in float32. The weights' values are those of the file. Blocks are summed in the order of the
// inputs, whatever the number of rows.
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h describes the blocks.
#pragma once

#include <cmath>
#include <vector>

#include "matrix.h"
#include "scratch.h"
#include "row_ops.h"

namespace plait {

constexpr int64_t kBlockInputs = 32;
constexpr int64_t kBlockWords = kBlockInputs / 4;
// Rows of a register tile: their integers and sums fill the registers.
constexpr int kGroupRows = kLanes == 16 ? 8 : kLanes == 8 ? 2 : 1;

// Blocks between the one that is multiplied and the one that is prefetched.
constexpr int64_t kPrefetchBlocks = 6;

// One block's weights of a panel's 32 outputs are scales (and minima), float16, then words of 4 or 8 inputs' weights.
struct Q4_0 {
    static constexpr bool kHasMinimum = false;
    static constexpr int64_t kWords = 4;
    static constexpr int32_t kOffset = 8;  // a weight w is stored as w + 8
    static Words word(Words word, int half) { return half ? word >> 4 & 0x0f0f0f0fu : word & 0x0f0f0f0fu; }
};
struct Q4_1 {
    static constexpr bool kHasMinimum = true;
    static constexpr int64_t kWords = 4;
    static constexpr int32_t kOffset = 0;
    static Words word(Words word, int half) { return Q4_0::word(word, half); }
};
struct Q8_0 {
    static constexpr bool kHasMinimum = false;
    static constexpr int64_t kWords = 8;
    static constexpr int32_t kOffset = 128;  // packing adds it
    static Words word(Words word, int) { return word; }
};

// Bytes of one block of the file, and of a panel's.
template <class Format>
constexpr int64_t kFileBytes = (Format::kHasMinimum ? 4 : 2) + Format::kWords * 4;
template <class Format>
constexpr int64_t kPanelBytes = kPanel * kFileBytes<Format>;

// One block of a group of rows: element i of a row is quants[i] * scale. 16-bit quants are stored as signed high bytes,
// then signed low bytes. Whole cache lines, against false sharing between workers with neighbouring blocks.
template <int NumBytes>
struct alignas(kLanes == 16 ? 64 : 8) QuantisedBlock {
    int8_t quants[kGroupRows][NumBytes][kBlockInputs];
    float scales[kGroupRows];
    int32_t sums[kGroupRows];  // of the quants
};

// Quantised rows of inputs, in groups of a tile's height.
struct QuantisedRows {
    void* memory;  // QuantisedBlock [groups, blocks]
    int64_t num_blocks;

    template <int NumBytes>
    QuantisedBlock<NumBytes>* group(int64_t index) const {
        return static_cast<QuantisedBlock<NumBytes>*>(memory) + index * num_blocks;
    }
};

inline int64_t num_groups(int64_t rows) { return (rows + kGroupRows - 1) / kGroupRows; }

// Scratch buffer for them.
class QuantisedScratch {
public:
    // To be called before the pool runs.
    void fit(int64_t rows, int64_t inputs) {
        plait::fit(blocks_, num_groups(rows) * (inputs / kBlockInputs));
    }
    QuantisedRows rows(int64_t inputs) { return {blocks_.data(), inputs / kBlockInputs}; }

private:
    std::vector<QuantisedBlock<2>> blocks_;  // the largest kind
};

// Quantises one row's 32 elements of a block.
template <int NumBytes>
void quantise_block(const Floats* values, int64_t row, QuantisedBlock<NumBytes>& to) {
    constexpr int kCount = kBlockInputs / kLanes;
    constexpr float kMost = NumBytes == 1 ? 127.0f : 127.0f * 256 + 127;
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    // The largest magnitude, compared as bits: a NaN is then the largest and becomes the block's scale.
    Ints sizes{};
    for (int v = 0; v < kCount; ++v) sizes = largest(sizes, bits<Ints>(values[v]) & 0x7fffffff);
    const float size = bits<float>(largest_lane(sizes));
    const Floats factor = all(size > 0 ? kMost / size : 0.0f);
    auto& quants = to.quants[row];
    Ints total{};
    for (int v = 0; v < kCount; ++v) {
        const Ints whole = bits<Ints>(rounded_mul(values[v], factor) + magic) - bits<Ints>(magic);
        total += whole;
        // The high byte is one more where the signed low byte is negative.
        if constexpr (NumBytes == 2) store(quants[0] + v * kLanes, __builtin_convertvector((whole + 128) >> 8, Bytes));
        store(quants[NumBytes - 1] + v * kLanes, __builtin_convertvector(whole, Bytes));
    }
    to.scales[row] = size / kMost;
    to.sums[row] = sum(total);
}

// Sums of the first rows of a group over one panel: out [Rows, 32], its rows `stride` vectors apart.
template <class Format, int NumBytes, int Rows>
__attribute__((noinline)) void gguf_tile(const QuantisedRows& x, int64_t group, const uint8_t* panel, Floats* out,
                                          int64_t stride) {
    Floats totals[Rows][kVectors];
    for (auto& row : totals)
        for (auto& each : row) each = Floats{};
    const QuantisedBlock<NumBytes>* rows = x.group<NumBytes>(group);
    for (int64_t block = 0; block < x.num_blocks; ++block, ++rows, panel += kPanelBytes<Format>) {
        for (int64_t line = 0; line < kPanelBytes<Format>; line += 64)
            __builtin_prefetch(panel + kPrefetchBlocks * kPanelBytes<Format> + line);
        const auto* halves = reinterpret_cast<const uint16_t*>(panel);
        const auto* words = reinterpret_cast<const uint32_t*>(panel + kPanel * (Format::kHasMinimum ? 4 : 2));
        Ints dots[Rows][kVectors];
        for (int row = 0; row < Rows; ++row)
            for (int v = 0; v < kVectors; ++v) dots[row][v] = Ints{};
        for (int byte = 0; byte < NumBytes; ++byte) {
            if (byte > 0)
                for (auto& of_row : dots)
                    for (auto& each : of_row) each <<= 8;
            for (int64_t word = 0; word < Format::kWords; ++word)
                for (int half = 0; half < kBlockWords / Format::kWords; ++half) {
                    Words weights[kVectors];
                    for (int v = 0; v < kVectors; ++v)
                        weights[v] = Format::word(load<Words>(words + word * kPanel + v * kLanes), half);
                    for (int row = 0; row < Rows; ++row) {
                        const int8_t* quad = rows->quants[row][byte] + (half * Format::kWords + word) * 4;
                        const Words value = all(load<uint32_t>(quad));
                        for (int v = 0; v < kVectors; ++v)
                            dots[row][v] = dot_bytes(dots[row][v], weights[v], value);
                    }
                }
        }
        Floats scale[kVectors], minimum[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            scale[v] = read_float16(halves + v * kLanes);
            if constexpr (Format::kHasMinimum) minimum[v] = read_float16(halves + kPanel + v * kLanes);
        }
        for (int row = 0; row < Rows; ++row)
            for (int v = 0; v < kVectors; ++v) {
                const Ints whole = dots[row][v] - all(Format::kOffset * rows->sums[row]);
                totals[row][v] += __builtin_convertvector(whole, Floats) * (scale[v] * rows->scales[row]);
                if constexpr (Format::kHasMinimum)
                    totals[row][v] += minimum[v] * (rows->scales[row] * float(rows->sums[row]));
            }
    }
    for (int row = 0; row < Rows; ++row)
        for (int v = 0; v < kVectors; ++v) out[row * stride + v] = totals[row][v];
}

// Calls work.template operator()<Format>() for the format of a matrix of GGUF blocks.
template <class Work>
void dispatch_format(Storage storage, const Work& work) {
    switch (storage) {
        case Storage::kQ4_0: return work.template operator()<Q4_0>();
        case Storage::kQ4_1: return work.template operator()<Q4_1>();
        case Storage::kQ8_0: return work.template operator()<Q8_0>();
        case Storage::kDense: return;
    }
}

template <class Format>
inline const uint8_t* block_panel(const Matrix& matrix, int64_t index) {
    return static_cast<const uint8_t*>(matrix.weights) + index * (matrix.inputs / kBlockInputs) * kPanelBytes<Format>;
}

// blocks [outputs, inputs / 32] of the file into panels [panels, inputs / 32]; outputs beyond the last are zero.
template <class Format>
void pack_gguf(ThreadPool& pool, const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* panels) {
    const int64_t num_blocks = inputs / kBlockInputs, num_halves = Format::kHasMinimum ? 2 : 1;
    pool.parallel_for((outputs + kPanel - 1) / kPanel, [&](int64_t panel) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            uint8_t* to = panels + (panel * num_blocks + block) * kPanelBytes<Format>;
            std::fill(to, to + kPanelBytes<Format>, uint8_t(0));
            for (int64_t i = 0; i < std::min<int64_t>(kPanel, outputs - panel * kPanel); ++i) {
                const uint8_t* from = blocks + ((panel * kPanel + i) * num_blocks + block) * kFileBytes<Format>;
                for (int64_t half = 0; half < num_halves; ++half)
                    std::memcpy(to + (half * kPanel + i) * 2, from + half * 2, 2);
                for (int64_t word = 0; word < Format::kWords; ++word) {
                    uint32_t weights;
                    std::memcpy(&weights, from + num_halves * 2 + word * 4, 4);
                    if (Format::kOffset == 128) weights ^= 0x80808080u;
                    std::memcpy(to + num_halves * 2 * kPanel + (word * kPanel + i) * 4, &weights, 4);
                }
            }
        }
    });
}

}  // namespace plait
