// GEMV with FP8 weights: a warp computes an output, or a gate and its up, from 16 elements a lane at a time.
//
// The row is divided by its largest element and kept in shared memory in half precision, which holds it as exactly as
// bfloat16 does. e4m3 is exact in half precision; eight products are added there and then in float32.
//
// NUM_INPUTS, HAS_NORM, IS_GATED and BLOCK_ROWS (outputs of a block of scales, 0 if each output has one) are defined by
// the caller. Shapes: I inputs, O outputs, G groups of 128 inputs.

using bf16 = unsigned short;  // its bits
using half2 = unsigned int;   // two of half precision

struct Vector {
  unsigned int words[4];
};

constexpr int kThreads = 256, kWarps = kThreads / 32, kChunk = 16, kGroup = 128;
constexpr int kChunks = NUM_INPUTS / kChunk, kGroups = (NUM_INPUTS + kGroup - 1) / kGroup;
constexpr int kSteps = (kChunks + 31) / 32, kUnroll = IS_GATED ? 4 : 8;

__device__ __forceinline__ float block_reduce(float value, bool is_max, float* shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, value, offset);
    value = is_max ? fmaxf(value, other) : value + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) value = is_max ? fmaxf(value, shared[warp]) : value + shared[warp];
  return value;
}

__device__ __forceinline__ float widen(bf16 bits) { return __uint_as_float(static_cast<unsigned int>(bits) << 16); }

__device__ __forceinline__ bf16 narrow(float value) {
  bf16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ half2 two_halves(unsigned int pair) {
  half2 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
  return halves;
}

__device__ __forceinline__ half2 multiply_add(half2 a, half2 b, half2 c) {
  half2 sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// The sum of 16 products.
__device__ __forceinline__ float dot16(const Vector& weights, const Vector& low, const Vector& high) {
  half2 sum = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const Vector& x = word < 2 ? low : high;
    sum = multiply_add(two_halves(weights.words[word]), x.words[2 * word % 4], sum);
    sum = multiply_add(two_halves(weights.words[word] >> 16), x.words[2 * word % 4 + 1], sum);
  }
  float first, second;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(first), "=f"(second) : "r"(sum));
  return first + second;
}

__device__ __forceinline__ Vector load_weights(const unsigned char* row, int chunk) {
  Vector given;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(given.words[0]), "=r"(given.words[1]), "=r"(given.words[2]), "=r"(given.words[3])
               : "l"(row + static_cast<long long>(chunk) * kChunk));
  return given;
}

__device__ __forceinline__ Vector load_shared(const unsigned char* shared, int vector) {
  Vector given;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(given.words[0]), "=r"(given.words[1]), "=r"(given.words[2]), "=r"(given.words[3])
               : "r"(static_cast<unsigned int>(__cvta_generic_to_shared(shared)) + 16 * vector));
  return given;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fp8_gemv(const bf16* x, const bf16* residual, const bf16* norm,
             const unsigned char* weight, const float* scale, bf16* sum, bf16* out,
             long long num_outputs, double eps) {
  extern __shared__ __align__(16) unsigned char x_shared[];
  __shared__ float reduced[kWarps];
  const int lane = threadIdx.x % 32;
  const int first = blockIdx.x * kWarps + threadIdx.x / 32, stride = gridDim.x * kWarps;
  Vector ahead[kUnroll], up_ahead[kUnroll];
  // Weights of the first output are on their way while the kernel before this one ends.
  if (first < num_outputs) {
    const unsigned char* row = weight + static_cast<long long>(first) * NUM_INPUTS;
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int chunk = step * 32 + lane;
      if (chunk < kChunks) {
        ahead[step] = load_weights(row, chunk);
        if (IS_GATED) up_ahead[step] = load_weights(row + num_outputs * NUM_INPUTS, chunk);
      }
    }
  }
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  float largest = 0, squares = 0;
  for (int column = threadIdx.x; column < NUM_INPUTS; column += kThreads) {
    float value = widen(x[column]);
    if (HAS_NORM) {
      const bf16 total = narrow(value + widen(residual[column]));
      if (blockIdx.x == 0) sum[column] = total;
      value = widen(total);
      squares += value * value;
      value *= widen(norm[column]);
    }
    // A NaN is kept: it makes every output NaN.
    largest = value != value || fabsf(value) > largest ? fabsf(value) : largest;
  }
  const bool is_nan = __syncthreads_or(largest != largest);
  largest = block_reduce(largest, true, reduced);
  if (HAS_NORM) squares = block_reduce(squares, false, reduced);
  const float factor = largest > 0 ? 1 / largest : 0;
  for (int column = threadIdx.x; column < NUM_INPUTS; column += kThreads) {
    float value = widen(x[column]);
    if (HAS_NORM) {
      value = widen(narrow(value + widen(residual[column])));
      value *= widen(norm[column]);
    }
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value * factor));
    reinterpret_cast<unsigned short*>(x_shared)[column] = bits;
  }
  __syncthreads();
  float whole = is_nan ? __int_as_float(0x7fc00000) : largest;
  if (HAS_NORM) whole *= rsqrtf(squares / NUM_INPUTS + static_cast<float>(eps));

  for (int output = first; output < num_outputs; output += stride) {
    const unsigned char* row = weight + static_cast<long long>(output) * NUM_INPUTS;
    const unsigned char* up_row = row + num_outputs * NUM_INPUTS;
    const float* block = BLOCK_ROWS ? scale + static_cast<long long>(output / (BLOCK_ROWS ? BLOCK_ROWS : 1)) * kGroups : scale;
    const float* up_block = BLOCK_ROWS ? block + num_outputs / (BLOCK_ROWS ? BLOCK_ROWS : 1) * kGroups : scale;
    float total = 0, up_total = 0;
#pragma unroll 1
    for (int begin = 0; begin < kSteps; begin += kUnroll) {
      Vector now[kUnroll], up_now[kUnroll];
#pragma unroll
      for (int step = 0; step < kUnroll; ++step) {
        const int chunk = (begin + step) * 32 + lane;
        if (begin == 0 && output == first) {
          now[step] = ahead[step];
          if (IS_GATED) up_now[step] = up_ahead[step];
        } else if (chunk < kChunks) {
          now[step] = load_weights(row, chunk);
          if (IS_GATED) up_now[step] = load_weights(up_row, chunk);
        }
      }
#pragma unroll
      for (int step = 0; step < kUnroll; ++step) {
        const int chunk = (begin + step) * 32 + lane;
        if (chunk >= kChunks) continue;
        const Vector low = load_shared(x_shared, 2 * chunk), high = load_shared(x_shared, 2 * chunk + 1);
        const float part = dot16(now[step], low, high), up_part = IS_GATED ? dot16(up_now[step], low, high) : 0;
        total += BLOCK_ROWS ? part * __ldg(block + chunk * kChunk / kGroup) : part;
        if (IS_GATED) up_total += BLOCK_ROWS ? up_part * __ldg(up_block + chunk * kChunk / kGroup) : up_part;
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, offset);
      if (IS_GATED) up_total += __shfl_xor_sync(0xffffffffu, up_total, offset);
    }
    if (lane == 0) {
      float result = total * whole * (BLOCK_ROWS ? 1 : __ldg(scale + output));
      if (IS_GATED) {
        const float up = up_total * whole * (BLOCK_ROWS ? 1 : __ldg(scale + num_outputs + output));
        result = result / (1 + __expf(-result)) * up;
      }
      out[output] = narrow(result);
    }
  }
}
