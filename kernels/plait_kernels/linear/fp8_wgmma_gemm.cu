// GEMM of up to some hundred rows with FP8 weights on Hopper's tensor cores (wgmma).
//
// A block multiplies 64 outputs a warpgroup by ROWS rows; both come to shared memory in stages of 128 inputs. The tensor
// cores keep some 14 bits of a sum: each stage's is scaled (HAS_BLOCKS) and added in float32. The blocks of a cluster
// share the inputs, and each adds the sums of some rows in a fixed order.
//
// IS_GATED writes half as many outputs: the second half of the matrix's times the first one's SiLU. Each 16 of a block's
// are 8 gates and the 8 that those gate.
#include "gemm_ptx.cuh"

constexpr int CHUNK = 128;  // inputs of a stage
constexpr int THREADS = WARPGROUPS * 128;
constexpr int OUTPUTS = WARPGROUPS * 64;
constexpr int AHEAD = STAGES - 1;
constexpr int X_BYTES = ROWS * CHUNK;
constexpr int WEIGHT_BYTES = OUTPUTS * CHUNK;
#ifdef HAS_BLOCKS
constexpr bool IS_BLOCKED = true;
constexpr int SCALE_BYTES = ROWS * 4;
#else
constexpr bool IS_BLOCKED = false;
constexpr int SCALE_BYTES = 0;
#endif
#ifdef IS_GATED
constexpr int HALVES = 2;  // of the matrix's outputs
#else
constexpr int HALVES = 1;
#endif
constexpr int STAGE_BYTES = (X_BYTES + WEIGHT_BYTES + SCALE_BYTES + 1023) / 1024 * 1024;
#include "wgmma_sums.cuh"

// What the kernel is given of a matrix.
struct Matrix {
    const unsigned char* weights;
    const float* scale;
    int num_outputs, num_inputs, block_rows;

    __device__ int num_chunks() const { return (num_inputs + CHUNK - 1) / CHUNK; }

    __device__ int half() const { return num_outputs / HALVES; }

    // The matrix's of one of a block's outputs, `more` (a multiple of 16) after another; behind the end it is the last.
    __device__ int output_of(int first_output, int own, int more = 0) const {
        if (HALVES == 1) return min(first_output + own + more, num_outputs - 1);
        return min((first_output + more) / 2 + own / 16 * 8 + own % 8, half() - 1) + own / 8 % 2 * half();
    }

    // Of the first scale of one of this thread's two outputs.
    __device__ int scale_place(int first_output, int high) const {
        const int output = output_of(first_output, threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * high);
        return IS_BLOCKED ? output / block_rows * num_chunks() : output;
    }

    __device__ float scale_at(int place, int chunk) const { return __ldg(scale + (IS_BLOCKED ? place + chunk : place)); }
};

struct Rows {
    const unsigned char* x;
    const float* scale;
    int num, scale_stride;
};

// Where a block's work is.
struct Place {
    int first_row, first_output, first_chunk, num_stages;

    __device__ Place(const Matrix& matrix) {
        const int splits = cluster_size(), rank = blockIdx.x % splits, panel = blockIdx.x / splits;
        const int panels = (matrix.num_outputs + OUTPUTS - 1) / OUTPUTS;
        first_row = panel / panels * ROWS;
        first_output = panel % panels * OUTPUTS;
        first_chunk = matrix.num_chunks() * rank / splits;
        num_stages = matrix.num_chunks() * (rank + 1) / splits - first_chunk;
    }
};

__device__ void copy_weights(const Matrix& matrix, const Place& place, unsigned stage, int index) {
    const int input = (place.first_chunk + index) * CHUNK + threadIdx.x % 8 * 16, first = threadIdx.x / 8;
    const bool is_there = input < matrix.num_inputs;
    const unsigned to = stage + X_BYTES + first * CHUNK + ((threadIdx.x % 8 ^ first % 8) << 4);
#pragma unroll
    for (int more = 0; more < OUTPUTS; more += THREADS / 8) {
        const int output = matrix.output_of(place.first_output, first, more);
        copy_later(to + more * CHUNK, matrix.weights + (long long)output * matrix.num_inputs + (is_there ? input : 0),
                   is_there);
    }
}

__device__ void copy_scales(const Rows& rows, const Place& place, unsigned to, int group) {
    for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        const bool is_there = place.first_row + row < rows.num;
        copy_word_later(to + row * 4,
                        rows.scale + (is_there ? (long long)group * rows.scale_stride + place.first_row + row : 0),
                        is_there);
    }
}

__device__ void copy_rows(const Matrix& matrix, const Rows& rows, const Place& place, unsigned stage, int index) {
    const int input = (place.first_chunk + index) * CHUNK + threadIdx.x % 8 * 16, first = threadIdx.x / 8;
    const unsigned to = stage + first * CHUNK + ((threadIdx.x % 8 ^ first % 8) << 4);
#pragma unroll
    for (int more = 0; more < ROWS; more += THREADS / 8) {
        if (ROWS % (THREADS / 8) && first + more >= ROWS) break;
        const int row = place.first_row + first + more;
        const bool is_there = input < matrix.num_inputs && row < rows.num;
        copy_later(to + more * CHUNK, rows.x + (is_there ? (long long)row * matrix.num_inputs + input : 0), is_there);
    }
    if (IS_BLOCKED) copy_scales(rows, place, stage + X_BYTES + WEIGHT_BYTES, place.first_chunk + index);
}

// `own` are the stage's sums; `scales` are of its rows.
__device__ void add_stage(float (&sums)[ROWS / 2], float (&own)[ROWS / 2], const float (&scale)[2], unsigned stage,
                          const float* scales) {
    const unsigned weights = stage + X_BYTES + threadIdx.x / 128 * (64 * CHUNK);
    begin_wgmma();
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter)
        multiply_add(own, operand_at(weights + quarter * 32), operand_at(stage + quarter * 32), quarter > 0);
    close_wgmma();
    wait_for_wgmma<0>();
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) {
        if (IS_BLOCKED)
            sums[each] += own[each] * (scale[each / 2 % 2] * scales[each / 4 * 8 + threadIdx.x % 4 * 2 + each % 2]);
        else
            sums[each] += own[each];
    }
}

// Four sums of all blocks of the cluster, in their order.
__device__ float4 sums_of_all(unsigned at, int splits) {
    float4 sums = make_float4(0, 0, 0, 0);
    for (int other = 0; other < splits; ++other) {
        const float4 more = sums_of(at, other);
        sums.x += more.x, sums.y += more.y, sums.z += more.z, sums.w += more.w;
    }
    return sums;
}

__device__ float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

// This block's share of the rows.
__device__ void write_sums(unsigned short* out, long long out_stride, int num_rows, int num_outputs, int first_row,
                           int first_output, unsigned kept) {
    constexpr int FOURS = OUTPUTS / HALVES / 4;
    const int splits = cluster_size(), share = (ROWS + splits - 1) / splits;
    const int first = blockIdx.x % splits * share, end = min(min(first + share, ROWS), num_rows - first_row);
    for (int each = threadIdx.x; each < (end - first) * FOURS; each += THREADS) {
        const int row = first + each / FOURS, own = each % FOURS * 4, output = first_output / HALVES + own;
        if (output >= num_outputs) continue;
        const unsigned at = kept + (row * SUM_STRIDE + (HALVES == 1 ? own : own / 8 * 16 + own % 8)) * 4;
        float4 sums = sums_of_all(at, splits);
        if (HALVES > 1) {
            const float4 up = sums_of_all(at + 8 * 4, splits);
            sums = make_float4(gated(sums.x, up.x), gated(sums.y, up.y), gated(sums.z, up.z), gated(sums.w, up.w));
        }
        write_four(out + (first_row + row) * out_stride + output, bfloat16_pair(sums.x, sums.y),
                   bfloat16_pair(sums.z, sums.w));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fp8_wgmma_gemm(const unsigned char* x, const float* x_scale, const unsigned char* weights, const float* scale,
                   unsigned short* out, long long num_rows, long long outputs, long long inputs, long long scale_stride,
                   long long block_rows, long long out_stride) {
    const Matrix matrix = {weights, scale, (int)outputs, (int)inputs, (int)block_rows};
    const Rows rows = {x, x_scale, (int)num_rows, (int)scale_stride};
    unsigned char* stages = shared_memory() + (-shared_address(shared_memory()) & 1023);
    const unsigned first = shared_address(stages), end = first + STAGES * STAGE_BYTES;
    const Place place(matrix);
    if (place.num_stages <= AHEAD) let_the_next_kernel_begin();
#pragma unroll
    for (int index = 0; index < AHEAD; ++index)
        if (index < place.num_stages) copy_weights(matrix, place, first + index * STAGE_BYTES, index);
    const int scale_of[2] = {matrix.scale_place(place.first_output, 0), matrix.scale_place(place.first_output, 1)};
    float own_scale[2] = {matrix.scale_at(scale_of[0], place.first_chunk),
                          matrix.scale_at(scale_of[1], place.first_chunk)};
    wait_for_the_kernel_before();
    if (!IS_BLOCKED) copy_scales(rows, place, end, 0);
#pragma unroll
    for (int index = 0; index < AHEAD; ++index) {
        if (index < place.num_stages) copy_rows(matrix, rows, place, first + index * STAGE_BYTES, index);
        close_copies();
    }
    float sums[ROWS / 2] = {}, own[ROWS / 2];
    unsigned read = first, written = first + AHEAD * STAGE_BYTES;
    for (int index = 0; index < place.num_stages; ++index) {
        wait_for_copies<AHEAD - 1>();
        show_copies_to_wgmma();
        __syncthreads();
        if (index + AHEAD < place.num_stages) {
            copy_weights(matrix, place, written, index + AHEAD);
            copy_rows(matrix, rows, place, written, index + AHEAD);
            if (index + AHEAD + 1 == place.num_stages) let_the_next_kernel_begin();
        }
        close_copies();
        const float scale[2] = {own_scale[0], own_scale[1]};
        if (IS_BLOCKED && index + 1 < place.num_stages)
#pragma unroll
            for (int high = 0; high < 2; ++high)
                own_scale[high] = matrix.scale_at(scale_of[high], place.first_chunk + index + 1);
        add_stage(sums, own, scale, read, (const float*)(stages + (read - first) + X_BYTES + WEIGHT_BYTES));
        if ((read += STAGE_BYTES) == end) read = first;
        if ((written += STAGE_BYTES) == end) written = first;
    }
    wait_for_copies<0>();
    __syncthreads();
    if (!IS_BLOCKED) {
        const float* scales = (const float*)(stages + STAGES * STAGE_BYTES);
#pragma unroll
        for (int each = 0; each < ROWS / 2; ++each)
            sums[each] *= own_scale[each / 2 % 2] * scales[each / 4 * 8 + threadIdx.x % 4 * 2 + each % 2];
    }
    keep_sums((float*)stages, sums);
    meet_the_cluster();
    write_sums(out, out_stride, (int)num_rows, matrix.half(), place.first_row, place.first_output, first);
    meet_the_cluster();  // whose shared memory must last until all have read it
}
