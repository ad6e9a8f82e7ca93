// GEMM of some rows to thousands with 4-bit weights on Hopper's tensor cores (wgmma).
//
// A tile is 64 outputs a warpgroup by ROWS rows. Codes become bfloat16 in registers, the left operand; rows are in shared
// memory, the right one. One more warp copies both, chunk by chunk, as far ahead as it has slots.
//
// The blocks of a cluster share the chunks of a tile, and each adds the sums of some rows in a fixed order. Without
// clusters the chunks of all tiles are shared out evenly among the blocks, each of which has its tiles from the last to
// the first: it leaves the sums of the tile that it only begins, and ends its first tile with what the blocks before it
// have left, so that a block waits for blocks that began before it and did that part first.
//
// With few rows it costs less to scale the sums of a chunk in float32; codes less their zeros are exact. With more, or
// smaller groups, a value is (code - zero) * scale, rounded once: a scale is the sum of two bfloat16 numbers, of which
// the second, times a small integer, is exact.
#include "int4_codes.cuh"

constexpr bool SCALES_SUMS = ROWS <= 64 && SCALES == 1;
constexpr int REGISTERS = ROWS == 256 && WARPGROUPS > 1 ? 216 : 0;  // of a thread that multiplies; 0: as all have
static_assert(!REGISTERS || (WARPGROUPS == 2 && BLOCKS == 1), "a multiprocessor has no more registers to move");
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + (REGISTERS ? 128 : 32);  // registers are moved between whole warpgroups
constexpr int OUTPUTS = WARPGROUPS * 64;
constexpr int BOX_BYTES = ROWS * 128;  // 64 inputs
constexpr int HALF_BYTES = OUTPUTS * 32;
constexpr int SCALE_BYTES = SCALES * OUTPUTS * sizeof(Scale);
constexpr int ZERO_BYTES = SCALES * OUTPUTS;
constexpr int CODES_AT = 2 * BOX_BYTES, SCALES_AT = CODES_AT + 2 * HALF_BYTES, ZEROS_AT = SCALES_AT + SCALE_BYTES;
constexpr int SLOT_BYTES = (ZEROS_AT + ZERO_BYTES + 1023) / 1024 * 1024;  // a chunk
constexpr int BARRIER_BYTES = 1024;
#include "wgmma_sums.cuh"

// The slots, one after the other, each with a barrier that says it is full and one that says it is empty.
struct Ring {
    unsigned barriers;
    int slot;
    unsigned phase;

    __device__ Ring(unsigned at) : barriers(at), slot(0), phase(0) {}

    __device__ unsigned at() const { return barriers + BARRIER_BYTES + slot * SLOT_BYTES; }
    __device__ unsigned full() const { return barriers + slot * 16; }
    __device__ unsigned empty() const { return barriers + slot * 16 + 8; }
    __device__ void await_full() const { wait_for_phase(full(), phase); }
    __device__ void await_empty() const { wait_for_phase(empty(), phase ^ 1); }
    __device__ void go_on() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
    __device__ void begin() const {
        for (int each = 0; each < SLOTS; ++each) {
            begin_barrier(barriers + each * 16, 1);
            begin_barrier(barriers + each * 16 + 8, WARPGROUPS * 4);
        }
    }
};

// What a block has to do: chunks of tiles, of which the last come first.
struct Work {
    int num_chunks, row_tiles, all, begin, end;
    int tile, first, last;  // the part of a tile that is to be done: its chunks, `last` the first that is not

    __device__ Work(const Matrix& matrix, int num_rows) {
        num_chunks = matrix.num_chunks, row_tiles = (num_rows + ROWS - 1) / ROWS;
        all = (matrix.tiles() + OUTPUTS / 16 - 1) / (OUTPUTS / 16) * row_tiles * num_chunks;
        begin = first_of(blockIdx.x), end = first_of(blockIdx.x + 1);
        go_on();
    }

    __device__ int first_of(unsigned block) const { return (unsigned)all * block / (unsigned)gridDim.x; }
    __device__ bool is_there() const { return last > first; }
    __device__ void go_on() {
        if (begin == end) {
            first = last = 0;
            return;
        }
        tile = (unsigned)(end - 1) / (unsigned)num_chunks;
        const int at = tile * num_chunks;
        first = max(begin, at) - at, last = end - at;
        end = max(begin, at);
    }
    // Of those that have a part of this tile; it has the tile's first chunk.
    __device__ int first_block() const {
        return ((unsigned)(tile * num_chunks + 1) * (unsigned)gridDim.x + all - 1) / (unsigned)all - 1;
    }
    __device__ int first_row() const { return tile % row_tiles * ROWS; }
    __device__ int first_tile() const { return tile / row_tiles * (OUTPUTS / 16); }
};

__device__ void copy_weights(const Matrix& matrix, const Work& work, int chunk, const Ring& ring) {
    const int first_tile = work.first_tile(), outputs = min(OUTPUTS, matrix.num_outputs - first_tile * 16);
#ifdef HAS_ZERO
    constexpr int MARK_BYTES = sizeof(Scale) + 1;
#else
    constexpr int MARK_BYTES = sizeof(Scale);
#endif
    expect_bytes(ring.full(), 2 * BOX_BYTES + outputs * (64 + SCALES * MARK_BYTES));
    const unsigned to = ring.at();
    for (int half = 0; half < 2; ++half)
        copy_bytes(to + CODES_AT + half * HALF_BYTES, matrix.words_at(chunk, half, first_tile, 0), outputs * 32,
                   ring.full());
    for (int part = 0; part < SCALES; ++part) {
        const int at = matrix.scale_at(chunk, part, first_tile * 16);
        copy_bytes(to + SCALES_AT + part * OUTPUTS * sizeof(Scale), matrix.scale + at, outputs * sizeof(Scale),
                   ring.full());
#ifdef HAS_ZERO
        copy_bytes(to + ZEROS_AT + part * OUTPUTS, matrix.zero + at, outputs, ring.full());
#endif
    }
}

__device__ void copy_rows(const RowMap& map, const Work& work, int chunk, const Ring& ring) {
    for (int half = 0; half < 2; ++half)
        copy_box(ring.at() + half * BOX_BYTES, map, chunk * CHUNK + half * (CHUNK / 2), work.first_row(), ring.full());
}

// Weights come first, which no kernel writes, as many as there are slots.
__device__ void copy(const RowMap& map, const Matrix& matrix, Work work, Ring ring) {
    prepare(map);
    Work again = work;
    Ring begun = ring;
    int chunk = work.first;
    for (int slot = 0; slot < SLOTS && work.is_there(); ++slot, ring.go_on()) {
        copy_weights(matrix, work, chunk, ring);
        if (++chunk == work.last) work.go_on(), chunk = work.first;
    }
    wait_for_the_kernel_before();
    int other = again.first;
    for (int slot = 0; slot < SLOTS && again.is_there(); ++slot, begun.go_on()) {
        copy_rows(map, again, other, begun);
        if (++other == again.last) again.go_on(), other = again.first;
    }
    for (; work.is_there(); ring.go_on()) {
        ring.await_empty();
        copy_weights(matrix, work, chunk, ring);
        copy_rows(map, work, chunk, ring);
        if (++chunk == work.last) work.go_on(), chunk = work.first;
    }
}

// Rows of 64 inputs, 128 bytes, of which 16 bytes each are where the tensor cores look for them: 8 rows are an atom.
// `begin` is in units of 16 bytes; a step has 32 bytes of a row.
__device__ unsigned long long rows_at(unsigned begin, int step) {
    constexpr unsigned LAYOUT = 1024 >> 4 | 1 << 30;
    return (unsigned long long)LAYOUT << 32 | (begin + (step / 4 * BOX_BYTES + step % 4 * 32) / 16);
}

// Scales and zeros of a thread's two outputs, each twice in bfloat16.
struct Marks {
    unsigned less[2], scale[2], rest[2];
    float whole[2];

    __device__ void read(const unsigned char* slot, int part, int output) {
        const Scale* scales = (const Scale*)(slot + SCALES_AT) + part * OUTPUTS;
        const unsigned char* zeros = slot + ZEROS_AT + part * OUTPUTS;
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int own = output + 8 * high;
#if SCALE_KIND == 2
            whole[high] = scales[own];
#else
            whole[high] = float_of_scale(scales[own]);
#endif
            scale[high] = bfloat16_pair(whole[high], whole[high]);
            const float left = whole[high] - __uint_as_float(scale[high] << 16);
            rest[high] = bfloat16_pair(left, left);
#ifdef HAS_ZERO
            less[high] = less_of(zeros[own]);
#else
            less[high] = less_of(8);
#endif
        }
    }

    __device__ unsigned values(unsigned words, int quarter, int high) const {
        const unsigned code = code_pair(words, quarter, less[high]);
        if (SCALES_SUMS) return code;
        return fma2(code, scale[high], SCALE_KIND == 1 ? 0x80008000 : fma2(code, rest[high], 0x80008000));
    }
};

// The sums of a part of a tile. A slot is empty once the tensor cores have read it: a step into the next one.
__device__ void multiply(float (&sums)[ROWS / 2], const Work& work, Ring& ring, const unsigned char* slots) {
    const int output = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    float of_chunk[ROWS / 2];
    float(&added)[ROWS / 2] = SCALES_SUMS ? of_chunk : sums;
    unsigned values[2][4], before = 0;
    Marks marks;
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) sums[each] = 0;
    for (int chunk = work.first; chunk < work.last; ++chunk, ring.go_on()) {
        ring.await_full();
        const unsigned char* slot = slots + ring.slot * SLOT_BYTES;
        const uint4 words[2] = {*(const uint4*)(slot + CODES_AT + threadIdx.x * 16),
                                *(const uint4*)(slot + CODES_AT + HALF_BYTES + threadIdx.x * 16)};
        const unsigned begin = same_in_warp(ring.at() >> 4 | 1 << 16);
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            if (step % (8 / SCALES) == 0) marks.read(slot, step * SCALES / 8, output);
            wait_for_wgmma<1>();
            if (!SCALES_SUMS && step == 1) arrive_if(before, is_first_lane && before);
            unsigned(&own)[4] = values[step % 2];
            const uint4& half = words[step % 2];
            own[0] = marks.values(half.x, step / 2, 0);
            own[1] = marks.values(half.y, step / 2, 1);
            own[2] = marks.values(half.z, step / 2, 0);
            own[3] = marks.values(half.w, step / 2, 1);
            begin_wgmma();
            multiply_add(added, own, rows_at(begin, step), !SCALES_SUMS || step);
            close_wgmma();
        }
        before = ring.empty();
        if (SCALES_SUMS) {
            wait_for_wgmma<0>();
            arrive_if(before, is_first_lane);
#pragma unroll
            for (int each = 0; each < ROWS / 2; ++each) sums[each] += of_chunk[each] * marks.whole[each / 2 % 2];
        }
    }
    wait_for_wgmma<0>();
    if (!SCALES_SUMS) arrive_if(before, is_first_lane);
}

// Sums that a block leaves lie as its threads have them.
__device__ float4* left_by(float* left, int block, int each) {
    return (float4*)left + ((long long)block * (ROWS / 8) + each) * CONSUMERS + threadIdx.x;
}

__device__ void leave_sums(const float (&sums)[ROWS / 2], float* left, int* flags) {
#pragma unroll
    for (int each = 0; each < ROWS / 8; ++each)
        *left_by(left, blockIdx.x, each) =
            make_float4(sums[4 * each], sums[4 * each + 1], sums[4 * each + 2], sums[4 * each + 3]);
    show_to_all();
    meet<CONSUMERS>();
    if (threadIdx.x == 0) set_flag(flags + blockIdx.x);
}

// From the last to the first block before this one.
__device__ void add_left(float (&sums)[ROWS / 2], const Work& work, float* left, int* flags) {
    const int first = work.first_block(), count = blockIdx.x - first;
    for (int each = threadIdx.x; each < count; each += CONSUMERS) take_flag(flags + first + each);
    meet<CONSUMERS>();
    for (int block = blockIdx.x - 1; block >= first; --block)
#pragma unroll
        for (int each = 0; each < ROWS / 8; ++each) {
            const float4 more = read_shown(left_by(left, block, each));
            sums[4 * each] += more.x, sums[4 * each + 1] += more.y;
            sums[4 * each + 2] += more.z, sums[4 * each + 3] += more.w;
        }
}

// A thread has two rows of an output of each 8 x 8; four threads come to have the 16 outputs of a row.
__device__ void write_sums(const float (&sums)[ROWS / 2], unsigned short* out, long long out_stride, int num_rows,
                           const Matrix& matrix, const Work& work) {
    const int lane = threadIdx.x % 32, place = lane % 4, output = (work.first_tile() + threadIdx.x / 32) * 16;
    const bool is_low = place < 2, is_outer = place == 0 || place == 3;
    if (output >= matrix.num_outputs) return;
#pragma unroll
    for (int eight = 0; eight < ROWS / 8; ++eight) {
        const int row = work.first_row() + eight * 8 + lane / 4;
        const unsigned low = transposed(bfloat16_pair(sums[4 * eight], sums[4 * eight + 1]));
        const unsigned high = transposed(bfloat16_pair(sums[4 * eight + 2], sums[4 * eight + 3]));
        const unsigned own = is_low ? low : high, more = from_lane_xor(is_low ? high : low, 2);
        const unsigned other = from_lane_xor(is_outer ? more : own, 1);
        if (row >= num_rows) continue;
        const unsigned first = place == 0 ? own : place == 2 ? more : other;
        const unsigned second = place == 1 ? more : place == 3 ? own : other;
        write_four(out + row * out_stride + output + place * 4, first, second);
    }
}

// This block's share of the rows, of all blocks of the cluster in their order; a thread reads some fours at a time.
__device__ void write_share(unsigned short* out, long long out_stride, int num_rows, const Matrix& matrix,
                            const Work& work, unsigned kept) {
    constexpr int FOURS = OUTPUTS / 4, AT_ONCE = 4;
    const int splits = cluster_size(), share = (ROWS + splits - 1) / splits, first = blockIdx.x % splits * share;
    const int all_fours = (min(min(first + share, ROWS), num_rows - work.first_row()) - first) * FOURS;
    for (int begin = threadIdx.x; begin < all_fours; begin += AT_ONCE * CONSUMERS) {
        float4 sums[AT_ONCE] = {};
        for (int other = 0; other < splits; ++other)
#pragma unroll
            for (int each = 0; each < AT_ONCE; ++each) {
                const int four = min(begin + each * CONSUMERS, all_fours - 1);
                const float4 more =
                    sums_of(kept + ((first + four / FOURS) * SUM_STRIDE + four % FOURS * 4) * 4, other);
                sums[each].x += more.x, sums[each].y += more.y, sums[each].z += more.z, sums[each].w += more.w;
            }
#pragma unroll
        for (int each = 0; each < AT_ONCE; ++each) {
            const int four = begin + each * CONSUMERS, output = work.first_tile() * 16 + four % FOURS * 4;
            if (four >= all_fours || output >= matrix.num_outputs) continue;
            write_four(out + (work.first_row() + first + four / FOURS) * out_stride + output,
                       bfloat16_pair(sums[each].x, sums[each].y), bfloat16_pair(sums[each].z, sums[each].w));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_wgmma_gemm(const __grid_constant__ RowMap map, const uint4* codes, const Scale* scale, const unsigned char* zero,
                    unsigned short* out, long long rows, long long outputs, long long inputs, long long chunks,
                    long long out_stride, float* left, int* flags) {
    const Matrix matrix = {codes, scale, zero, (int)outputs, (int)inputs, (int)chunks};
    unsigned char* memory = shared_memory() + (-shared_address(shared_memory()) & 1023);
    Ring ring(shared_address(memory));
    Work work(matrix, (int)rows);
    let_the_next_kernel_begin();
    if (threadIdx.x == 0) {
        ring.begin();
        show_barriers();
    }
    __syncthreads();
    const bool is_shared = cluster_size() > 1;
    if (threadIdx.x >= CONSUMERS) {
        give_registers<REGISTERS>();
        if (threadIdx.x == CONSUMERS) copy(map, matrix, work, ring);
        meet_the_warp();
        if (is_shared) meet_the_cluster();
    } else {
        take_registers<REGISTERS>();
        float sums[ROWS / 2];
        for (; work.is_there(); work.go_on()) {
            multiply(sums, work, ring, memory + BARRIER_BYTES);
            if (is_shared) break;
            if (work.last < work.num_chunks) {
                leave_sums(sums, left, flags);
            } else {
                if (work.first > 0) add_left(sums, work, left, flags);
                write_sums(sums, out, out_stride, (int)rows, matrix, work);
            }
        }
        if (is_shared) {
            meet<CONSUMERS>();
            keep_sums((float*)(memory + BARRIER_BYTES), sums);
            meet_the_cluster();
            write_share(out, out_stride, (int)rows, matrix, work, shared_address(memory) + BARRIER_BYTES);
        }
    }
    if (is_shared) meet_the_cluster();  // whose shared memory must last until all have read it
}
