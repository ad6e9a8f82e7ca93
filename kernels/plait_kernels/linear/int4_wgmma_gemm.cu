// GEMM of up to some hundred rows with 4-bit weights on Hopper's tensor cores (wgmma).
//
// A block multiplies 64 outputs a warpgroup by ROWS rows. Codes become bfloat16 in registers, the left operand; rows
// come to shared memory, the right one. The blocks of a cluster share the inputs, and each adds the sums of some rows in
// a fixed order. A value is (code - zero) * scale, rounded once: a scale is the sum of two bfloat16 numbers, of
// which the second, times a small integer, is exact.
#include "int4_codes.cuh"

constexpr int THREADS = WARPGROUPS * 128;
constexpr int OUTPUTS = WARPGROUPS * 64;
constexpr int AHEAD = STAGES - 2;  // while one stage is multiplied, the one before it may still be read
constexpr int X_BYTES = ROWS * 128;
constexpr int CODE_BYTES = THREADS * 16;
constexpr int SCALE_BYTES = SCALES * OUTPUTS * sizeof(Scale);
constexpr int ZERO_BYTES = SCALES * OUTPUTS;
constexpr int STAGE_BYTES = (X_BYTES + CODE_BYTES + SCALE_BYTES + ZERO_BYTES + 1023) / 1024 * 1024;
constexpr int SUM_STRIDE = OUTPUTS + 4;  // floats of a row; the 4 spread rows over the banks

// Rows of 64 inputs, 128 bytes, of which 16 bytes each are where the tensor cores look for them: 8 rows are an atom.
__device__ unsigned long long rows_at(unsigned address) {
    return (unsigned long long)(address >> 4 & 0x3FFF) | 1ull << 16 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}

// Scales and zeros of a thread's two outputs, each twice in bfloat16.
struct Marks {
    unsigned less[2], scale[2], rest[2];

    __device__ void read(const unsigned char* stage, int part, int output) {
        const Scale* scales = (const Scale*)(stage + X_BYTES + CODE_BYTES) + part * OUTPUTS;
        const unsigned char* zeros = stage + X_BYTES + CODE_BYTES + SCALE_BYTES + part * OUTPUTS;
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int own = output + 8 * high;
#if SCALE_KIND == 2
            const float whole = scales[own];
#else
            const float whole = float_of_scale(scales[own]);
#endif
            scale[high] = bfloat16_pair(whole, whole);
            const float left = whole - __uint_as_float(scale[high] << 16);
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
        return fma2(code, scale[high], fma2(code, rest[high], 0x80008000));
    }
};

// Where a block's work is, and what a thread of it copies.
struct Place {
    int first_row, first_tile, first_chunk, num_stages;
    const uint4* codes;
    const unsigned short* x;
    int rows_left;  // from this thread's first row on

    __device__ Place(const Matrix& matrix, const unsigned short* all, int num_rows) {
        const int splits = cluster_size(), thread = threadIdx.x;
        const int rank = blockIdx.x % splits, panel = blockIdx.x / splits;
        const int panels = (matrix.tiles() + OUTPUTS / 16 - 1) / (OUTPUTS / 16);
        first_row = panel / panels * ROWS;
        first_tile = panel % panels * (OUTPUTS / 16);
        first_chunk = matrix.num_chunks * rank / splits;
        num_stages = 2 * (matrix.num_chunks * (rank + 1) / splits - first_chunk);
        const int tile = min(first_tile + thread / 32, matrix.tiles() - 1);
        codes = matrix.words_at(first_chunk, 0, tile, thread % 32);
        rows_left = num_rows - first_row - thread / 8;
        x = all + (long long)(first_row + thread / 8) * matrix.num_inputs + first_chunk * CHUNK + input_in_chunk();
    }

    __device__ static int input_in_chunk() { return threadIdx.x % 8 / 2 * 32 + threadIdx.x % 2 * 8; }
};

__device__ void copy_marks(unsigned scales, const Matrix& matrix, const Place& place, int chunk) {
    constexpr int EACH = 16 / sizeof(Scale);
    for (int piece = threadIdx.x; piece < SCALE_BYTES / 16; piece += THREADS) {
        const int part = piece / (OUTPUTS / EACH), own = place.first_tile * 16 + piece % (OUTPUTS / EACH) * EACH;
        const bool is_there = own < matrix.num_outputs;
        copy_later(scales + piece * 16, matrix.scale + matrix.scale_at(chunk, part, is_there ? own : 0), is_there);
    }
#ifdef HAS_ZERO
    for (int piece = THREADS - 1 - threadIdx.x; piece < ZERO_BYTES / 16; piece += THREADS) {
        const int part = piece / (OUTPUTS / 16), own = place.first_tile * 16 + piece % (OUTPUTS / 16) * 16;
        const bool is_there = own < matrix.num_outputs;
        copy_later(scales + SCALE_BYTES + piece * 16, matrix.zero + matrix.scale_at(chunk, part, is_there ? own : 0),
                   is_there);
    }
#endif
}

__device__ void copy_weights(const Matrix& matrix, const Place& place, unsigned stage, int index) {
    const unsigned codes = stage + X_BYTES;
    copy_later(codes + threadIdx.x * 16, place.codes + index * matrix.tiles() * 32, true);
    if (SCALES > 1 || index % 2 == 0) copy_marks(codes + CODE_BYTES, matrix, place, place.first_chunk + index / 2);
}

__device__ void copy_rows(const Matrix& matrix, const Place& place, unsigned stage, int index) {
    const int input = index / 2 * CHUNK + index % 2 * 16, row = threadIdx.x / 8;
    const bool is_input = place.first_chunk * CHUNK + input + Place::input_in_chunk() < matrix.num_inputs;
    const unsigned to = stage + row * 128 + ((threadIdx.x % 8 ^ row % 8) << 4);
#pragma unroll
    for (int more = 0; more < ROWS; more += THREADS / 8) {
        if (ROWS % (THREADS / 8) && row + more >= ROWS) break;
        const bool is_there = is_input && more < place.rows_left;
        copy_later(to + more * 128, place.x + (is_there ? more * matrix.num_inputs + input : 0), is_there);
    }
}

__device__ void add_stage(float (&sums)[ROWS / 2], unsigned (&values)[2][4], Marks& marks, const unsigned char* stage,
                          unsigned address, int index) {
    const int output = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const uint4 words = *(const uint4*)(stage + X_BYTES + threadIdx.x * 16);
    if (SCALES == 1 && index % 2 == 0) marks.read(stage, 0, output);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        if (SCALES > 1 && quarter % (4 / SCALES) == 0) marks.read(stage, quarter * SCALES / 4, output);
        unsigned(&own)[4] = values[quarter % 2];
        wait_for_wgmma<1>();
        own[0] = marks.values(words.x, quarter, 0);
        own[1] = marks.values(words.y, quarter, 1);
        own[2] = marks.values(words.z, quarter, 0);
        own[3] = marks.values(words.w, quarter, 1);
        begin_wgmma();
        multiply_add(sums, own, rows_at(address + quarter * 32), index || quarter);
        close_wgmma();
    }
}

__device__ void keep_sums(float* kept, const float (&sums)[ROWS / 2]) {
    const int lane = threadIdx.x % 32, output = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int each = 0; each < ROWS / 2; ++each) {
        const int row = each / 4 * 8 + lane % 4 * 2 + each % 2;
        kept[row * SUM_STRIDE + output + each / 2 % 2 * 8] = sums[each];
    }
}

__device__ void write_four(unsigned short* out, float4 sums) {
    const unsigned low = bfloat16_pair(sums.x, sums.y), high = bfloat16_pair(sums.z, sums.w);
    if (((unsigned long long)out & 7) == 0) {
        *(uint2*)out = make_uint2(low, high);
    } else {
        out[0] = (unsigned short)low, out[1] = (unsigned short)(low >> 16);
        out[2] = (unsigned short)high, out[3] = (unsigned short)(high >> 16);
    }
}

// This block's share of the rows, of all blocks of the cluster in their order.
__device__ void write_sums(unsigned short* out, long long out_stride, int num_rows, const Matrix& matrix,
                           const Place& place, unsigned kept) {
    constexpr int FOURS = OUTPUTS / 4;
    const int splits = cluster_size(), share = (ROWS + splits - 1) / splits;
    const int first = blockIdx.x % splits * share, end = min(min(first + share, ROWS), num_rows - place.first_row);
    for (int each = threadIdx.x; each < (end - first) * FOURS; each += THREADS) {
        const int row = first + each / FOURS, own = each % FOURS * 4, output = place.first_tile * 16 + own;
        if (output >= matrix.num_outputs) continue;
        float4 sums = make_float4(0, 0, 0, 0);
        for (int other = 0; other < splits; ++other) {
            const float4 more = sums_of(kept + (row * SUM_STRIDE + own) * 4, other);
            sums.x += more.x, sums.y += more.y, sums.z += more.z, sums.w += more.w;
        }
        write_four(out + (place.first_row + row) * out_stride + output, sums);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_wgmma_gemm(const unsigned short* x, const uint4* codes, const Scale* scale, const unsigned char* zero,
                   unsigned short* out, long long rows, long long outputs, long long inputs, long long chunks,
                   long long out_stride) {
    const Matrix matrix = {codes, scale, zero, (int)outputs, (int)inputs, (int)chunks};
    unsigned char* stages = shared_memory() + (-shared_address(shared_memory()) & 1023);
    const unsigned first = shared_address(stages), end = first + STAGES * STAGE_BYTES;
    const Place place(matrix, x, (int)rows);
    let_the_next_kernel_begin();
#pragma unroll
    for (int index = 0; index < AHEAD; ++index)
        if (index < place.num_stages) copy_weights(matrix, place, first + index * STAGE_BYTES, index);
    wait_for_the_kernel_before();
#pragma unroll
    for (int index = 0; index < AHEAD; ++index) {
        if (index < place.num_stages) copy_rows(matrix, place, first + index * STAGE_BYTES, index);
        close_copies();
    }
    float sums[ROWS / 2];
    unsigned values[2][4], read = first, written = first + AHEAD * STAGE_BYTES;
    Marks marks;
    for (int index = 0; index < place.num_stages; ++index) {
        wait_for_copies<AHEAD - 1>();
        show_copies_to_wgmma();
        __syncthreads();
        if (index + AHEAD < place.num_stages) {
            copy_weights(matrix, place, written, index + AHEAD);
            copy_rows(matrix, place, written, index + AHEAD);
        }
        close_copies();
        add_stage(sums, values, marks, stages + (read - first), read, index);
        if ((read += STAGE_BYTES) == end) read = first;
        if ((written += STAGE_BYTES) == end) written = first;
    }
    wait_for_wgmma<0>();
    wait_for_copies<0>();
    __syncthreads();
    keep_sums((float*)stages, sums);
    meet_the_cluster();
    write_sums(out, out_stride, (int)rows, matrix, place, first);
    meet_the_cluster();  // whose shared memory must last until all have read it
}
