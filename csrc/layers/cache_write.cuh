// Writes K and V of new tokens to a paged cache, in the kernel that rotates K.
#pragma once
#include <cuda_fp8.h>

#include "layers.h"
#include "vector.cuh"

namespace vllm::layers {

// values / scale as E4M3: to nearest even, saturating at +-448.
__device__ __forceinline__ uint2 to_e4m3(const float (&values)[kWidth], float scale) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t pairs[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 pair = {__fdiv_rn(values[4 * i + 2 * j], scale),
                           __fdiv_rn(values[4 * i + 2 * j + 1], scale)};
      pairs[j] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
    words[i] = pairs[0] | pairs[1] << 16;
  }
  return make_uint2(words[0], words[1]);
}

// Where a token goes; to be loaded early, for nothing else waits for it.
__device__ __forceinline__ int64_t slot_of(const RotaryArgs& args, unsigned token) {
  return args.cache.keys != nullptr ? args.cache.slots[token] : -1;
}

// The first `valid` columns from `column` on of one head of K, or of V, into a slot.
template <typename T, bool kIsVector>
__device__ __forceinline__ void write_cache(const RotaryArgs& args, int64_t slot, unsigned head,
                                            bool is_value, int column, int valid,
                                            float (&values)[kWidth]) {
  const CacheWrite& cache = args.cache;
  if (slot < 0) return;
  const int64_t at = (slot * args.key.num_heads + head) * args.head_dim + column;
  void* data = is_value ? cache.values : cache.keys;
  if (!cache.is_e4m3) {
    store<kIsVector>(static_cast<T*>(data) + at, valid, values);
    return;
  }
  round_to<T>(values);
  uint8_t* codes = static_cast<uint8_t*>(data) + at;
  const uint2 packed = to_e4m3(values, is_value ? cache.v_scale : cache.k_scale);
  if constexpr (kIsVector) {
    if (valid > 0) *reinterpret_cast<uint2*>(codes) = packed;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t word = i < 4 ? packed.x : packed.y;
      if (i < valid) codes[i] = static_cast<uint8_t>(word >> (8 * (i % 4)));
    }
  }
}

}  // namespace vllm::layers
