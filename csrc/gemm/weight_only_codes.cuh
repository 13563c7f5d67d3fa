// Stored codes of weights as operands of mma.sync: pairs of bf16 or fp16 in a 32-bit register, or
// four E4M3.
//
// A 16-byte load of a lane holds exactly what its next products want, so that widening is shifts,
// masks and one multiplication. A product wants four registers of its tile of W, 16x16 or 16x32,
// from lane (group, quad): neighbouring columns each, of rows group, group + 8, group, group + 8.
#pragma once
#include "weight_only_ptx.cuh"

namespace vllm::gemm {

// Two numbers in a register. kMantissa: bits of one; kOne: 1.0 twice.
template <typename T>
struct Pairs;

template <>
struct Pairs<__nv_bfloat16> {
  static constexpr int kMantissa = 7;
  static constexpr uint32_t kOne = 0x3f803f80u;
  static __device__ __forceinline__ float2 to_float2(uint32_t v) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(v));
  }
  static __device__ __forceinline__ uint32_t from_float2(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(v);
  }
  static __device__ __forceinline__ __nv_bfloat16 from_float(float v) {
    return __float2bfloat16_rn(v);
  }
};

template <>
struct Pairs<__half> {
  static constexpr int kMantissa = 10;
  static constexpr uint32_t kOne = 0x3c003c00u;
  static __device__ __forceinline__ float2 to_float2(uint32_t v) {
    return __half22float2(reinterpret_cast<const __half2&>(v));
  }
  static __device__ __forceinline__ uint32_t from_float2(float a, float b) {
    const __half2 v = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(v);
  }
  static __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
};

constexpr uint32_t kSigns = 0x80008000u;  // of a pair; as numbers, -0.0 twice
constexpr uint32_t twice(uint32_t v) { return v << 16 | v; }
constexpr uint32_t rotated(uint32_t v, int right) { return v >> right | v << (32 - right); }

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Of eight columns of activations, 16 or 8 bytes.
__device__ __forceinline__ uint32_t word(const uint2& v, int i) { return i == 0 ? v.x : v.y; }

// What the formats have in common. Activation: the type of x, for outputs of type T. kProducts: of
// the 32 columns of half a tile. kFactor: what results lack.
struct WeightOnly {
  template <typename T>
  using Activation = T;
  template <typename T>
  static constexpr float kFactor = 1.0f;
  static constexpr int kProducts = 2;
  static constexpr bool kScalesTokens = false;
};

// `scales`: of rows group and group + 8, in the form of the format. `product`: of those of a tile.
// Results: the registers of that product.

// Sixteen columns of a lane lie together: the group of 16 that shares a scale.
struct Nvfp4 : WeightOnly {
  static constexpr int kLoads = 1;
  static constexpr bool kScalesWeights = true;
  static constexpr int kOddChunks = 1;  // weight_only_tokens.cuh

  // The column of a tile where eight columns of a lane begin.
  static constexpr __device__ __forceinline__ int column(int quad, int half) {
    return quad * 16 + half * 8;
  }

  // A byte of scale is e5m3 (e = 0 for 2^-22): every E4M3 number but 0 without subnormals. Codes of
  // scale 0 are stored as 0.
  template <typename T>
  static __device__ __forceinline__ uint32_t scale(uint32_t byte) {
    constexpr bool kIsBf16 = Pairs<T>::kMantissa == 7;
    return kIsBf16 ? byte * twice(1u << 4) + twice(223u << 7) : byte * twice(1u << 7);
  }

  // The exponents of E2M1 begin at 2^-126 in bf16 and at 2^-14 in fp16, those of scales at 2^118
  // and at 2^7 times what they are: products are exact, and this is what they lack.
  template <typename T>
  static constexpr float kFactor = Pairs<T>::kMantissa == 7 ? 256.0f : 128.0f;

  // Of the codes in each half of a word, three have their signs and magnitudes as far apart as bf16
  // has them, 0 and 4 bits higher and 6 lower; the last one fills what is left
  // (weight_only_layout.py).
  template <typename T>
  static __device__ __forceinline__ void widen(const uint4 (&codes)[1], int product,
                                               const uint32_t (&scales)[2], uint32_t (&out)[4]) {
    const uint32_t v = word(codes[0], product);
    if constexpr (Pairs<T>::kMantissa == 7) {
      constexpr uint32_t kAll = twice(0x81c0u);
      out[0] = v & kAll;
      out[1] = rotated(v, 4) & kAll;
      out[2] = v << 6 & kAll;
      out[3] = (v >> 6 & twice(1u << 8)) | (v << 2 & twice(0x80c0u));
    } else {
      constexpr uint32_t kMagnitudes = twice(7u << 9);
      out[0] = (v << 3 & kMagnitudes) | (v & kSigns);
      out[1] = (v >> 1 & kMagnitudes) | (rotated(v, 4) & kSigns);
      out[2] = (v << 9 & kMagnitudes) | (v << 6 & kSigns);
      out[3] = (v >> 3 & twice(1u << 11)) | (v << 5 & twice(3u << 9)) | (v << 2 & kSigns);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = fma_pairs<T>(out[i], scales[i % 2], kSigns);
  }
};

struct Fp8 : WeightOnly {
  static constexpr int kLoads = 2;
  static constexpr bool kScalesWeights = false;
  static constexpr int kOddChunks = 4;

  static constexpr __device__ __forceinline__ int column(int quad, int half) {
    return half * 32 + quad * 8;
  }

  static __device__ __forceinline__ float factor(float scale) { return scale; }

  // E4M3 in the upper byte of both halves; its exponents begin at 2^-120 and at 2^-8 times theirs.
  template <typename T>
  static __device__ __forceinline__ uint32_t widen_upper(uint32_t v) {
    constexpr bool kIsBf16 = Pairs<T>::kMantissa == 7;
    constexpr int kShift = kIsBf16 ? 4 : 1;
    constexpr uint32_t kFactor = kIsBf16 ? twice(247u << 7) : twice(23u << 10);
    const uint32_t raw = (v & kSigns) | (v >> kShift & twice(0x7f00u >> kShift));
    return fma_pairs<T>(raw, kFactor, kSigns);
  }

  template <typename T>
  static __device__ __forceinline__ void widen(const uint4 (&codes)[2], int product,
                                               const float (&)[2], uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t v = word(codes[product / 2], product % 2 * 2 + i);
      out[2 * i] = widen_upper<T>(v);
      out[2 * i + 1] = widen_upper<T>(v << 8);
    }
  }
};

// The last four bits of a float32 scale are the zero point; the scale is what comes before them.
struct Int4 : WeightOnly {
  static constexpr int kLoads = 1;
  static constexpr bool kScalesWeights = false;
  static constexpr int kOddChunks = 4;

  static constexpr __device__ __forceinline__ int column(int quad, int half) {
    return half * 32 + quad * 8;
  }

  static __device__ __forceinline__ float factor(float scale) {
    return __uint_as_float(__float_as_uint(scale) & ~15u);
  }

  // Codes in the last bits of 2^kMantissa are added to it; so are zero points, to its negative.
  template <typename T>
  static __device__ __forceinline__ void widen(const uint4 (&codes)[1], int product,
                                               const float (&scales)[2], uint32_t (&out)[4]) {
    constexpr uint32_t kPlus = Pairs<T>::kMantissa == 7 ? 0x43004300u : 0x64006400u;
    const uint32_t v = word(codes[0], product);
    uint32_t minus[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      minus[i] = (__float_as_uint(scales[i]) & 15u) * twice(1u) + (kPlus | kSigns);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = masked_or(v >> 4 * i, twice(15u), kPlus);
      out[i] = fma_pairs<T>(code, Pairs<T>::kOne, minus[i % 2]);
    }
  }
};

// Int4 by activations in E4M3, scaled per token. E4M3 is linear from 0 to 16 * 2^-9, subnormal
// numbers and first normal ones: a byte that is |w - z| stands for 2^-9 times that, exactly.
struct Int4ByFp8 : Int4 {
  template <typename T>
  using Activation = E4m3;
  template <typename T>
  static constexpr float kFactor = 512.0f;
  static constexpr int kProducts = 1;
  static constexpr bool kScalesTokens = true;
  static constexpr int kOddChunks = 2;

  // A byte of codes has one of row group + 8 above one of row group; words are of four columns.
  template <typename T>
  static __device__ __forceinline__ void widen(const uint4 (&codes)[1], int product,
                                               const float (&scales)[2], uint32_t (&out)[4]) {
    constexpr uint32_t kBytes = 0x01010101u;
    uint32_t zeros[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) zeros[i] = (__float_as_uint(scales[i]) & 15u) * kBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = word(codes[0], product * 2 + i / 2) >> 4 * (i % 2) & 15u * kBytes;
      const uint32_t is_below = ~(code + (128u * kBytes - zeros[i % 2]));  // by bit 7 of each byte
      out[i] = masked_or(is_below, 128u * kBytes, distances(code, zeros[i % 2]));
    }
  }
};

}  // namespace vllm::gemm
