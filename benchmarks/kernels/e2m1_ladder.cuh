// float32 -> E2M1 by comparing with each midpoint in turn: the obvious conversion, exact, kept to
// measure and to check the one of csrc/quantization/fp4/nvfp4_utils.cuh against. Included before a
// source file (nvcc -include), it makes that file's kernels convert with the ladder.
#pragma once
#include "../../csrc/quantization/fp4/nvfp4_utils.cuh"

namespace vllm::ladder {

__host__ __device__ __forceinline__ uint32_t code_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 31 << 3;
  const float magnitude = fabsf(x);
  uint32_t code = magnitude > 0.25f ? 1 : 0;
  code = magnitude >= 0.75f ? 2 : code;
  code = magnitude > 1.25f ? 3 : code;
  code = magnitude >= 1.75f ? 4 : code;
  code = magnitude > 2.5f ? 5 : code;
  code = magnitude >= 3.5f ? 6 : code;
  code = magnitude > 5.0f ? 7 : code;
  return x == x ? sign | code : 7;
}

__host__ __device__ __forceinline__ uint32_t vec8(const float2 (&x)[4]) {
  uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result |= (code_of(x[i].x) | code_of(x[i].y) << 4) << (8 * i);
  }
  return result;
}

__host__ __device__ __forceinline__ uint64_t vec16(const float2 (&x)[8]) {
  uint64_t result = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    result |= uint64_t{code_of(x[i].x) | code_of(x[i].y) << 4} << (8 * i);
  }
  return result;
}

}  // namespace vllm::ladder

#if defined(VLLM_CONVERT_WITH_LADDER)
#define fp32_vec16_to_e2m1 ladder::vec16
#endif
