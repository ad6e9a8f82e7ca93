// GEMV of a bfloat16 row with FP8 weights, as fast as memory gives them.
//
// A block has all inputs of TILES tiles of 16 outputs at a time; its WARPS take the chunks of inputs in turn, and their
// sums are added in a fixed order. A warp copies the weights of AHEAD chunks before it multiplies them, over the end of
// a tile; the first before the kernel before this one has ended. When the last are on their way the next kernel may
// begin: its first copies fill the time until it may read its row. Weights become float16, which is exact; so does the
// row, of which each chunk is made as large as float16 allows. Tensor cores multiply eight copies of it.
//
// HAS_NORM adds a residual and normalises before; IS_GATED multiplies the second half of the outputs by the first one's
// SiLU. Weights have a scale for each output or, HAS_BLOCKS, for each block of outputs and each chunk.
#include "gemm_ptx.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int CHUNK = 128, RUN = 64;  // inputs: a warp's in turn, and those that four threads have of an output
constexpr int RUNS = CHUNK / RUN;
constexpr int OUTPUTS = TILES * 16;
#ifdef IS_GATED
constexpr int HALVES = 2;  // of the outputs, with as many of a block's tiles each
#else
constexpr int HALVES = 1;
#endif
constexpr int OWN_TILES = TILES / HALVES, OWN_OUTPUTS = OUTPUTS / HALVES;

// What the kernel is given of a matrix.
struct Matrix {
    const unsigned char* weights;
    const float* scale;
    int num_outputs, num_inputs, block_rows;

    __device__ int num_chunks() const { return (num_inputs + CHUNK - 1) / CHUNK; }

    __device__ int half() const { return num_outputs / HALVES; }

    __device__ int num_steps() const { return (half() + OWN_OUTPUTS - 1) / OWN_OUTPUTS; }

    // Of a block's step; behind the end it is the last.
    __device__ int first_output(int step, int tile) const {
        const int own = min(step * OWN_OUTPUTS + tile % OWN_TILES * 16, half() - 16);
        return own + tile / OWN_TILES * half();
    }
};

// A chunk's weights, of this thread: 16 inputs that lie side by side of each of its outputs' runs.
struct Words {
    uint4 bytes[TILES][2][RUNS];
};

// Those of a warp's next chunks, in shared memory: rows of 128 bytes, copied as they lie in memory. Every second row has
// its halves the other way round, so that a thread's two rows lie in different banks.
struct Ring {
    static constexpr int SLOT = OUTPUTS * CHUNK;

    unsigned char* memory;  // of this warp
    int slot = 0;           // that is read and filled again

    __device__ static int place(int row, int piece) { return row * CHUNK + (piece ^ row % 2 * 4) * 16; }

    __device__ void copy(const Matrix& matrix, int step, int chunk, int lane, int to) const {
        const unsigned at = shared_address(memory) + to * SLOT;
        // Behind the end, where the row is 0, any weights of the same output do.
        const int input = min(chunk * CHUNK + lane % 8 * 16, matrix.num_inputs - 16);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const unsigned char* first =
                matrix.weights + (long long)matrix.first_output(step, tile) * matrix.num_inputs + input;
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int row = part * 4 + lane / 8;
                copy_later(at + place(tile * 16 + row, lane % 8), first + (long long)row * matrix.num_inputs, true);
            }
        }
    }

    __device__ void read(Words& words, int lane) const {
        const unsigned char* at = memory + slot * SLOT;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int high = 0; high < 2; ++high)
#pragma unroll
                for (int run = 0; run < RUNS; ++run)
                    words.bytes[tile][high][run] =
                        *(const uint4*)(at + place(tile * 16 + lane / 4 + 8 * high, run * 4 + lane % 4));
    }

    __device__ void go_on() { slot = slot + 1 == AHEAD ? 0 : slot + 1; }
};

// The chunks of a warp, one after the other, over the ends of a block's steps.
struct Walk {
    int step, own;

    __device__ bool has_more(const Matrix& matrix, int num_own) const {
        return step < matrix.num_steps() && num_own > 0;
    }

    __device__ void go_on(int num_own) {
        if (++own < num_own) return;
        own = 0;
        step += gridDim.x;
    }
};

// Of the blocks of this thread's outputs in a chunk.
struct BlockScales {
    float of[TILES][2];

#ifdef HAS_BLOCKS
    __device__ void read(const Matrix& matrix, int step, int chunk, int lane) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int output = matrix.first_output(step, tile) + lane / 4 + 8 * high;
                of[tile][high] = __ldg(matrix.scale + output / matrix.block_rows * matrix.num_chunks() + chunk);
            }
    }

    __device__ float scale(int tile, int high, float more) const { return of[tile][high] * more; }
#else
    __device__ void read(const Matrix&, int, int, int) {}

    __device__ float scale(int, int, float more) const { return more; }
#endif
};

__device__ unsigned word_of(const uint4& words, int each) {
    return each == 0 ? words.x : each == 1 ? words.y : each == 2 ? words.z : words.w;
}

typedef float Sums[TILES][2];  // of two outputs of a tile

// `row_at` is where this thread's inputs of the chunk are, and `factor` what they are to be multiplied by.
__device__ void add_chunk(Sums& sums, const Words& words, const BlockScales& blocks, const unsigned char* row_at,
                          float factor) {
    float own[TILES][4] = {};
#pragma unroll
    for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int each = 0; each < 4; ++each) {
            const uint4 row = *(const uint4*)(row_at + run * RUN * 2 + each / 2 * 16);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const unsigned low = word_of(words.bytes[tile][0][run], each);
                const unsigned high = word_of(words.bytes[tile][1][run], each);
                const unsigned values[4] = {halves_of<0>(low), halves_of<0>(high), halves_of<1>(low),
                                            halves_of<1>(high)};
                multiply_add_half(own[tile], values, word_of(row, each % 2 * 2), word_of(row, each % 2 * 2 + 1));
            }
        }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int high = 0; high < 2; ++high)
            sums[tile][high] += own[tile][2 * high] * blocks.scale(tile, high, factor);
}

// The row in shared memory; each warp makes its own chunks.
struct Row {
    const unsigned short *x, *residual, *norm;
    unsigned short* total;  // of x and the residual
    unsigned char* halves;
    float *factors, *squares;  // of the chunks, and of the warps' inputs

    // The chunk times a power of two, so that its largest is from 2^14 on, or as near to that as float32 allows.
    __device__ void keep(const float (&values)[4], int chunk, int lane) const {
        unsigned most = 0;
#pragma unroll
        for (int each = 0; each < 4; ++each) most = max(most, __float_as_uint(values[each]) & 0x7FFFFFFF);
        const unsigned power = min(268 - (__reduce_max_sync(~0u, most) >> 23), 253u);
        const float more = __uint_as_float(power << 23);
        *(uint2*)(halves + (chunk * CHUNK + lane * 4) * 2) =
            make_uint2(half_pair(values[0] * more, values[1] * more), half_pair(values[2] * more, values[3] * more));
        if (lane == 0) factors[chunk] = __uint_as_float((254 - power) << 23);
    }

    __device__ static void spread(float (&values)[4], uint2 pairs) {
        values[0] = __uint_as_float(pairs.x << 16), values[1] = __uint_as_float(pairs.x & 0xFFFF0000);
        values[2] = __uint_as_float(pairs.y << 16), values[3] = __uint_as_float(pairs.y & 0xFFFF0000);
    }

    // Four inputs times the norm's weights; the sum of their squares.
    __device__ float read(float (&values)[4], int input) const {
        spread(values, *(const uint2*)(x + input));
        float square = 0;
#ifdef HAS_NORM
        float more[4], weights[4];
        spread(more, *(const uint2*)(residual + input));
        spread(weights, *(const uint2*)(norm + input));
        const uint2 sum = make_uint2(bfloat16_pair(values[0] + more[0], values[1] + more[1]),
                                     bfloat16_pair(values[2] + more[2], values[3] + more[3]));
        if (blockIdx.x == 0) *(uint2*)(total + input) = sum;
        spread(values, sum);
#pragma unroll
        for (int each = 0; each < 4; ++each) {
            square += values[each] * values[each];
            values[each] *= weights[each];
        }
#endif
        return square;
    }

    __device__ void make(const Matrix& matrix, int warp, int lane) const {
        float square = 0;
#pragma unroll 4
        for (int chunk = warp; chunk < matrix.num_chunks(); chunk += WARPS) {
            const int input = chunk * CHUNK + lane * 4;
            float values[4] = {};
            if (input < matrix.num_inputs) square += read(values, input);
            keep(values, chunk, lane);
        }
#ifdef HAS_NORM
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
        if (lane == 0) squares[warp] = square;
#endif
        __syncwarp();
    }

    __device__ float norm_factor(const Matrix& matrix, float eps) const {
#ifdef HAS_NORM
        float square = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) square += squares[warp];
        return rsqrtf(square / matrix.num_inputs + eps);
#else
        return 1;
#endif
    }
};

// A tile's first column is the row's; the others are the same.
__device__ void keep_sums(float* parts, const Sums& sums, int lane) {
    if (lane % 4) return;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int high = 0; high < 2; ++high) parts[tile * 16 + lane / 4 + 8 * high] = sums[tile][high];
}

// Of all warps, in their order.
__device__ float sum_of(const float* parts) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp * OUTPUTS];
    return sum;
}

// What a thread's output of a step is multiplied by, and the one that it gates.
struct OutputScales {
    float own = 1, up = 1;

    __device__ void read(const Matrix& matrix, int step) {
#ifndef HAS_BLOCKS
        const int place = threadIdx.x % OWN_OUTPUTS, tile = place / 16;
        own = __ldg(matrix.scale + matrix.first_output(step, tile) + place % 16);
        up = __ldg(matrix.scale + matrix.first_output(step, TILES - OWN_TILES + tile) + place % 16);
#endif
    }
};

__device__ void write_sums(unsigned short* out, const float* parts, int step, float factor, OutputScales scales,
                           const Matrix& matrix) {
    const int place = threadIdx.x, output = step * OWN_OUTPUTS + place;
    if (place >= OWN_OUTPUTS || output >= matrix.half()) return;
    float sum = sum_of(parts + place) * (factor * scales.own);
#ifdef IS_GATED
    sum = sum / (1 + expf(-sum)) * sum_of(parts + OWN_OUTPUTS + place) * (factor * scales.up);
#endif
    out[output] = (unsigned short)bfloat16_pair(sum, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp8_row_gemm(const unsigned short* x, const unsigned short* residual, const unsigned short* norm,
                 const unsigned char* weights, const float* scale, unsigned short* total, unsigned short* out,
                 long long outputs, long long inputs, long long block_rows, double eps) {
    static_assert(OUTPUTS <= THREADS, "a thread writes an output");
    const Matrix matrix = {weights, scale, (int)outputs, (int)inputs, (int)block_rows};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_chunks = matrix.num_chunks();
    const int num_own = warp < num_chunks ? (num_chunks - warp + WARPS - 1) / WARPS : 0, num_steps = matrix.num_steps();
    Ring ring;
    ring.memory = shared_memory() + warp * AHEAD * Ring::SLOT;
    unsigned char* const halves = shared_memory() + WARPS * AHEAD * Ring::SLOT;
    float* const factors = (float*)(halves + num_chunks * CHUNK * 2);
    float* const memory = factors + num_chunks + WARPS;
    const Row row = {x, residual, norm, total, halves, factors, factors + num_chunks};
    Walk copied = {(int)blockIdx.x, 0};
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
        if (copied.has_more(matrix, num_own)) {
            ring.copy(matrix, copied.step, warp + copied.own * WARPS, lane, ahead);
            copied.go_on(num_own);
        }
        close_copies();
    }
    if (!copied.has_more(matrix, num_own)) let_the_next_kernel_begin();
    BlockScales blocks;
    if (num_own > 0) blocks.read(matrix, blockIdx.x, warp, lane);
    OutputScales scales;
    scales.read(matrix, blockIdx.x);
    wait_for_the_kernel_before();
    row.make(matrix, warp, lane);
    float* parts = memory;
    for (int step = blockIdx.x; step < num_steps; step += gridDim.x) {
        const int next_step = step + gridDim.x;
        Sums sums = {};
        for (int chunk = warp; chunk < num_chunks; chunk += WARPS) {
            const BlockScales own = blocks;
            if (chunk + WARPS < num_chunks)
                blocks.read(matrix, step, chunk + WARPS, lane);
            else if (next_step < num_steps)
                blocks.read(matrix, next_step, warp, lane);
            wait_for_copies<AHEAD - 1>();
            __syncwarp();
            Words words;
            ring.read(words, lane);
            add_chunk(sums, words, own, halves + (chunk * CHUNK + lane % 4 * 16) * 2, factors[chunk]);
            __syncwarp();
            if (copied.has_more(matrix, num_own)) {
                ring.copy(matrix, copied.step, warp + copied.own * WARPS, lane, ring.slot);
                copied.go_on(num_own);
                if (!copied.has_more(matrix, num_own)) let_the_next_kernel_begin();
            }
            close_copies();
            ring.go_on();
        }
        keep_sums(parts + warp * OUTPUTS, sums, lane);
        __syncthreads();
        write_sums(out, parts, step, row.norm_factor(matrix, (float)eps), scales, matrix);
        if (next_step < num_steps) scales.read(matrix, next_step);
        parts = parts == memory ? memory + WARPS * OUTPUTS : memory;
    }
}
