// A GGUF's block formats: what a block of the file holds, and how its weights lie in a panel of 32 outputs.
//
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h describes the file's blocks. All of them are read as
// blocks of 32 inputs. A K-quant's block is a span of eight such blocks, whose small scales share two large ones.
#pragma once

#include <algorithm>
#include <cstring>

#include "matrix.h"

namespace plait {

constexpr int64_t kBlockInputs = 32;
constexpr int64_t kBlockQuads = kBlockInputs / 4;

// 32 inputs' weights as a file has them: (quant - offset) * scale + minimum.
struct FileBlock {
    uint16_t halves[2];  // float16: the scale and the minimum, or a span's scale of scales and of minima
    uint8_t small[2];    // of a K-quant: the block's scale and minimum, or the scales of its halves
    uint8_t quants[kBlockInputs];
};

inline void read_halves(const uint8_t* from, int64_t count, FileBlock& block) {
    std::memcpy(block.halves, from, count * 2);
}

// Low halves of 16 bytes, then their high halves.
inline void read_nibbles(const uint8_t* from, FileBlock& block) {
    for (int i = 0; i < 16; ++i) {
        block.quants[i] = from[i] & 15;
        block.quants[16 + i] = from[i] >> 4;
    }
}

struct Q4_0 {
    static constexpr int64_t kFileBytes = 18, kSpanBlocks = 1;
    static constexpr int kBits = 4, kScales = 1;
    static constexpr bool kHasMinimum = false;
    static constexpr int32_t kOffset = 8;
    static void read(const uint8_t* from, int64_t, FileBlock& block) {
        read_halves(from, 1, block);
        read_nibbles(from + 2, block);
    }
};

struct Q4_1 : Q4_0 {
    static constexpr int64_t kFileBytes = 20;
    static constexpr bool kHasMinimum = true;
    static constexpr int32_t kOffset = 0;
    static void read(const uint8_t* from, int64_t, FileBlock& block) {
        read_halves(from, 2, block);
        read_nibbles(from + 4, block);
    }
};

// Bit i of a word is the fifth bit of input i.
inline void read_fifth_bits(const uint8_t* from, FileBlock& block) {
    uint32_t bits;
    std::memcpy(&bits, from, 4);
    for (int i = 0; i < kBlockInputs; ++i) block.quants[i] |= (bits >> i & 1) << 4;
}

struct Q5_0 : Q4_0 {
    static constexpr int64_t kFileBytes = 22;
    static constexpr int kBits = 5;
    static constexpr int32_t kOffset = 16;
    static void read(const uint8_t* from, int64_t, FileBlock& block) {
        read_halves(from, 1, block);
        read_nibbles(from + 6, block);
        read_fifth_bits(from + 2, block);
    }
};

struct Q5_1 : Q4_1 {
    static constexpr int64_t kFileBytes = 24;
    static constexpr int kBits = 5;
    static void read(const uint8_t* from, int64_t, FileBlock& block) {
        read_halves(from, 2, block);
        read_nibbles(from + 8, block);
        read_fifth_bits(from + 4, block);
    }
};

struct Q8_0 : Q4_0 {
    static constexpr int64_t kFileBytes = 34;
    static constexpr int kBits = 8;
    static constexpr int32_t kOffset = 128;  // the file's are signed
    static void read(const uint8_t* from, int64_t, FileBlock& block) {
        read_halves(from, 1, block);
        for (int i = 0; i < kBlockInputs; ++i) block.quants[i] = from[2 + i] ^ 0x80;
    }
};

struct Q4_K {
    static constexpr int64_t kFileBytes = 144, kSpanBlocks = 8;
    static constexpr int kBits = 4, kScales = 1;
    static constexpr bool kHasMinimum = true;  // which is subtracted
    static constexpr int32_t kOffset = 0;
    static void read(const uint8_t* from, int64_t index, FileBlock& block) {
        read_small(from, index, block);
        read_quants(from + 16, index, block);
    }
    // Scale and minimum of 6 bits each: eight scales and eight minima in 12 bytes.
    static void read_small(const uint8_t* from, int64_t index, FileBlock& block) {
        read_halves(from, 2, block);
        const uint8_t* bytes = from + 4;
        if (index < 4) {
            block.small[0] = bytes[index] & 63;
            block.small[1] = bytes[index + 4] & 63;
        } else {
            block.small[0] = (bytes[index + 4] & 15) | bytes[index - 4] >> 6 << 4;
            block.small[1] = bytes[index + 4] >> 4 | bytes[index] >> 6 << 4;
        }
    }
    // Two blocks share 32 bytes: the even one has the low halves.
    static void read_quants(const uint8_t* from, int64_t index, FileBlock& block) {
        for (int i = 0; i < kBlockInputs; ++i)
            block.quants[i] = from[index / 2 * kBlockInputs + i] >> 4 * (index % 2) & 15;
    }
};

struct Q5_K : Q4_K {
    static constexpr int64_t kFileBytes = 176;
    static constexpr int kBits = 5;
    static void read(const uint8_t* from, int64_t index, FileBlock& block) {
        read_small(from, index, block);
        read_quants(from + 48, index, block);
        for (int i = 0; i < kBlockInputs; ++i) block.quants[i] |= (from[16 + i] >> index & 1) << 4;
    }
};

struct Q6_K {
    static constexpr int64_t kFileBytes = 210, kSpanBlocks = 8;
    static constexpr int kBits = 6, kScales = 2;  // each 16 inputs have a scale
    static constexpr bool kHasMinimum = false;
    static constexpr int32_t kOffset = 32;
    // Halves of a span are alike: of 64 bytes with four bits each, and 32 with two bits for each of four blocks.
    static void read(const uint8_t* from, int64_t index, FileBlock& block) {
        const int64_t half = index / 4, place = index % 4;
        read_halves(from + 208, 1, block);
        std::memcpy(block.small, from + 192 + half * 8 + place * 2, 2);
        const uint8_t* low = from + half * 64 + place % 2 * kBlockInputs;
        const uint8_t* high = from + 128 + half * kBlockInputs;
        for (int i = 0; i < kBlockInputs; ++i)
            block.quants[i] = (low[i] >> place / 2 * 4 & 15) | (high[i] >> 2 * place & 3) << 4;
    }
};

// A panel's span: its float16 values; then of each block the small ones or, without a span, none; then its words.
template <class Format>
constexpr bool kIsSpan = Format::kSpanBlocks > 1;
template <class Format>
constexpr int64_t kHalvesBytes = kPanel * 2 * (Format::kHasMinimum ? 2 : 1);
template <class Format>
constexpr int64_t kSmallBytes = kIsSpan<Format> ? kPanel * (Format::kScales + (Format::kHasMinimum ? 1 : 0)) : 0;
// Four inputs' low halves of bytes and four others' high halves; behind them a word for each further bit of all 32.
template <class Format>
constexpr int64_t kWords = Format::kBits == 8 ? 8 : Format::kBits;
template <class Format>
constexpr int64_t kBlockBytes = kSmallBytes<Format> + kWords<Format> * kPanel * 4;
template <class Format>
constexpr int64_t kSpanBytes = kHalvesBytes<Format> + Format::kSpanBlocks * kBlockBytes<Format>;

// Inputs 4 * quad.. of a block, a byte each.
template <class Format>
inline Words quad_of(const uint32_t* words, int64_t quad, int v) {
    const auto word = [&](int64_t index) { return load<Words>(words + index * kPanel + v * kLanes); };
    if constexpr (Format::kBits == 8) return word(quad);
    Words low = quad < 4 ? word(quad) & 0x0f0f0f0fu : word(quad - 4) >> 4 & 0x0f0f0f0fu;
    if constexpr (Format::kBits == 5) low |= (word(4) >> quad & 0x01010101u) << 4;
    if constexpr (Format::kBits == 6) low |= (word(4 + quad / 4) >> 2 * (quad % 4) & 0x03030303u) << 4;
    return low;
}

// The words that quad_of reads, of one output.
template <class Format>
inline void make_words(const uint8_t* quants, uint32_t* words) {
    std::fill(words, words + kWords<Format>, 0u);
    for (int64_t i = 0; i < kBlockInputs; ++i) {
        const int64_t quad = i / 4, byte = i % 4 * 8;
        const uint32_t quant = quants[i], high = quant >> 4;
        if (Format::kBits == 8) {
            words[quad] |= quant << byte;
            continue;
        }
        words[quad % 4] |= (quant & 15) << (byte + quad / 4 * 4);
        if (Format::kBits == 5) words[4] |= high << (byte + quad);
        if (Format::kBits == 6) words[4 + quad / 4] |= high << (byte + 2 * (quad % 4));
    }
}

// Calls work.template operator()<Format>() for a format's number.
template <class Work>
void dispatch_format(BlockFormat format, const Work& work) {
    switch (format) {
        case BlockFormat::kQ4_0: return work.template operator()<Q4_0>();
        case BlockFormat::kQ4_1: return work.template operator()<Q4_1>();
        case BlockFormat::kQ5_0: return work.template operator()<Q5_0>();
        case BlockFormat::kQ5_1: return work.template operator()<Q5_1>();
        case BlockFormat::kQ8_0: return work.template operator()<Q8_0>();
        case BlockFormat::kQ4_K: return work.template operator()<Q4_K>();
        case BlockFormat::kQ5_K: return work.template operator()<Q5_K>();
        case BlockFormat::kQ6_K: return work.template operator()<Q6_K>();
    }
}

// Calls work.template operator()<Format>(panel's first span) for one of a matrix's panels.
template <class Work>
void with_panel(const Matrix& matrix, int64_t index, const Work& work) {
    const auto* part = static_cast<const BlockPanels*>(matrix.weights);
    while (index >= part->num_panels) index -= (part++)->num_panels;
    dispatch_format(part->format, [&]<class Format>() {
        const int64_t num_spans = matrix.inputs / (Format::kSpanBlocks * kBlockInputs);
        work.template operator()<Format>(part->panels + index * num_spans * kSpanBytes<Format>);
    });
}

// Writes one output's share of a panel's span.
template <class Format>
void pack_span(const uint8_t* from, uint8_t* span, int64_t output) {
    for (int64_t index = 0; index < Format::kSpanBlocks; ++index) {
        FileBlock block;
        Format::read(from, index, block);
        for (int64_t i = 0; i < (Format::kHasMinimum ? 2 : 1); ++i)
            std::memcpy(span + (i * kPanel + output) * 2, block.halves + i, 2);
        uint8_t* to = span + kHalvesBytes<Format> + index * kBlockBytes<Format>;
        for (int64_t i = 0; i < kSmallBytes<Format> / kPanel; ++i) to[i * kPanel + output] = block.small[i];
        uint32_t words[kWords<Format>];
        make_words<Format>(block.quants, words);
        for (int64_t i = 0; i < kWords<Format>; ++i)
            std::memcpy(to + kSmallBytes<Format> + (i * kPanel + output) * 4, words + i, 4);
    }
}

// rows [outputs, spans] of the file into panels [panels, spans]; outputs beyond the last are zero.
template <class Format>
void pack_blocks(ThreadPool& pool, const uint8_t* rows, int64_t outputs, int64_t inputs, uint8_t* panels) {
    const int64_t num_spans = inputs / (Format::kSpanBlocks * kBlockInputs);
    pool.parallel_for((outputs + kPanel - 1) / kPanel, [&](int64_t panel) {
        uint8_t* to = panels + panel * num_spans * kSpanBytes<Format>;
        std::fill(to, to + num_spans * kSpanBytes<Format>, uint8_t(0));
        for (int64_t i = 0; i < std::min<int64_t>(kPanel, outputs - panel * kPanel); ++i)
            for (int64_t span = 0; span < num_spans; ++span)
                pack_span<Format>(rows + ((panel * kPanel + i) * num_spans + span) * Format::kFileBytes,
                                  to + span * kSpanBytes<Format>, i);
    });
}

}  // namespace plait
