// A group of 16 values -> an E4M3 scale and 16 E2M1 codes: the arithmetic of nvfp4_utils.py, bit
// for bit, on the host too (tests/native/test_nvfp4_groups.py). Needs CUDA's headers alone.
#pragma once
#include <cuda_fp8.h>

#include "nvfp4_utils.cuh"

namespace vllm::fp4 {

// Rounded once each, whatever the compiler may do with fast arithmetic.
__host__ __device__ __forceinline__ float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__host__ __device__ __forceinline__ float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

struct GlobalScale {
  float value, by_6;
  __host__ __device__ __forceinline__ explicit GlobalScale(float global)
      : value(global), by_6(quotient(global, 6.0f)) {}
};

struct QuantisedGroup {
  uint64_t codes;  // the first in the lowest nibble
  uint8_t scale;   // E4M3
};

// Values: pair(i) is two of sixteen values, amax() the largest magnitude, or NaN if one is there.
// Both are for the device or for the host: a function for both may call either.
#pragma nv_exec_check_disable
template <typename Values>
__host__ __device__ __forceinline__ QuantisedGroup quantise_group(const Values& values,
                                                                  const GlobalScale& global) {
  const __nv_fp8_storage_t code =
      __nv_cvt_float_to_fp8(product(values.amax(), global.by_6), __NV_SATFINITE, __NV_E4M3);
  const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
  const float factor = scale == 0.0f ? 0.0f : quotient(global.value, scale);
  float2 scaled[8];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 8; ++i) {
    const float2 pair = values.pair(i);
    scaled[i] = {product(pair.x, factor), product(pair.y, factor)};
  }
  return {fp32_vec16_to_e2m1(scaled), code};
}

}  // namespace vllm::fp4
