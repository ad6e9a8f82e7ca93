// GEMM of a few rows with 4-bit weights, as fast as memory gives the codes.
//
// A block has all inputs of TILES tiles of 16 outputs at a time; its WARPS share the chunks of inputs, and their sums
// are added in a fixed order. A warp holds the codes of AHEAD chunks in registers, read ahead over the end of a tile;
// the first are read before the kernel before this one has ended. Rows stay in shared memory.
#include "int4_codes.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int SUMS = TILES * 4;  // of a thread
constexpr int PART_FLOATS = WARPS * SUMS * 32;

// What a warp reads of a chunk.
struct Words {
    uint4 codes[TILES][2];
    unsigned marks[TILES][SCALES];  // a scale in the first 16 lanes, a zero in the last
};

__device__ unsigned read_mark(const Matrix& matrix, int at, int lane) {
    if (lane < 16) {
#if SCALE_KIND == 2
        return __float_as_uint(__ldg(matrix.scale + at));
#else
        return __ldg(matrix.scale + at);
#endif
    }
#ifdef HAS_ZERO
    return __ldg(matrix.zero + at);
#else
    return 8;
#endif
}

__device__ void read_words(Words& words, const Matrix& matrix, int first_tile, int chunk, int lane) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int own = min(first_tile + tile, matrix.tiles() - 1);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            words.codes[tile][half] = read_once(matrix.words_at(chunk, half, own, lane));
#pragma unroll
        for (int part = 0; part < SCALES; ++part)
            words.marks[tile][part] = read_mark(matrix, matrix.scale_at(chunk, part, own * 16 + lane % 16), lane);
    }
}

// The sums of a group, scaled.
__device__ void add_scaled(float (&sums)[TILES][4], float (&group)[TILES][4], const float (&scale)[TILES][2]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int each = 0; each < 4; ++each) {
            sums[tile][each] += group[tile][each] * scale[tile][each / 2];
            group[tile][each] = 0;
        }
}

// `row_at` is where the chunk's inputs are of the row whose address this lane gives to `ldmatrix`.
__device__ void add_chunk(float (&sums)[TILES][4], const Words& words, unsigned row_at, int lane) {
    float group[TILES][4] = {};
    float scale[TILES][2];
    unsigned less[TILES][2];
    const int output = lane / 4;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        if (quarter % (4 / SCALES) == 0) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const unsigned mark = words.marks[tile][quarter * SCALES / 4];
                    scale[tile][high] = float_of_scale(__shfl_sync(~0u, mark, output + 8 * high));
                    less[tile][high] = less_of(__shfl_sync(~0u, mark, 16 + output + 8 * high));
                }
        }
        unsigned rows[4];
        read_rows(rows, row_at + quarter * 64);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4 codes = words.codes[tile][half];
                const unsigned values[4] = {
                    code_pair(codes.x, quarter, less[tile][0]), code_pair(codes.y, quarter, less[tile][1]),
                    code_pair(codes.z, quarter, less[tile][0]), code_pair(codes.w, quarter, less[tile][1])};
                multiply_add(group[tile], values, rows[2 * half], rows[2 * half + 1]);
            }
        if ((quarter + 1) % (4 / SCALES) == 0) add_scaled(sums, group, scale);
    }
}

__device__ void copy_rows(unsigned to, int stride, const unsigned short* x, int num_rows, const Matrix& matrix) {
    const int pieces = matrix.num_chunks * 16;
    for (int row = 0; row < num_rows; ++row)
        for (int piece = threadIdx.x; piece < pieces; piece += THREADS) {
            const bool is_there = piece * 8 < matrix.num_inputs;
            copy_later(to + row * stride + piece * 16,
                       x + (long long)row * matrix.num_inputs + (is_there ? piece * 8 : 0), is_there);
        }
    close_copies();
}

// Of all warps, in their order.
__device__ void write_sums(unsigned short* out, long long out_stride, const float* parts, int num_rows, int first_tile,
                           const Matrix& matrix) {
    for (int place = threadIdx.x; place < SUMS * 32; place += THREADS) {
        const int lane = place % 32, each = place / 32 % 4, tile = first_tile + place / 128;
        const int row = lane % 4 * 2 + each % 2;
        if (row >= num_rows || tile >= matrix.tiles()) continue;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp * SUMS * 32 + place];
        out[row * out_stride + tile * 16 + lane / 4 + each / 2 * 8] = (unsigned short)bfloat16_pair(sum, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_skinny_gemm(const unsigned short* x, const uint4* codes, const Scale* scale, const unsigned char* zero,
                  unsigned short* out, long long rows, long long outputs, long long inputs, long long chunks,
                  long long out_stride) {
    const Matrix matrix = {codes, scale, zero, (int)outputs, (int)inputs, (int)chunks};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_rows = (int)rows;
    const int first = matrix.num_chunks * warp / WARPS, num_own = matrix.num_chunks * (warp + 1) / WARPS - first;
    const int num_steps = (matrix.tiles() + TILES - 1) / TILES;
    float* parts = (float*)shared_memory();
    const unsigned kept = shared_address(parts + 2 * PART_FLOATS);
    const int stride = matrix.num_chunks * CHUNK * 2 + 16;  // the 16 spread rows over the banks
    Words words[AHEAD];
    let_the_next_kernel_begin();
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead)
        if (ahead < num_own) read_words(words[ahead], matrix, blockIdx.x * TILES, first + ahead, lane);
    wait_for_the_kernel_before();
    copy_rows(kept, stride, x, num_rows, matrix);
    wait_for_copies<0>();
    __syncthreads();
    const unsigned row_at = kept + min(lane % 8, num_rows - 1) * stride + first * CHUNK * 2 + lane / 8 * 16;
    for (int step = blockIdx.x; step < num_steps; step += gridDim.x) {
        float sums[TILES][4] = {};
        const int next = step + gridDim.x;
        for (int begin = 0; begin < num_own; begin += AHEAD) {
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) {
                const int own = begin + ahead;
                if (own >= num_own) continue;
                add_chunk(sums, words[ahead], row_at + own * CHUNK * 2, lane);
                if (own + AHEAD < num_own)
                    read_words(words[ahead], matrix, step * TILES, first + own + AHEAD, lane);
                else if (next < num_steps)
                    read_words(words[ahead], matrix, next * TILES, first + ahead, lane);
            }
        }
#pragma unroll
        for (int each = 0; each < SUMS; ++each) parts[(warp * SUMS + each) * 32 + lane] = sums[each / 4][each % 4];
        __syncthreads();
        write_sums(out, out_stride, parts, num_rows, step * TILES, matrix);
        parts = (float*)shared_memory() + (parts == (float*)shared_memory() ? PART_FLOATS : 0);
    }
}
