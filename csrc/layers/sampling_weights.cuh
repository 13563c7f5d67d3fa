// What tokens weigh in a draw, by d = max - logit.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "sampling_ptx.cuh"

namespace vllm::layers {

// Branchless, so that several weights are computed at once.
struct Weights {
  float slope, slope_rest;  // their sum is that of the exponent of 2
  float reach;              // weights of larger d round to zero
  uint32_t exponent;        // turns that of a float into that of a double of units

  __device__ __forceinline__ Weights(float temperature, int weight_bits)
      : exponent(static_cast<uint32_t>(weight_bits + 1023 - 127) << 20) {
    constexpr double kLog2E = 1.4426950408889634;
    // Less would not tell apart any logits but those of less than 2^-90, and have no slope.
    temperature = fmaxf(temperature, 0x1p-125f);
    const double exact = -kLog2E / static_cast<double>(temperature);
    slope = static_cast<float>(exact);
    slope_rest = static_cast<float>(exact - static_cast<double>(slope));
    reach = static_cast<float>(weight_bits + 2) * 0.6931472f * temperature;
  }
  // kZero more than the weight, which is zero for d > limit; `limit` is at most `reach`.
  static constexpr uint64_t kZero = uint64_t{0x43300000} << 32;  // the bits of 2^52
  __device__ __forceinline__ uint64_t beyond_zero(float d, float limit) const {
    // Adding rounds to an integer, which is then the low bits of the sum.
    constexpr float kToInteger = 0x1.8p23f;
    const float rounded = __fmaf_rn(d, slope, kToInteger);
    const float rest = __fmaf_rn(d, slope, kToInteger - rounded);
    const uint32_t part = __float_as_uint(power_of_two(__fmaf_rn(d, slope_rest, rest)));
    const uint32_t high = (part >> 3) + ((__float_as_uint(rounded) << 20) + exponent);
    const double units =
        __hiloint2double(d <= limit ? static_cast<int>(high) : 0, static_cast<int>(part << 29));
    return __double_as_longlong(units + 0x1p52);
  }
  __device__ __forceinline__ uint64_t of(float d, float limit) const {
    return beyond_zero(d, limit) - kZero;
  }
};

// The largest d that min_p keeps, the likeliest token in any case.
__device__ __forceinline__ float min_p_limit(float min_p, float temperature) {
  if (!(min_p > 0)) return FLT_MAX;
  const double limit = -log(static_cast<double>(min_p)) * static_cast<double>(temperature);
  return fmaxf(0.0f, fminf(FLT_MAX, __double2float_rd(limit)));
}

}  // namespace vllm::layers
