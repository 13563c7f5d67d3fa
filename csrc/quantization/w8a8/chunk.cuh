// Sixteen consecutive elements of a row in the registers of one thread: they become one 16-byte
// store of E4M3 codes.
#pragma once
#include "fp8_rounding.cuh"

namespace vllm::w8a8 {

inline constexpr int kChunk = 16;

template <typename T>
struct Chunk {
  static constexpr int kWords = kChunk * sizeof(T) / 4;
  uint32_t words[kWords];

  // Elements 2 i and 2 i + 1.
  __device__ __forceinline__ float2 pair(int i) const;
  __device__ __forceinline__ void set_pair(int i, float2 values);
  // Largest magnitude; NaN if there is one.
  __device__ __forceinline__ float amax() const;
};

template <>
__device__ __forceinline__ float2 Chunk<float>::pair(int i) const {
  return {__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1])};
}
template <>
__device__ __forceinline__ void Chunk<float>::set_pair(int i, float2 values) {
  words[2 * i] = __float_as_uint(values.x);
  words[2 * i + 1] = __float_as_uint(values.y);
}
template <>
__device__ __forceinline__ float Chunk<float>::amax() const {
  float result = 0.0f;
#pragma unroll
  for (uint32_t word : words) result = max_or_nan(result, fabsf(__uint_as_float(word)));
  return result;
}

// Two 16-bit floats in a word, without the shuffling of halves that their constructors compile to.
template <typename Pair>
__device__ __forceinline__ Pair as_pair(uint32_t word) {
  static_assert(sizeof(Pair) == sizeof(word));
  return *reinterpret_cast<const Pair*>(&word);
}
inline constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;

template <>
__device__ __forceinline__ float2 Chunk<__nv_bfloat16>::pair(int i) const {
  return {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xFFFF0000u)};
}
template <>
__device__ __forceinline__ void Chunk<__nv_bfloat16>::set_pair(int i, float2 values) {
  const __nv_bfloat162 rounded = __float22bfloat162_rn(values);
  words[i] = *reinterpret_cast<const uint32_t*>(&rounded);
}
template <>
__device__ __forceinline__ float Chunk<__nv_bfloat16>::amax() const {
  __nv_bfloat162 result = as_pair<__nv_bfloat162>(words[0] & kMagnitudes);
#pragma unroll
  for (int i = 1; i < kWords; ++i) {
    result = __hmax2_nan(result, as_pair<__nv_bfloat162>(words[i] & kMagnitudes));
  }
  return max_or_nan(__bfloat162float(result.x), __bfloat162float(result.y));
}

template <>
__device__ __forceinline__ float2 Chunk<__half>::pair(int i) const {
  return __half22float2(as_pair<__half2>(words[i]));
}
template <>
__device__ __forceinline__ void Chunk<__half>::set_pair(int i, float2 values) {
  const __half2 rounded = __float22half2_rn(values);
  words[i] = *reinterpret_cast<const uint32_t*>(&rounded);
}
template <>
__device__ __forceinline__ float Chunk<__half>::amax() const {
  __half2 result = as_pair<__half2>(words[0] & kMagnitudes);
#pragma unroll
  for (int i = 1; i < kWords; ++i) {
    result = __hmax2_nan(result, as_pair<__half2>(words[i] & kMagnitudes));
  }
  return max_or_nan(__half2float(result.x), __half2float(result.y));
}

// silu(gate) * up, rounded to T.
template <typename T>
__device__ __forceinline__ Chunk<T> silu_and_mul(const Chunk<T>& gate, const Chunk<T>& up) {
  Chunk<T> result;
  if (gate.amax() <= 87.0f) {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 g = gate.pair(i), u = up.pair(i);
      result.set_pair(i, {silu_moderate(g.x) * u.x, silu_moderate(g.y) * u.y});
    }
  } else {  // exp(-x) may overflow, or x is not finite
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 g = gate.pair(i), u = up.pair(i);
      result.set_pair(i, {silu(g.x) * u.x, silu(g.y) * u.y});
    }
  }
  return result;
}

// Number of elements of the chunk at `column` that a row of `num_columns` has.
__device__ __forceinline__ int num_valid(int64_t column, int64_t num_columns) {
  const int64_t rest = num_columns - column;
  return rest <= 0 ? 0 : rest < kChunk ? static_cast<int>(rest) : kChunk;
}

__device__ __forceinline__ uint32_t raw_bits(const float* p) { return __float_as_uint(*p); }
__device__ __forceinline__ uint32_t raw_bits(const __nv_bfloat16* p) {
  return __bfloat16_as_ushort(*p);
}
__device__ __forceinline__ uint32_t raw_bits(const __half* p) { return __half_as_ushort(*p); }

// The first `valid` elements at p, then zeros. kIsVector: p is a multiple of 16 bytes, and valid
// 0 or 16.
template <bool kIsVector, typename T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* p, int valid) {
  Chunk<T> chunk;
  if constexpr (kIsVector) {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kWords / 4; ++i) {
      uint4 loaded = {0, 0, 0, 0};
      if (valid > 0) loaded = reinterpret_cast<const uint4*>(p)[i];
      chunk.words[4 * i] = loaded.x, chunk.words[4 * i + 1] = loaded.y;
      chunk.words[4 * i + 2] = loaded.z, chunk.words[4 * i + 3] = loaded.w;
    }
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < Chunk<T>::kWords; ++i) {
      chunk.words[i] = 0;
#pragma unroll
      for (int j = 0; j < kPerWord; ++j) {
        const int element = i * kPerWord + j;
        if (element < valid) chunk.words[i] |= raw_bits(p + element) << (16 * j);
      }
    }
  }
  return chunk;
}

template <bool kIsVector, typename T>
__device__ __forceinline__ void store_chunk(T* p, const Chunk<T>& chunk, int valid) {
  if constexpr (kIsVector) {
    if (valid == 0) return;
#pragma unroll
    for (int i = 0; i < Chunk<T>::kWords / 4; ++i) {
      reinterpret_cast<uint4*>(p)[i] = {chunk.words[4 * i], chunk.words[4 * i + 1],
                                        chunk.words[4 * i + 2], chunk.words[4 * i + 3]};
    }
  } else {
    // Stored bits first: a float would lose the payload of a NaN on its way through arithmetic.
    constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t bits = chunk.words[i / kPerWord] >> (16 * (i % kPerWord));
      if (i >= valid) continue;
      if constexpr (sizeof(T) == 4) {
        p[i] = __uint_as_float(bits);
      } else {
        reinterpret_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(bits);
      }
    }
  }
}

// Writes the E4M3 codes of chunk / divisor to q.
template <bool kIsVector, typename Divisor, typename T>
__device__ __forceinline__ void quantise_chunk(uint8_t* q, const Chunk<T>& chunk, int valid,
                                               const Divisor& divisor) {
  uint32_t codes[kChunk / 4];
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    const float2 a = chunk.pair(2 * i), b = chunk.pair(2 * i + 1);
    const uint32_t low = round_to_e4m3({divisor.divide(a.x), divisor.divide(a.y)});
    const uint32_t high = round_to_e4m3({divisor.divide(b.x), divisor.divide(b.y)});
    codes[i] = low | high << 16;
  }
  if constexpr (kIsVector) {
    if (valid > 0) *reinterpret_cast<uint4*>(q) = {codes[0], codes[1], codes[2], codes[3]};
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < valid) q[i] = static_cast<uint8_t>(codes[i / 4] >> (8 * (i % 4)));
    }
  }
}

}  // namespace vllm::w8a8
