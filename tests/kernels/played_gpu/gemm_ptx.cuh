// What kernels/plait_kernels/linear/gemm_ptx.cuh has, played: a GPU's threads are fibers of one thread, and each runs up
// to a barrier, then the next. Copies and wgmma are done when they are waited for, so that one that nobody waits for is
// missing, and one whose memory is written over too early is wrong.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Barrier { int arrived = 0, round = 0; };
struct Warp {
    Barrier barrier;
    unsigned word[32], words[32][4];
};
struct Cluster;
// An mbarrier, and the copies that it waits for, which are done when somebody waits.
struct Phases {
    int arrivals, missing, bytes = 0, ended = 0;
    std::vector<std::pair<unsigned, std::vector<unsigned char>>> copies;
};
struct Block {
    Cluster* cluster;
    int index, num_threads;
    std::vector<unsigned char> memory;
    Barrier barrier, some;
    std::map<unsigned, Phases> phases;
    std::vector<Warp> warps;
};
struct Cluster {
    std::vector<Block> blocks;
    Barrier barrier;
    int num_threads;
};
struct Copy {
    unsigned to, bytes;
    const void* from;
    bool is_there;
};
struct Matmul {
    unsigned left[2][8];  // of this thread's two outputs, 16 inputs
    unsigned long long right;
    bool is_more;
    float* sums;
    unsigned long long left_at = 0;  // e4m3 of 32 inputs, instead
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Block* block;
    int thread;
    bool has_ended = false;
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> copy_groups;
    std::vector<Matmul> matmuls;
    std::deque<std::vector<Matmul>> matmul_groups;
};

inline Fiber* fiber;  // that runs now
inline ucontext_t scheduler;
inline int grid_size;
struct Index { int x; };
#define threadIdx (Index{fiber->thread})
#define blockIdx (Index{fiber->block->index})
#define gridDim (Index{grid_size})

constexpr unsigned FIRST_ADDRESS = 16;  // no multiple of what stages need

inline void fail(const char* why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
}

inline void arrive(Barrier& barrier, int expected) {
    const int round = barrier.round;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        ++barrier.round;
    }
    while (barrier.round == round) swapcontext(&fiber->context, &scheduler);
}

inline int lane() { return fiber->thread % 32; }
inline Warp& warp() { return fiber->block->warps[fiber->thread / 32]; }
inline void meet_the_warp() { arrive(warp().barrier, 32); }
inline void __syncthreads() { arrive(fiber->block->barrier, fiber->block->num_threads); }

inline unsigned __shfl_sync(unsigned, unsigned word, int from) {
    warp().word[lane()] = word;
    meet_the_warp();
    const unsigned given = warp().word[from];
    meet_the_warp();
    return given;
}

inline float __shfl_xor_sync(unsigned all, float value, int apart) {
    unsigned word;
    std::memcpy(&word, &value, 4);
    word = __shfl_sync(all, word, lane() ^ apart);
    std::memcpy(&value, &word, 4);
    return value;
}

inline unsigned __reduce_max_sync(unsigned all, unsigned word) {
    for (int apart = 16; apart > 0; apart /= 2) word = max(word, __shfl_sync(all, word, lane() ^ apart));
    return word;
}

inline void __syncwarp() { meet_the_warp(); }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }

template <class T> T __ldg(const T* at) { return *at; }
inline uint4 read_once(const uint4* at) { return *at; }

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline double bfloat16(unsigned word, int half) { return __uint_as_float(word >> 16 * half << 16); }

inline unsigned rounded(double value) {
    const unsigned bits = __float_as_uint((float)value);
    return std::isnan(value) ? 0x7FFF : bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}

inline unsigned bfloat16_pair(float low, float high) { return rounded(low) | rounded(high) << 16; }

inline float sigmoid(float value) { return 1 / (1 + std::exp(-value)); }

inline unsigned fma2(unsigned a, unsigned b, unsigned c) {
    unsigned sums[2];
    for (int half = 0; half < 2; ++half)
        sums[half] = rounded(bfloat16(a, half) * bfloat16(b, half) + bfloat16(c, half));
    return sums[0] | sums[1] << 16;
}

inline float float_of_half(unsigned short bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return (float)half;
}

inline unsigned short half_of(float value) {
    const _Float16 half = (_Float16)value;
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

inline unsigned half_pair(float low, float high) { return half_of(low) | (unsigned)half_of(high) << 16; }

inline float float_of_e4m3(unsigned char bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    const float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return bits & 128 ? -value : value;
}

template <int WHICH> unsigned halves_of(unsigned word) {
    return half_pair(float_of_e4m3(word >> 16 * WHICH & 255), float_of_e4m3(word >> (16 * WHICH + 8) & 255));
}

inline double float16(unsigned word, int half) { return float_of_half((unsigned short)(word >> 16 * half)); }

inline unsigned codes_over_128(unsigned words) { return (words & 0x000F000F) | 0x43004300; }

inline unsigned char* shared_memory() { return fiber->block->memory.data(); }
inline unsigned shared_address(const void* at) {
    return FIRST_ADDRESS + (unsigned)((const unsigned char*)at - shared_memory());
}

inline unsigned char* place(Block& block, unsigned address) {
    if (address % 16 || address < FIRST_ADDRESS || address - FIRST_ADDRESS + 16 > block.memory.size())
        fail("an address is no multiple of 16, or outside shared memory");
    return block.memory.data() + (address - FIRST_ADDRESS);
}

inline void copy_later(unsigned to, const void* from, bool is_there) {
    if ((uintptr_t)from % 16 && is_there) fail("what is copied does not begin at a multiple of 16");
    fiber->copies.push_back({to, 16, from, is_there});
}

inline void copy_word_later(unsigned to, const void* from, bool is_there) {
    fiber->copies.push_back({to, 4, from, is_there});
}

inline void close_copies() { fiber->copy_groups.push_back(std::exchange(fiber->copies, {})); }

template <int LATER> void wait_for_copies() {
    for (; fiber->copy_groups.size() > LATER; fiber->copy_groups.pop_front())
        for (const Copy& copy : fiber->copy_groups.front()) {
            unsigned char* to = place(*fiber->block, copy.to & ~15u) + copy.to % 16;
            copy.is_there ? std::memcpy(to, copy.from, copy.bytes) : std::memset(to, 0, copy.bytes);
        }
}

inline void wait_for_the_kernel_before() {}
inline void let_the_next_kernel_begin() {}
inline void show_copies_to_wgmma() {}
inline void begin_wgmma() {}

// Each 8 lanes say where the rows of a matrix of 8 x 8 are.
inline void read_rows(unsigned (&rows)[4], unsigned at) {
    warp().word[lane()] = at;
    meet_the_warp();
    for (int each = 0; each < 4; ++each)
        std::memcpy(&rows[each], place(*fiber->block, warp().word[each * 8 + lane() / 4]) + lane() % 4 * 4, 4);
    meet_the_warp();
}

// The 16 inputs of this thread's two outputs, which four lanes have.
inline void gather(unsigned (&left)[2][8], const unsigned (&values)[4]) {
    std::memcpy(warp().words[lane()], values, 16);
    meet_the_warp();
    for (int place = 0; place < 16; ++place)
        left[place % 2][place / 8 * 4 + place / 2 % 4] = warp().words[lane() / 4 * 4 + place / 2 % 4][place / 8 * 2 + place % 2];
    meet_the_warp();
}

// mma.m16n8k16, of what `value_of` makes of a word's half.
template <class Value>
void multiply_add_of(float (&sums)[4], const unsigned (&values)[4], unsigned low, unsigned high, Value value_of) {
    unsigned left[2][8], right[2][8];
    gather(left, values);
    for (int part = 0; part < 2; ++part) {
        warp().word[lane()] = part ? high : low;
        meet_the_warp();
        for (int each = 0; each < 8; ++each)
            right[each / 4][part * 4 + each % 4] = warp().word[(lane() % 4 * 2 + each / 4) * 4 + each % 4];
        meet_the_warp();
    }
    for (int each = 0; each < 4; ++each) {
        double sum = sums[each];
        for (int input = 0; input < 16; ++input)
            sum += value_of(left[each / 2][input / 2], input % 2) * value_of(right[each % 2][input / 2], input % 2);
        sums[each] = (float)sum;
    }
}

inline void meet_the_cluster() { arrive(fiber->block->cluster->barrier, fiber->block->cluster->num_threads); }
inline void leave_the_cluster() { meet_the_cluster(); }
inline int cluster_size() { return (int)fiber->block->cluster->blocks.size(); }

inline void multiply_add(float (&sums)[4], const unsigned (&values)[4], unsigned low, unsigned high) {
    multiply_add_of(sums, values, low, high, bfloat16);
}

inline void multiply_add_half(float (&sums)[4], const unsigned (&values)[4], unsigned low, unsigned high) {
    multiply_add_of(sums, values, low, high, float16);
}

inline float4 sums_of(unsigned at, int rank) {
    float4 sums;
    std::memcpy(&sums, place(fiber->block->cluster->blocks[rank], at), 16);
    return sums;
}

template <int COUNT> void meet() { arrive(fiber->block->some, COUNT); }
template <int COUNT> void take_registers() {}
template <int COUNT> void give_registers() {}

inline void begin_barrier(unsigned barrier, int arrivals) { fiber->block->phases[barrier] = {arrivals, arrivals}; }
inline void show_barriers() {}

inline Phases& phases_of(Block& block, unsigned barrier) {
    const auto found = block.phases.find(barrier);
    if (found == block.phases.end()) fail("a barrier was not begun");
    return found->second;
}

inline void end_phase(Phases& phases) {
    if (phases.missing < 0) fail("more threads arrive than a barrier waits for");
    if (phases.missing || phases.bytes) return;
    phases.missing = phases.arrivals;
    ++phases.ended;
}

inline void arrive(unsigned barrier) {
    Phases& phases = phases_of(*fiber->block, barrier);
    --phases.missing;
    end_phase(phases);
}

inline void arrive_if(unsigned barrier, bool does) {
    if (does) arrive(barrier);
}

inline void expect_bytes(unsigned barrier, int bytes) {
    phases_of(*fiber->block, barrier).bytes += bytes;
    arrive(barrier);
}

inline void do_copies(Block& block, Phases& phases) {
    for (const auto& [to, bytes] : std::exchange(phases.copies, {})) {
        for (size_t each = 0; each < bytes.size(); each += 16) std::memcpy(place(block, to + each), &bytes[each], 16);
        phases.bytes -= (int)bytes.size();
        end_phase(phases);
    }
}

inline void wait_for_phase(unsigned barrier, unsigned parity) {
    Phases& phases = phases_of(*fiber->block, barrier);
    for (do_copies(*fiber->block, phases); phases.ended % 2 == (int)parity; do_copies(*fiber->block, phases))
        swapcontext(&fiber->context, &scheduler);
}

// What is there until a copy is done is NaN: who still reads it is found out.
inline void copy_soon(Block& block, unsigned to, std::vector<unsigned char> bytes, unsigned barrier) {
    for (size_t each = 0; each < bytes.size(); each += 16) std::memset(place(block, to + each), 0xFF, 16);
    phases_of(block, barrier).copies.emplace_back(to, std::move(bytes));
}

inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    if ((uintptr_t)from % 16 || bytes % 16) fail("what is copied is not cut at multiples of 16");
    const auto* begin = (const unsigned char*)from;
    copy_soon(*fiber->block, to, {begin, begin + bytes}, barrier);
}

struct RowMap {
    const void* x;
    long long rows, inputs;
    int box_rows, bytes = 2;  // of an input
};

inline void prepare(const RowMap&) {}

inline void copy_box(unsigned to, const RowMap& map, int input, int row, unsigned barrier) {
    if (to % 1024) fail("rows do not begin at an atom");
    std::vector<unsigned char> bytes(map.box_rows * 128);
    const int box_inputs = 128 / map.bytes;
    for (int each = 0; each < map.box_rows * box_inputs; ++each) {
        const int own_row = row + each / box_inputs, own = input + each % box_inputs, at = each * map.bytes;
        const bool is_there = own_row < map.rows && own < map.inputs;
        unsigned char* there = &bytes[at ^ (at >> 7 & 7) << 4];
        if (is_there) std::memcpy(there, (const char*)map.x + (own_row * map.inputs + own) * map.bytes, map.bytes);
    }
    copy_soon(*fiber->block, to, std::move(bytes), barrier);
}

inline unsigned same_in_warp(unsigned number) { return __shfl_sync(0, number, 0); }
inline unsigned from_lane_xor(unsigned word, int other) { return __shfl_sync(0, word, lane() ^ other); }

// movmatrix.
inline unsigned transposed(unsigned pair) {
    unsigned flipped = 0;
    for (int half = 0; half < 2; ++half) {
        warp().word[lane()] = pair;
        meet_the_warp();
        flipped |= (warp().word[(lane() % 4 * 2 + half) * 4 + lane() / 8] >> lane() / 4 % 2 * 16 & 0xFFFF) << half * 16;
        meet_the_warp();
    }
    return flipped;
}

// Clusters run one after the other: whoever waits for a flag would wait for ever.
inline void show_to_all() {}
inline void set_flag(int* flag) { *flag = 1; }
inline void take_flag(int* flag) {
    if (!*flag) fail("a block waits for one that begins later");
    *flag = 0;
}
inline float4 read_shown(const float4* at) { return *at; }

#ifdef ROWS
// wgmma.m64nROWSk16.
inline void multiply_add(float (&sums)[ROWS / 2], const unsigned (&values)[4], unsigned long long rows, bool is_more) {
    Matmul matmul = {{}, rows, is_more, sums};
    gather(matmul.left, values);
    fiber->matmuls.push_back(matmul);
}

// wgmma.m64nROWSk32 of e4m3.
inline void multiply_add(float (&sums)[ROWS / 2], unsigned long long weights, unsigned long long rows, bool is_more) {
    fiber->matmuls.push_back({{}, rows, is_more, sums, weights});
}

inline void close_wgmma() { fiber->matmul_groups.push_back(std::exchange(fiber->matmuls, {})); }

// A byte of a row: descriptors say where an atom of 8 rows begins; 16 bytes lie where the row's number moves them.
inline const unsigned char* byte_of(unsigned long long descriptor, int row, int byte) {
    if (descriptor >> 62 != 1) fail("rows are not swizzled by 128 bytes");
    const unsigned begin = (unsigned)(descriptor & 0x3FFF) << 4, atom = (unsigned)(descriptor >> 32 & 0x3FFF) << 4;
    unsigned address = begin + row / 8 * atom + row % 8 * 128 + byte;
    address ^= (address >> 7 & 7) << 4;
    return place(*fiber->block, address & ~15u) + address % 16;
}

inline double bfloat16_of(unsigned long long descriptor, int row, int input) {
    unsigned short bits;
    std::memcpy(&bits, byte_of(descriptor, row, input * 2), 2);
    return bfloat16(bits, 0);
}

inline double e4m3_of(unsigned long long descriptor, int row, int input) {
    return float_of_e4m3(*byte_of(descriptor, row, input));
}

inline void do_matmul(const Matmul& matmul) {
    for (int each = 0; each < ROWS / 2; ++each) {
        const int row = each / 4 * 8 + lane() % 4 * 2 + each % 2, high = each / 2 % 2;
        const int output = fiber->thread / 32 % 4 * 16 + lane() / 4 + 8 * high;
        double sum = matmul.is_more ? matmul.sums[each] : 0;
        for (int input = 0; input < (matmul.left_at ? 32 : 16); ++input)
            sum += matmul.left_at
                       ? e4m3_of(matmul.left_at, output, input) * e4m3_of(matmul.right, row, input)
                       : bfloat16(matmul.left[high][input / 2], input % 2) * bfloat16_of(matmul.right, row, input);
        matmul.sums[each] = (float)sum;
    }
}

template <int LATER> void wait_for_wgmma() {
    for (; fiber->matmul_groups.size() > LATER; fiber->matmul_groups.pop_front())
        for (const Matmul& matmul : fiber->matmul_groups.front()) do_matmul(matmul);
}
#endif
