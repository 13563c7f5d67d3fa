// Kernels whose difference in length is what a conversion to E2M1 costs; see e2m1_sass.py.
#include <cuda_fp4.h>

#include "e2m1_ladder.cuh"

namespace {

struct Software {
  static __device__ __forceinline__ uint32_t vec8(const float2 (&x)[4]) {
    return vllm::fp32_vec8_to_e2m1(x);
  }
};

struct Ladder {
  static __device__ __forceinline__ uint32_t vec8(const float2 (&x)[4]) {
    return vllm::ladder::vec8(x);
  }
};

struct CudaFp4 {
  static __device__ __forceinline__ uint32_t vec8(const float2 (&x)[4]) {
    uint32_t result = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result |= uint32_t{__nv_cvt_float2_to_fp4x2(x[i], __NV_E2M1, cudaRoundNearest)} << (8 * i);
    }
    return result;
  }
};

// Converts kVectors runs of eight values; all threads the same, to do no address arithmetic.
template <typename Convert, int kVectors>
__device__ __forceinline__ void convert_vectors(const float4* x, uint32_t* codes) {
  float4 loaded[2 * kVectors];
#pragma unroll
  for (int i = 0; i < 2 * kVectors; ++i) loaded[i] = x[i];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float4 a = loaded[2 * i], b = loaded[2 * i + 1];
    codes[i] = Convert::vec8({{a.x, a.y}, {a.z, a.w}, {b.x, b.y}, {b.z, b.w}});
  }
}

}  // namespace

#define KERNELS(name, Convert)                                                         \
  extern "C" __global__ void name##_2(const float4* __restrict__ x, uint32_t* codes) { \
    convert_vectors<Convert, 2>(x, codes);                                             \
  }                                                                                    \
  extern "C" __global__ void name##_4(const float4* __restrict__ x, uint32_t* codes) { \
    convert_vectors<Convert, 4>(x, codes);                                             \
  }

KERNELS(software, Software)
KERNELS(ladder, Ladder)
KERNELS(cuda_fp4, CudaFp4)
