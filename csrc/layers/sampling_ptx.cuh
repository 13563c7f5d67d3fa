// The instructions of the sampler that C++ does not name. tests/native emulates the rest of its
// code on a CPU with other definitions of these.
#pragma once

namespace vllm::layers {

// max(a, b), or NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 2^x for |x| < 1, to 2^-22 of itself.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace vllm::layers
