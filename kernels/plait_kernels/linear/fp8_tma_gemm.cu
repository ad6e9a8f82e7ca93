// GEMM of some dozen to some hundred rows with FP8 weights on Hopper's tensor cores (wgmma), for matrices of few tiles.
//
// A tile is 64 outputs a warpgroup by ROWS rows. One thread has the copy engine (TMA) bring weights and rows, as far ahead
// as there are stages; weights are on their way before the kernel before has ended, as no kernel writes them.
//
// The tensor cores keep some 14 bits of a sum: each stage's is scaled and added in float32 (HAS_BLOCKS), or a block has few
// inputs. The blocks of a cluster share those of a tile, and each adds the sums of some rows in float32, in a fixed order.
#include "gemm_ptx.cuh"

constexpr int CHUNK = 128;  // inputs of a stage
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + 32;
constexpr int OUTPUTS = WARPGROUPS * 64;
constexpr int WEIGHT_BYTES = OUTPUTS * CHUNK;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROWS * CHUNK;
#include "wgmma_sums.cuh"
constexpr int SUM_BYTES = ROWS * SUM_STRIDE * 4;  // where stages were
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;
constexpr int SCALES_AT = BARRIERS_AT + STAGES * 16;  // of each stage's rows, with blocks
#ifdef HAS_BLOCKS
constexpr bool IS_BLOCKED = true;
static_assert(ROWS <= 128, "a thread has no registers for more sums twice");
#else
constexpr bool IS_BLOCKED = false;
#endif

// The stages, one after the other, each with a barrier that says it is full and one that says it is empty.
struct Ring {
    unsigned memory;
    int stage = 0;
    unsigned phase = 0;

    __device__ Ring(unsigned memory) : memory(memory) {}

    __device__ unsigned weights() const { return memory + stage * STAGE_BYTES; }
    __device__ unsigned rows() const { return weights() + WEIGHT_BYTES; }
    __device__ int scales_at() const { return SCALES_AT + stage * ROWS * 4; }
    __device__ unsigned full() const { return memory + BARRIERS_AT + stage * 16; }
    __device__ unsigned empty() const { return full() + 8; }
    __device__ void go_on() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ void begin() const {
        for (int each = 0; each < STAGES; ++each) {
            begin_barrier(memory + BARRIERS_AT + each * 16, 1);
            begin_barrier(memory + BARRIERS_AT + each * 16 + 8, WARPGROUPS * 4);
        }
    }
};

// Where a block's work is.
struct Place {
    int splits, split, first_row, first_output, first_chunk, end_chunk;

    __device__ Place(int num_outputs, int num_inputs) {
        splits = cluster_size(), split = blockIdx.x % splits;
        const int panel = blockIdx.x / splits, panels = (num_outputs + OUTPUTS - 1) / OUTPUTS;
        const int chunks = (num_inputs + CHUNK - 1) / CHUNK;
        first_row = panel / panels * ROWS;
        first_output = panel % panels * OUTPUTS;
        first_chunk = chunks * split / splits;
        end_chunk = chunks * (split + 1) / splits;
    }
};

// Rows, and what their scales are: one each, or one for each chunk, `stride` apart.
struct Rows {
    const RowMap& map;
    const float* scale;
    int num, stride;

    // Whole sixteens, as they are held.
    __device__ int scale_bytes(const Place& place) const {
        return IS_BLOCKED ? min(ROWS, stride - place.first_row) * 4 : 0;
    }
    __device__ void ask(const Place& place, const Ring& ring, int chunk) const {
        copy_box(ring.rows(), map, chunk * CHUNK, place.first_row, ring.full());
        if (IS_BLOCKED)
            copy_bytes(ring.memory + ring.scales_at(), scale + (long long)chunk * stride + place.first_row,
                       scale_bytes(place), ring.full());
    }
};

struct Matrix {
    const RowMap& map;
    const float* scale;
    int num_outputs, num_inputs, block_rows;

    __device__ void ask(const Place& place, const Ring& ring, int chunk, int more_bytes) const {
        expect_bytes(ring.full(), STAGE_BYTES + more_bytes);
        copy_box(ring.weights(), map, chunk * CHUNK, place.first_output, ring.full());
    }
    // Of this thread's two outputs; with blocks, of a chunk.
    __device__ void read_scales(float (&of_output)[2], const Place& place, int chunk) const {
        const int first = place.first_output + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        for (int high = 0; high < 2; ++high) {
            const int output = min(first + 8 * high, num_outputs - 1);
            const int chunks = (num_inputs + CHUNK - 1) / CHUNK;
            of_output[high] = __ldg(scale + (IS_BLOCKED ? output / block_rows * chunks + chunk : output));
        }
    }
};

// What one thread does.
__device__ void ask(const Rows& rows, const Matrix& matrix, const Place& place, Ring ring) {
    prepare(rows.map);
    const int first_end = min(place.first_chunk + STAGES, place.end_chunk), scale_bytes = rows.scale_bytes(place);
    Ring early = ring;
    for (int chunk = place.first_chunk; chunk < first_end; ++chunk, early.go_on())
        matrix.ask(place, early, chunk, scale_bytes);
    wait_for_the_kernel_before();
    for (int chunk = place.first_chunk; chunk < first_end; ++chunk, ring.go_on()) rows.ask(place, ring, chunk);
    for (int chunk = first_end; chunk < place.end_chunk; ++chunk, ring.go_on()) {
        wait_for_phase(ring.empty(), ring.phase ^ 1);
        matrix.ask(place, ring, chunk, scale_bytes);
        rows.ask(place, ring, chunk);
    }
}

// sums += a stage's weights times its rows, or begins with that, later.
__device__ void begin_to_multiply(float (&sums)[ROWS / 2], const Ring& ring, bool is_more) {
    const unsigned own = threadIdx.x / 128 * (64 * CHUNK);
    begin_wgmma();
#pragma unroll
    for (int quarter = 0; quarter < CHUNK / 32; ++quarter)
        multiply_add(sums, operand_at(ring.weights() + own + quarter * 32), operand_at(ring.rows() + quarter * 32),
                     is_more || quarter);
    close_wgmma();
}

__device__ void multiply(float (&sums)[ROWS / 2], const Place& place, Ring ring) {
    unsigned before = 0;
    for (int chunk = place.first_chunk; chunk < place.end_chunk; ++chunk) {
        wait_for_phase(ring.full(), ring.phase);
        begin_to_multiply(sums, ring, chunk > place.first_chunk);
        wait_for_wgmma<1>();
        arrive_if(before, threadIdx.x % 32 == 0 && before);  // its stage is read
        before = ring.empty();
        ring.go_on();
    }
    wait_for_wgmma<0>();
}

__device__ void scale_sums(float (&sums)[ROWS / 2], const Place& place, const Matrix& matrix, const Rows& rows) {
    float of_output[2];
    matrix.read_scales(of_output, place, 0);
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) {
        const int row = place.first_row + each / 4 * 8 + threadIdx.x % 4 * 2 + each % 2;
        sums[each] *= of_output[each / 2 % 2] * rows.scale[min(row, rows.num - 1)];
    }
}

// The same with blocks. `memory` is where stages begin.
__device__ void multiply_scaled(float (&sums)[ROWS / 2], const Place& place, const Matrix& matrix, Ring ring,
                                const unsigned char* memory) {
    float own[ROWS / 2], next[2];
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) sums[each] = 0;
    matrix.read_scales(next, place, place.first_chunk);
    for (int chunk = place.first_chunk; chunk < place.end_chunk; ++chunk) {
        const float of_output[2] = {next[0], next[1]};
        wait_for_phase(ring.full(), ring.phase);
        begin_to_multiply(own, ring, false);
        if (chunk + 1 < place.end_chunk) matrix.read_scales(next, place, chunk + 1);
        wait_for_wgmma<0>();
        const float* of_row = (const float*)(memory + ring.scales_at());
#pragma unroll
        for (int each = 0; each < ROWS / 2; ++each)
            sums[each] += own[each] * (of_output[each / 2 % 2] * of_row[each / 4 * 8 + threadIdx.x % 4 * 2 + each % 2]);
        meet_the_warp();
        arrive_if(ring.empty(), threadIdx.x % 32 == 0);
        ring.go_on();
    }
}

// Once all inputs are multiplied, as its weights would delay this kernel's. Larger tiles were fastest if it begins when
// they have ended.
__device__ void let_the_next_kernel_begin_early() {
    if (ROWS <= 64) let_the_next_kernel_begin();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp8_tma_gemm(const __grid_constant__ RowMap row_map, const float* row_scale,
                 const __grid_constant__ RowMap weight_map, const float* scale, unsigned short* out, long long num_rows,
                 long long num_outputs, long long num_inputs, long long scale_stride, long long block_rows,
                 long long out_stride) {
    const Rows rows = {row_map, row_scale, (int)num_rows, (int)scale_stride};
    const Matrix matrix = {weight_map, scale, (int)num_outputs, (int)num_inputs, (int)block_rows};
    unsigned char* memory = shared_memory() + (-shared_address(shared_memory()) & 1023);
    const Ring ring(shared_address(memory));
    const Place place(matrix.num_outputs, matrix.num_inputs);
    if (threadIdx.x == 0) {
        ring.begin();
        show_barriers();
    }
    leave_the_cluster();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) ask(rows, matrix, place, ring);
        meet_the_warp();
        let_the_next_kernel_begin_early();
    } else {
        float sums[ROWS / 2];
        if constexpr (IS_BLOCKED) {
            multiply_scaled(sums, place, matrix, ring, memory);
            wait_for_the_kernel_before();
        } else {
            multiply(sums, place, ring);
            wait_for_the_kernel_before();
            scale_sums(sums, place, matrix, rows);
        }
        let_the_next_kernel_begin_early();
        meet<CONSUMERS>();  // the stages are read
        keep_sums((float*)memory, sums);
    }
    meet_the_cluster();
    write_share<THREADS>(out, out_stride, matrix.num_outputs, rows.num, place.first_output, place.first_row,
                         place.splits, place.split, ring.memory);
    leave_the_cluster();  // whose shared memory must last until all have read it
}
