// kWidth consecutive elements of a row in the registers of one thread, as float32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "layers.h"

namespace vllm::layers {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}

template <typename T>
struct alignas(16) Packed {
  T values[16 / sizeof(T)];
};

// kWidth elements as they are stored, in words.
template <typename T>
struct alignas(16) Stored {
  static constexpr int kWords = kWidth * sizeof(T) / 4;
  uint32_t words[kWords];
};

// Two 16-bit floats become a word in one instruction.
template <typename T>
__device__ __forceinline__ Stored<T> pack(const float (&values)[kWidth]) {
  Stored<T> stored;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) stored.words[i] = __float_as_uint(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const float2 pair = {values[2 * i], values[2 * i + 1]};
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 rounded = __float22half2_rn(pair);
        stored.words[i] = *reinterpret_cast<const uint32_t*>(&rounded);
      } else {
        const __nv_bfloat162 rounded = __float22bfloat162_rn(pair);
        stored.words[i] = *reinterpret_cast<const uint32_t*>(&rounded);
      }
    }
  }
  return stored;
}

template <typename T>
__device__ __forceinline__ void unpack(const Stored<T>& stored, float (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < Stored<T>::kWords; ++i) {
    const uint32_t word = stored.words[i];
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, __half>) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    } else {
      values[2 * i] = __uint_as_float(word << 16);
      values[2 * i + 1] = __uint_as_float(word & 0xFFFF0000u);
    }
  }
}

// Number of the kWidth elements from `column` on that a row of `size` has.
__device__ __forceinline__ int num_valid(int64_t column, int64_t size) {
  const int64_t rest = size - column;
  return rest <= 0 ? 0 : rest < kWidth ? static_cast<int>(rest) : kWidth;
}

// The first `valid` elements at p, then zeros. kIsVector: p is a multiple of 16 bytes, and valid
// is 0 or kWidth.
template <bool kIsVector, typename T>
__device__ __forceinline__ void load(const T* p, int valid, float (&values)[kWidth]) {
  if constexpr (kIsVector) {
    Stored<T> stored = {};
    if (valid > 0) stored = *reinterpret_cast<const Stored<T>*>(p);
    unpack(stored, values);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = i < valid ? to_float(p[i]) : 0.0f;
  }
}

template <bool kIsVector, typename T>
__device__ __forceinline__ void store(T* p, int valid, const float (&values)[kWidth]) {
  if constexpr (kIsVector) {
    if (valid > 0) *reinterpret_cast<Stored<T>*>(p) = pack<T>(values);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i < valid) p[i] = from_float<T>(values[i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void round_to(float (&values)[kWidth]) {
  unpack(pack<T>(values), values);
}

__device__ __forceinline__ float sum_of_squares(const float (&values)[kWidth], float sum) {
#pragma unroll
  for (float value : values) sum = __fmaf_rn(value, value, sum);
  return sum;
}

// Sum over each run of `num_lanes` lanes, a power of two, for all of them and in one order.
__device__ __forceinline__ float sum_over_lanes(float value, int num_lanes) {
  for (int lanes = num_lanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, lanes);
  }
  return value;
}

// For all threads of the block, in an order that depends on their number alone. shared: [32].
__device__ __forceinline__ float sum_over_block(float value, float* shared) {
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  value = sum_over_lanes(value, 32);
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  return sum_over_lanes(lane < num_warps ? shared[lane] : 0.0f, 32);
}

__device__ __forceinline__ float inverse_rms(float sum, int64_t dim, float eps) {
  return __frsqrt_rn(__fdiv_rn(sum, static_cast<float>(dim)) + eps);
}

__device__ __forceinline__ void scale(float (&values)[kWidth], float factor,
                                      const float (&weight)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = values[i] * factor * weight[i];
}

// Lanes of a warp that hold `size` <= 32 * kWidth elements: a power of two.
inline int lanes_for(int64_t size) {
  int lanes = 1;
  while (lanes * kWidth < size) lanes *= 2;
  return lanes;
}

}  // namespace vllm::layers
