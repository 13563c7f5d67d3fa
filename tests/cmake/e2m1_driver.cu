// Each way to convert to E2M1, alone with CUDA's own headers, for tests/cmake/test_compile.py.
// Every index is constant, so that the machine code holds the conversions and nothing else that
// counts.
#include "../../csrc/quantization/fp4/nvfp4_utils.cuh"

namespace vllm {}
using namespace vllm;

extern "C" __global__ void vec8(const float* x,
                                decltype(fp32_vec8_to_e2m1(*(float (*)[8])0))* out) {
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = x[i];
  *out = fp32_vec8_to_e2m1(v);
}

extern "C" __global__ void vec8_pairs(const float2* x,
                                      decltype(fp32_vec8_to_e2m1(*(float2 (*)[4])0))* out) {
  float2 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = x[i];
  *out = fp32_vec8_to_e2m1(v);
}

extern "C" __global__ void vec16_pairs(const float2* x,
                                       decltype(fp32_vec16_to_e2m1(*(float2 (*)[8])0))* out) {
  float2 v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = x[i];
  *out = fp32_vec16_to_e2m1(v);
}

#ifdef SOFTWARE_E2M1_CONVERT
extern "C" __global__ void marker() { asm volatile("// SOFTWARE_E2M1_CONVERT"); }
#endif
