// GEMM of some dozen to some hundred rows with FP8 weights on Hopper's tensor cores (wgmma), for matrices of few tiles.
//
// A tile is 64 outputs a warpgroup by ROWS rows. One thread has the copy engine (TMA) bring weights and rows, as far ahead
// as there are stages; weights are on their way before the kernel before has ended, as no kernel writes them.
//
// The tensor cores keep some 14 bits of a sum, so a block has few inputs. The blocks of a cluster share those of a tile,
// and each adds the sums of some rows in float32, in a fixed order.
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

// The stages, one after the other, each with a barrier that says it is full and one that says it is empty.
struct Ring {
    unsigned memory;
    int stage = 0;
    unsigned phase = 0;

    __device__ Ring(unsigned memory) : memory(memory) {}

    __device__ unsigned weights() const { return memory + stage * STAGE_BYTES; }
    __device__ unsigned rows() const { return weights() + WEIGHT_BYTES; }
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

__device__ void ask_for_weights(const RowMap& map, const Place& place, const Ring& ring, int chunk) {
    expect_bytes(ring.full(), STAGE_BYTES);
    copy_box(ring.weights(), map, chunk * CHUNK, place.first_output, ring.full());
}

__device__ void ask_for_rows(const RowMap& map, const Place& place, const Ring& ring, int chunk) {
    copy_box(ring.rows(), map, chunk * CHUNK, place.first_row, ring.full());
}

// What one thread does.
__device__ void ask(const RowMap& rows, const RowMap& weights, const Place& place, Ring ring) {
    prepare(rows);
    const int first_end = min(place.first_chunk + STAGES, place.end_chunk);
    Ring early = ring;
    for (int chunk = place.first_chunk; chunk < first_end; ++chunk, early.go_on())
        ask_for_weights(weights, place, early, chunk);
    wait_for_the_kernel_before();
    for (int chunk = place.first_chunk; chunk < first_end; ++chunk, ring.go_on()) ask_for_rows(rows, place, ring, chunk);
    for (int chunk = first_end; chunk < place.end_chunk; ++chunk, ring.go_on()) {
        wait_for_phase(ring.empty(), ring.phase ^ 1);
        ask_for_weights(weights, place, ring, chunk);
        ask_for_rows(rows, place, ring, chunk);
    }
}

__device__ void multiply(float (&sums)[ROWS / 2], const Place& place, Ring ring) {
    const unsigned own = threadIdx.x / 128 * (64 * CHUNK);
    unsigned before = 0;
    for (int chunk = place.first_chunk; chunk < place.end_chunk; ++chunk) {
        wait_for_phase(ring.full(), ring.phase);
        begin_wgmma();
#pragma unroll
        for (int quarter = 0; quarter < CHUNK / 32; ++quarter)
            multiply_add(sums, operand_at(ring.weights() + own + quarter * 32), operand_at(ring.rows() + quarter * 32),
                         chunk > place.first_chunk || quarter);
        close_wgmma();
        wait_for_wgmma<1>();
        arrive_if(before, threadIdx.x % 32 == 0 && before);  // its stage is read
        before = ring.empty();
        ring.go_on();
    }
    wait_for_wgmma<0>();
}

// `outputs` and `rows` are the matrix' and the rows' scales.
__device__ void scale_sums(float (&sums)[ROWS / 2], const Place& place, const float* outputs, const float* rows,
                           int num_outputs, int num_rows) {
    const int lane = threadIdx.x % 32, output = place.first_output + threadIdx.x / 32 * 16 + lane / 4;
    const float of_output[2] = {__ldg(outputs + min(output, num_outputs - 1)),
                                __ldg(outputs + min(output + 8, num_outputs - 1))};
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) {
        const int row = place.first_row + each / 4 * 8 + lane % 4 * 2 + each % 2;
        sums[each] *= of_output[each / 2 % 2] * rows[min(row, num_rows - 1)];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp8_tma_gemm(const __grid_constant__ RowMap rows, const float* row_scale, const __grid_constant__ RowMap weights,
                 const float* scale, unsigned short* out, long long num_rows, long long num_outputs,
                 long long num_inputs, long long out_stride) {
    unsigned char* memory = shared_memory() + (-shared_address(shared_memory()) & 1023);
    const Ring ring(shared_address(memory));
    const Place place((int)num_outputs, (int)num_inputs);
    let_the_next_kernel_begin();
    if (threadIdx.x == 0) {
        ring.begin();
        show_barriers();
    }
    leave_the_cluster();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) ask(rows, weights, place, ring);
        meet_the_warp();
    } else {
        float sums[ROWS / 2];
        multiply(sums, place, ring);
        wait_for_the_kernel_before();
        scale_sums(sums, place, scale, row_scale, (int)num_outputs, (int)num_rows);
        meet<CONSUMERS>();  // the stages are read
        keep_sums((float*)memory, sums);
    }
    meet_the_cluster();
    write_share<THREADS>(out, out_stride, (int)num_outputs, (int)num_rows, place.first_output, place.first_row,
                         place.splits, place.split, ring.memory);
    leave_the_cluster();  // whose shared memory must last until all have read it
}
