// GEMM tile over weights in GGUF blocks, kept as in the file: a few bits each, and scales.
//
// A row of inputs is quantised to 8 or 16 bits, each 32 elements by their largest. A block's dot product is then exact
// in integers; it is scaled in float32. The weights' values are those of the file. Blocks are summed in the order of the
// inputs, whatever the number of rows.
#pragma once

#include <cmath>
#include <vector>

#include "gguf_formats.h"
#include "scratch.h"
#include "row_ops.h"

namespace plait {

// Rows of a register tile: their integers and sums fill the registers.
constexpr int kGroupRows = kLanes == 16 ? 8 : kLanes == 8 ? 2 : 1;

// Blocks between the one that is multiplied and the one that is prefetched.
constexpr int64_t kPrefetchBlocks = 6;

// One block of a group of rows: element i of a row is quants[i] * scale. 16-bit quants are stored as signed high bytes,
// then signed low bytes. Whole cache lines, against false sharing between workers with neighbouring blocks.
template <int NumBytes>
struct alignas(kLanes == 16 ? 64 : 8) QuantisedBlock {
    int8_t quants[kGroupRows][NumBytes][kBlockInputs];
    float scales[kGroupRows];
    int32_t sums[kGroupRows][2];  // of the first and the last 16 quants
};

// Quantised rows of inputs, in groups of a tile's height.
struct QuantisedRows {
    void* memory;  // QuantisedBlock [groups, blocks]
    int64_t num_blocks;
    int64_t first_group;  // whose rows are number 0 and on

    template <int NumBytes>
    QuantisedBlock<NumBytes>* group(int64_t index) const {
        return static_cast<QuantisedBlock<NumBytes>*>(memory) + (first_group + index) * num_blocks;
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
    QuantisedRows rows(int64_t inputs) { return {blocks_.data(), inputs / kBlockInputs, 0}; }

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
    Ints halves[2]{};
    for (int v = 0; v < kCount; ++v) {
        const Ints whole = bits<Ints>(rounded_mul(values[v], factor) + magic) - bits<Ints>(magic);
        halves[v * 2 / kCount] += whole;
        // The high byte is one more where the signed low byte is negative.
        if constexpr (NumBytes == 2) store(quants[0] + v * kLanes, __builtin_convertvector((whole + 128) >> 8, Bytes));
        store(quants[NumBytes - 1] + v * kLanes, __builtin_convertvector(whole, Bytes));
    }
    to.scales[row] = size / kMost;
    for (int half = 0; half < 2; ++half) to.sums[row][half] = sum(halves[half]);
}

// What a block's integers are multiplied by, and what is added: one panel's scales and minima.
template <class Format>
struct BlockScales {
    Floats scales[Format::kScales][kVectors];
    Floats minima[kVectors];  // if it has any

    // `halves` of the span; `small` of the block.
    void read(const uint16_t* halves, const uint8_t* small) {
        for (int v = 0; v < kVectors; ++v) {
            const Floats scale = read_float16(halves + v * kLanes);
            for (int i = 0; i < Format::kScales; ++i)
                scales[i][v] = kIsSpan<Format> ? scale * read_int8(small + i * kPanel + v * kLanes) : scale;
            if constexpr (Format::kHasMinimum) {
                const Floats minimum = read_float16(halves + kPanel + v * kLanes);
                minima[v] = kIsSpan<Format> ? -minimum * read_int8(small + kPanel + v * kLanes) : minimum;
            }
        }
    }
};

// Adds to dots what one byte of the rows' quants gives with the quads of a scale: all of a block, or its half `part`.
template <class Format, int NumBytes, int Rows>
__attribute__((always_inline)) inline void add_dots(const QuantisedBlock<NumBytes>& x, int byte,
                                                    const uint32_t* words, int part, Ints (*dots)[kVectors]) {
    constexpr int64_t kLoops = Format::kBits == 8 && Format::kScales == 1 ? kBlockQuads : kBlockQuads / 2;
    for (int64_t word = 0; word < kLoops; ++word)
        for (int64_t quad = word + part * kLoops; quad < kBlockQuads / Format::kScales * (part + 1); quad += kLoops) {
            Words weights[kVectors];
            for (int v = 0; v < kVectors; ++v) weights[v] = quad_of<Format>(words, quad, v);
            for (int row = 0; row < Rows; ++row) {
                const Words value = all(load<uint32_t>(x.quants[row][byte] + quad * 4));
                for (int v = 0; v < kVectors; ++v) dots[row][v] = dot_bytes(dots[row][v], weights[v], value);
            }
        }
}

// totals + one block's share.
template <class Format, int NumBytes, int Rows>
__attribute__((always_inline)) inline void add_block(const QuantisedBlock<NumBytes>& x, const uint32_t* words,
                                                     const BlockScales<Format>& of, Floats (*totals)[kVectors]) {
    for (int part = 0; part < Format::kScales; ++part) {
        Ints dots[Rows][kVectors];
        for (int row = 0; row < Rows; ++row)
            for (int v = 0; v < kVectors; ++v) dots[row][v] = Ints{};
        for (int byte = 0; byte < NumBytes; ++byte) {
            if (byte > 0)
                for (auto& of_row : dots)
                    for (auto& each : of_row) each <<= 8;
            add_dots<Format, NumBytes, Rows>(x, byte, words, part, dots);
        }
        for (int row = 0; row < Rows; ++row) {
            const int32_t sum = Format::kScales == 1 ? x.sums[row][0] + x.sums[row][1] : x.sums[row][part];
            for (int v = 0; v < kVectors; ++v) {
                const Ints whole = dots[row][v] - all(Format::kOffset * sum);
                totals[row][v] += __builtin_convertvector(whole, Floats) * (of.scales[part][v] * x.scales[row]);
                if constexpr (Format::kHasMinimum) totals[row][v] += of.minima[v] * (x.scales[row] * float(sum));
            }
        }
    }
}

// Sums of the first rows of a group over one panel: out [Rows, 32], its rows `stride` vectors apart.
template <class Format, int NumBytes, int Rows>
__attribute__((noinline)) void gguf_tile(const QuantisedRows& x, int64_t group, const uint8_t* panel, Floats* out,
                                          int64_t stride) {
    Floats totals[Rows][kVectors];
    for (auto& row : totals)
        for (auto& each : row) each = Floats{};
    const QuantisedBlock<NumBytes>* rows = x.group<NumBytes>(group);
    BlockScales<Format> scales;
    for (int64_t span = 0; span < x.num_blocks / Format::kSpanBlocks; ++span) {
        const auto* halves = reinterpret_cast<const uint16_t*>(panel);
        panel += kHalvesBytes<Format>;
        for (int64_t block = 0; block < Format::kSpanBlocks; ++block, ++rows, panel += kBlockBytes<Format>) {
            constexpr int64_t kAhead = kPrefetchBlocks * kSpanBytes<Format> / Format::kSpanBlocks;
            for (int64_t line = 0; line < kSpanBytes<Format> / Format::kSpanBlocks; line += 64)
                __builtin_prefetch(panel + kAhead + line);
            scales.read(halves, panel);
            const auto* words = reinterpret_cast<const uint32_t*>(panel + kSmallBytes<Format>);
            add_block<Format, NumBytes, Rows>(*rows, words, scales, totals);
        }
    }
    for (int row = 0; row < Rows; ++row)
        for (int v = 0; v < kVectors; ++v) out[row * stride + v] = totals[row][v];
}

}  // namespace plait
