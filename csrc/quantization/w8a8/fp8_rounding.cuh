// Scales and E4M3 rounding in few instructions, bit for bit what IEEE division gives.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "fp8_ptx.cuh"

namespace vllm::w8a8 {

// amax / 448, correctly rounded, for amax >= 1e-30, infinity and NaN. 1/448 is the sum of two
// floats, so the product errs by 2^-47 of itself; a quotient of a 24-bit number by 7 is never
// nearer than 2^-28 to the middle between two floats.
__device__ __forceinline__ float scale_of(float amax) {
  constexpr float kHigh = 0x1.249248p-9f, kLow = 0x1.24924ap-33f;
  return __fmaf_rn(amax, kHigh, __fmul_rn(amax, kLow));
}

// The smallest power of two >= scale, a normal positive float; infinity and NaN stay.
__device__ __forceinline__ float ceil_to_power_of_two(float scale) {
  const uint32_t bits = (__float_as_uint(scale) + 0x7FFFFFu) & 0x7F800000u;
  return scale == scale ? __uint_as_float(bits) : scale;
}

// x / scale for a scale that many values share. After rounding to E4M3 the quotient equals that
// of IEEE division for every bfloat16 and float16 x and every scale in [2^-112, infinity]; a NaN
// scale gives NaN.
//
// Why two operations suffice. 1 / scale = high + low (1 + d), 0 < d: the quotient before its last
// rounding is t (1 + e), 0 < e < 2^-38, for t = x / scale. Rounding to float32 and then to E4M3 can
// only differ from division's where t is that near a float32 midpoint beside a midpoint M of E4M3,
// t ~ M +- half a unit. In integers: X 2^13 2^n (11-bit X) within 2^11 of S (m 2^20 +- 1), S the
// scale's 24 bits, m the 5 bits of M. Modulo 2^20 that makes S = j 2^20 + d with |d| < 2^11, and
// modulo 2^37 then d m = -+j, so d = -1, j = m = 16: S = 2^24 - 1, with t just above the midpoint,
// where e > 0 rounds rightly. low is positive, so -0 and infinity keep their signs.
class SharedDivisor {
 public:
  static constexpr float kMinScale = 0x1p-112f;

  __device__ __forceinline__ explicit SharedDivisor(float scale) {
    // Beyond 2^90 the low part would be subnormal: shift both operands.
    const bool is_large = scale > 0x1p90f;
    shift_ = is_large ? 0x1p-64f : 1.0f;
    const float divisor = scale * shift_;
    const uint32_t reciprocal = __float_as_uint(approximate_reciprocal(divisor));
    // One unit of error in the reciprocal: 8 below is below it, 32 above makes d > 0.
    high_ = __uint_as_float(reciprocal - 8);
    low_ = __fmaf_rn(-divisor, high_, 1.0f) * __uint_as_float(reciprocal + 32);
    if (reciprocal == 0) high_ = low_ = 0.0f;  // of infinity
  }

  __device__ __forceinline__ float divide(float x) const {
    const float shifted = x * shift_;
    return __fmaf_rn(shifted, high_, __fmul_rn(shifted, low_));
  }

 private:
  float shift_, high_, low_;
};

// float32 has too many bits for the proof above, and bytes enough to hide full divisions.
class ExactDivisor {
 public:
  __device__ __forceinline__ explicit ExactDivisor(float scale) : scale_(scale) {}
  __device__ __forceinline__ float divide(float x) const { return __fdiv_rn(x, scale_); }

 private:
  float scale_;
};

template <typename T>
struct DivisorOf {
  using type = SharedDivisor;
};
template <>
struct DivisorOf<float> {
  using type = ExactDivisor;
};

// Two E4M3 codes, the first in the low byte: to nearest even, saturating at +-448, NaN -> 0x7F.
__device__ __forceinline__ uint32_t round_to_e4m3(float2 pair) {
  return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
}

// silu(x) = x / (1 + exp(-x)) as torch's CUDA kernel computes it: exp in float32 and an IEEE
// division. The quotient is refined as nvcc does for __fdiv_rn, without its check of exponents,
// which |x| <= 87 makes needless.
__device__ __forceinline__ float silu_moderate(float x) {
  const float divisor = 1.0f + expf(-x);
  float reciprocal = approximate_reciprocal(divisor);
  reciprocal = __fmaf_rn(__fmaf_rn(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  float quotient = __fmul_rn(x, reciprocal);
  // The remainder with its sign turned: x - x would be +0 and make +0 of -0.
  quotient = __fmaf_rn(-__fmaf_rn(divisor, quotient, -x), reciprocal, quotient);
  return __fmaf_rn(-__fmaf_rn(divisor, quotient, -x), reciprocal, quotient);
}

__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, 1.0f + expf(-x)); }

}  // namespace vllm::w8a8
