// y[M, N] = fp8(x[M, K]) * W[N, K]^T for M <= 16 and W in E4M3 with a float32 scale per 128x128
// block: quantisation of x and GEMM in one kernel that is limited by reading W once.
//
// A warp owns blocks of 128 columns (K) and, for each, 16 * kRowTiles rows of W, which it loads
// straight into the registers that mma.sync wants: an m16n8k16 sums over its 16 columns in any
// order, so lane t of a quad may bring 16 consecutive bytes of W for four products, as long as it
// brings the same columns of x. Nothing of W passes shared memory. The warps of a thread block take
// alternate K blocks and add their sums up at the end, always in one order: the result does not
// depend on timing. x is quantised where it is used, per token and 128 columns, with
// scale = max|x| / 448 (as per_token_group_quant_fp8, bit for bit).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "skinny_fp8_block.h"

namespace vllm::gemm {

constexpr int kBlock = 128;         // columns and rows of W that share a scale
constexpr float kFp8Max = 448.0f;   // largest E4M3
constexpr int kMaxWarps = 32;       // of a multiprocessor, at 64 registers a thread
constexpr int kEarlyBlocks = 2;     // of a warp, that are prefetched. Estimated
constexpr float kMinAmax = 1e-10f;  // a token of zeros must not divide by zero

// Into L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ uint4 load_streaming(const void* address) {
  uint4 v;  // W is read once: it should not evict what is read again
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// The tensor cores of sm_90 take E4M3 through wgmma alone; mma.sync would widen both operands to
// fp16 at every product. Widening is exact, so it is done here, once per operand.
__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four E4M3 values as two pairs of fp16.
__device__ __forceinline__ void widen(uint32_t v, uint32_t& low, uint32_t& high) {
  asm("{ .reg .b16 a, b;\n mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(low), "=r"(high)
      : "r"(v));
}

// Four of the 16 bytes.
__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ float2 to_float2(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float2 to_float2(__half2 v) { return __half22float2(v); }
__device__ __forceinline__ void from_float(float v, __nv_bfloat16* out) {
  *out = __float2bfloat16_rn(v);
}
__device__ __forceinline__ void from_float(float v, __half* out) { *out = __float2half_rn(v); }

template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <>
struct Pair<__half> {
  using type = __half2;
};

// x / scale, rounded as IEEE division rounds, from one reciprocal per scale: the remainder of the
// first guess is exact in an FMA. Holds where no term leaves the normal range; a quotient that
// small is 0 in E4M3 either way.
__device__ __forceinline__ float divide(float x, float scale, float reciprocal) {
  const float guess = x * reciprocal;
  return __fmaf_rn(__fmaf_rn(-guess, scale, x), reciprocal, guess);
}

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// The 32 columns of this lane's token in one K block: two runs of 16, at t * 16 and 64 + t * 16,
// quantised together with those of the other lanes of the quad. Returns the scale.
template <typename T>
__device__ __forceinline__ float quantise_token(const T* x, int column, int k, bool is_token,
                                                uint4 (&q)[2]) {
  float values[2][16];
  float amax = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = column + half * 64;
    const bool is_inside = is_token && first < k;  // k % 16 == 0
    uint4 raw[2] = {};
    if (is_inside) {
      raw[0] = *reinterpret_cast<const uint4*>(x + first);
      raw[1] = *reinterpret_cast<const uint4*>(x + first + 8);
    }
    const auto* pairs = reinterpret_cast<const typename Pair<T>::type*>(raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = to_float2(pairs[i]);
      values[half][2 * i] = pair.x;
      values[half][2 * i + 1] = pair.y;
      amax = fmaxf(amax, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
  }
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
  const float scale = __fdiv_rn(fmaxf(amax, kMinAmax), kFp8Max);
  const float reciprocal = __frcp_rn(scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* v = &values[half][4 * i];
      packed[i] = pack_e4m3(divide(v[0], scale, reciprocal), divide(v[1], scale, reciprocal),
                            divide(v[2], scale, reciprocal), divide(v[3], scale, reciprocal));
    }
    q[half] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  return scale;
}

// The same for x that is quantised already.
__device__ __forceinline__ void load_token(const uint8_t* x, int column, int k, bool is_token,
                                           uint4 (&q)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    q[half] = make_uint4(0, 0, 0, 0);
    if (is_token && column + half * 64 < k) {
      q[half] = *reinterpret_cast<const uint4*>(x + column + half * 64);
    }
  }
}

// kTokenTiles: tiles of 8 tokens. kRowTiles: tiles of 16 rows of W per thread block.
template <typename T, bool kIsQuantised, int kTokenTiles, int kRowTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * 32,
                                  kRowTiles == 1 && kIsQuantised ? kMaxWarps / kWarps : 1)
    skinny_fp8_block_kernel(const SkinnyArgs args) {
  constexpr int kRows = 16 * kRowTiles;
  constexpr int kTokens = 8 * kTokenTiles;
  __shared__ float partial[kWarps][kTokens][kRows + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4;
  const int first_row = blockIdx.x * kRows;
  const int num_blocks = (args.k + kBlock - 1) / kBlock;

  const uint8_t* rows[kRowTiles][2];  // rows past the end repeat the last one; nobody stores them
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + r * 16 + h * 8 + group, args.n - 1);
      rows[r][h] = args.weight + row * args.ldw + quad * 16;
    }
  }
  float sums[kRowTiles][kTokenTiles][4] = {};
#if __CUDA_ARCH__ >= 900
  // W does not depend on the kernel before this one, x does. ptxas puts loads behind the wait, not
  // prefetches: a line for each row, kEarlyBlocks times.
#pragma unroll
  for (int early = 0; early < kEarlyBlocks; ++early) {
    const int block = warp + early * kWarps;
#pragma unroll
    for (int row = lane; row < kRows; row += 32) {
      if (block < num_blocks && first_row + row < args.n) {
        prefetch_line(args.weight + (first_row + row) * args.ldw + block * kBlock);
      }
    }
  }
  cudaGridDependencySynchronize();
#endif
  for (int block = warp; block < num_blocks; block += kWarps) {
    const int column = block * kBlock + quad * 16;
    uint4 w[kRowTiles][2][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          w[r][h][half] = make_uint4(0, 0, 0, 0);
          if (column + half * 64 < args.k) {
            w[r][h][half] = load_streaming(rows[r][h] + block * kBlock + half * 64);
          }
        }
      }
    }
    // One tile of rows lies in one block of rows: 128 is a multiple of 16 * kRowTiles.
    const float weight_scale = args.scales[first_row / kBlock * args.lds + block];
    uint4 x[kTokenTiles][2];
    float scale[kTokenTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int token = tile * 8 + group;
      const bool is_token = token < args.m;
      float x_scale = 0.0f;
      if constexpr (kIsQuantised) {
        load_token(static_cast<const uint8_t*>(args.x) + token * args.ldx, column, args.k, is_token,
                   x[tile]);
        if (is_token) x_scale = args.x_scales[token * args.x_scales_ld + block * args.x_scales_ldk];
      } else {
        x_scale = quantise_token(static_cast<const T*>(args.x) + token * args.ldx, column, args.k,
                                 is_token, x[tile]);
      }
      scale[tile][0] = weight_scale * __shfl_sync(~0u, x_scale, quad * 8);
      scale[tile][1] = weight_scale * __shfl_sync(~0u, x_scale, quad * 8 + 4);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float d[kTokenTiles][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // widened when they are needed: registers are scarce
          uint32_t low[2], high[2];
          widen(word(w[r][0][half], i), low[0], low[1]);
          widen(word(w[r][1][half], i), high[0], high[1]);
#pragma unroll
          for (int tile = 0; tile < kTokenTiles; ++tile) {
            uint32_t columns[2];
            widen(word(x[tile][half], i), columns[0], columns[1]);
            mma_f16(d[tile], low[0], high[0], low[1], high[1], columns[0], columns[1]);
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[r][tile][i] += d[tile][i] * scale[tile][i % 2];
      }
    }
  }
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[warp][tile * 8 + quad * 2 + i % 2][r * 16 + i / 2 * 8 + group] = sums[r][tile][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kRows; i += kWarps * 32) {
    const int token = i / kRows, row = i % kRows, column = first_row + row;
    if (token >= args.m || column >= args.n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][token][row];
    if (args.column_scales != nullptr) sum *= args.column_scales[column];
    if (args.bias != nullptr) sum += args.bias[column];
    from_float(sum, static_cast<T*>(args.out) + token * args.ldo + column);
  }
}

}  // namespace vllm::gemm
