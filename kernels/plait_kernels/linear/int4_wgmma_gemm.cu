// GEMM of some rows to thousands with 4-bit weights on Hopper's tensor cores (wgmma).
//
// A tile is 64 outputs a warpgroup by ROWS rows. Codes become bfloat16 in registers, the left operand; rows are in shared
// memory, the right one. Some more warps copy both, a chunk each in turns, as far ahead as there are slots: a chunk is six
// copies, which one thread begins one after the other.
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
// Of a thread that multiplies, and of one that copies; 0: as all have.
constexpr int REGISTERS = ROWS == 256 && WARPGROUPS == 2 ? 216 : ROWS >= 64 && WARPGROUPS == 3 ? 152 : 0;
constexpr int KEPT_REGISTERS = REGISTERS == 216 ? 72 : REGISTERS ? 56 : 0;
static_assert(!REGISTERS || BLOCKS == 1, "a multiprocessor has no more registers to move");
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int WARPS = REGISTERS ? 4 : BLOCKS > 2 ? 1 : 2;  // more; registers are moved between whole warpgroups
// Warps that copy, a chunk each. With more than slots one would wait for a phase of a barrier before the last has begun.
constexpr int COPIERS = WARPS < SLOTS ? WARPS : SLOTS;
constexpr int THREADS = CONSUMERS + WARPS * 32;
static_assert(SLOTS > 1, "a chunk is awaited before the slot of the one before it is empty");
constexpr int OUTPUTS = WARPGROUPS * 64;
constexpr int BOX_BYTES = ROWS * 128;  // 64 inputs
constexpr int HALF_BYTES = OUTPUTS * 32;
constexpr int SCALE_BYTES = SCALES * OUTPUTS * sizeof(Scale);
constexpr int ZERO_BYTES = SCALES * OUTPUTS;
constexpr int CODES_AT = 2 * BOX_BYTES, SCALES_AT = CODES_AT + 2 * HALF_BYTES, ZEROS_AT = SCALES_AT + SCALE_BYTES;
constexpr int SLOT_BYTES = (ZEROS_AT + ZERO_BYTES + 1023) / 1024 * 1024;  // a chunk
constexpr int BARRIER_BYTES = 1024;
constexpr int STEPS = 2;  // of 16 inputs, which are decoded while the tensor cores have those before
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
    // This warp no longer reads a slot with this barrier, if there is one.
    __device__ static void release(unsigned empty) { arrive_if(empty, threadIdx.x % 32 == 0 && empty); }
};

// What a block has to do: chunks of tiles, of which the last come first.
struct Work {
    int num_chunks, row_tiles, all, begin, end;
    int tile, first, last;  // the part of a tile that is to be done: its chunks, `last` the first that is not
    int first_row, first_tile;  // of 16 outputs

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
        first_row = tile % row_tiles * ROWS;
        first_tile = tile / row_tiles * (OUTPUTS / 16);
        end = max(begin, at);
    }
    // Of those that have a part of this tile; it has the tile's first chunk.
    __device__ int first_block() const {
        return ((unsigned)(tile * num_chunks + 1) * (unsigned)gridDim.x + all - 1) / (unsigned)all - 1;
    }
};

__device__ void copy_weights(const Matrix& matrix, const Work& work, int chunk, const Ring& ring) {
    const int first_tile = work.first_tile, outputs = min(OUTPUTS, matrix.num_outputs - first_tile * 16);
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
        copy_box(ring.at() + half * BOX_BYTES, map, chunk * CHUNK + half * (CHUNK / 2), work.first_row, ring.full());
}

// The next chunk that a warp copies.
struct Next {
    Work work;
    Ring ring;
    int chunk, number;  // of all chunks

    __device__ Next(const Work& work, const Ring& ring) : work(work), ring(ring), chunk(work.first), number(0) {}

    __device__ bool is_there() const { return work.is_there(); }
    __device__ bool is_first() const { return is_there() && number < SLOTS; }
    __device__ void go_on(int count) {
        for (number += count; count && is_there(); --count) {
            ring.go_on();
            if (++chunk == work.last) work.go_on(), chunk = work.first;
        }
    }
};

// Weights come first, which no kernel writes, as many as there are slots.
__device__ void copy(const RowMap& map, const Matrix& matrix, const Work& work, const Ring& ring) {
    prepare(map);
    Next first(work, ring);
    first.go_on((threadIdx.x - CONSUMERS) / 32);
    Next next = first;
    for (; next.is_first(); next.go_on(COPIERS)) copy_weights(matrix, next.work, next.chunk, next.ring);
    wait_for_the_kernel_before();
    for (; first.is_first(); first.go_on(COPIERS)) copy_rows(map, first.work, first.chunk, first.ring);
    for (; next.is_there(); next.go_on(COPIERS)) {
        next.ring.await_empty();
        copy_weights(matrix, next.work, next.chunk, next.ring);
        copy_rows(map, next.work, next.chunk, next.ring);
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

// A thread's part of a chunk: codes of two outputs.
struct Codes {
    uint4 words[2];
    Marks marks;

    __device__ void read(const unsigned char* slot) {
        words[0] = *(const uint4*)(slot + CODES_AT + threadIdx.x * 16);
        words[1] = *(const uint4*)(slot + CODES_AT + HALF_BYTES + threadIdx.x * 16);
    }

    // The tensor cores' left operands of some steps.
    __device__ void decode(unsigned (&values)[STEPS][4], int first_step, const unsigned char* slot) {
        const int output = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int each = 0; each < STEPS; ++each) {
            const int step = first_step + each;
            if (step % (8 / SCALES) == 0) marks.read(slot, step * SCALES / 8, output);
            const uint4& own = words[step % 2];
            values[each][0] = marks.values(own.x, step / 2, 0);
            values[each][1] = marks.values(own.y, step / 2, 1);
            values[each][2] = marks.values(own.z, step / 2, 0);
            values[each][3] = marks.values(own.w, step / 2, 1);
        }
    }
};

__device__ void begin_to_multiply(float (&sums)[ROWS / 2], const unsigned (&values)[STEPS][4], unsigned begin,
                                  int first_step, bool is_more) {
    begin_wgmma();
#pragma unroll
    for (int each = 0; each < STEPS; ++each)
        multiply_add(sums, values[each], rows_at(begin, first_step + each), is_more || each);
    close_wgmma();
}

// What a thread that multiplies needs from chunk to chunk. While the tensor cores have some steps, the codes of the next
// are decoded.
struct Multiplier {
    const unsigned char* slots;
    Ring& ring;
    unsigned values[2][STEPS][4], before;
    Codes codes;
    float scale[2];  // of the chunk before

    __device__ Multiplier(const unsigned char* slots, Ring& ring) : slots(slots), ring(ring), before(0), scale{0, 0} {
        ring.await_full();
        codes.read(slot());
        codes.decode(values[0], 0, slot());
    }

    __device__ const unsigned char* slot() const { return slots + ring.slot * SLOT_BYTES; }

    // Adds a chunk to sums, or begins them, later. Behind the last chunk the next codes are decoded in vain: a branch would
    // let no wgmma be under way. Its slot is empty once the tensor cores have read it: some steps into the next one, and
    // then the sums of the chunk before are there.
    template <class Meanwhile>
    __device__ void multiply(float (&sums)[ROWS / 2], bool is_more, bool is_last, Meanwhile meanwhile) {
        const unsigned begin = same_in_warp(ring.at() >> 4 | 1 << 16), empty = ring.empty();
#pragma unroll
        for (int step = 0; step < 8 - STEPS; step += STEPS) {
            begin_to_multiply(sums, values[step / STEPS % 2], begin, step, is_more || step);
            wait_for_wgmma<1>();
            if (step == 0) Ring::release(before), meanwhile();
            codes.decode(values[step / STEPS % 2 ^ 1], step + STEPS, slot());
        }
        begin_to_multiply(sums, values[1], begin, 8 - STEPS, true);
        scale[0] = codes.marks.whole[0], scale[1] = codes.marks.whole[1];
        ring.go_on();
        if (!is_last) ring.await_full();
        codes.read(slot());
        wait_for_wgmma<1>();
        codes.decode(values[0], 0, slot());
        before = empty;
    }
};

__device__ void add_scaled(float (&sums)[ROWS / 2], const float (&of_chunk)[ROWS / 2], const float (&scale)[2]) {
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) sums[each] += of_chunk[each] * scale[each / 2 % 2];
}

__device__ void add_last(float (&sums)[ROWS / 2], const float (&of_chunk)[ROWS / 2], const float (&scale)[2]) {
    wait_for_wgmma<0>();
    add_scaled(sums, of_chunk, scale);
}

// The sums of a part of a tile, of which each chunk's are scaled while the tensor cores have the next one. The loop has two
// ends: behind a common one ptxas would not know which sums are the last, and would let no wgmma be under way.
__device__ void multiply(float (&sums)[ROWS / 2], const Work& work, Ring& ring, const unsigned char* slots) {
    Multiplier own(slots, ring);
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) sums[each] = 0;
    if constexpr (!SCALES_SUMS) {
        for (int chunk = work.first; chunk < work.last; ++chunk)
            own.multiply(sums, true, chunk + 1 == work.last, [] {});
        wait_for_wgmma<0>();
    } else {
        float even[ROWS / 2], odd[ROWS / 2] = {};
        for (int chunk = work.first;; ++chunk) {
            own.multiply(even, false, chunk + 1 == work.last, [&] { add_scaled(sums, odd, own.scale); });
            if (++chunk == work.last) {
                add_last(sums, even, own.scale);
                break;
            }
            own.multiply(odd, false, chunk + 1 == work.last, [&] { add_scaled(sums, even, own.scale); });
            if (chunk + 1 == work.last) {
                add_last(sums, odd, own.scale);
                break;
            }
        }
    }
    Ring::release(own.before);
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
    const int lane = threadIdx.x % 32, place = lane % 4, output = (work.first_tile + threadIdx.x / 32) * 16;
    const bool is_low = place < 2, is_outer = place == 0 || place == 3;
    if (output >= matrix.num_outputs) return;
#pragma unroll
    for (int eight = 0; eight < ROWS / 8; ++eight) {
        const int row = work.first_row + eight * 8 + lane / 4;
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
        give_registers<KEPT_REGISTERS>();
        const bool copies = threadIdx.x % 32 == 0 && threadIdx.x < CONSUMERS + COPIERS * 32;
        if (copies) copy(map, matrix, work, ring);
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
            const int splits = cluster_size(), split = blockIdx.x % splits;
            write_share<CONSUMERS>(out, out_stride, matrix.num_outputs, (int)rows, work.first_tile * 16, work.first_row,
                                   splits, split, shared_address(memory) + BARRIER_BYTES);
        }
    }
    if (is_shared) leave_the_cluster();  // whose shared memory must last until all have read it
}
