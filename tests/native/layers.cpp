// Norm and rotation of csrc/layers, kernels and launches, over emulated CUDA.
//
// Reads a file of a header (Header) and data, runs what it asks for in place, and writes the data
// back into it. A program for the reason that weight_only.cpp gives.
#include <cuda_fp8.h>
// Before what stands for a device's compiler.
#include "warp.h"
// After it: what it defines stands for CUDA in them.
#include <cmath>
#include <fstream>
#include <iterator>

inline float __int_as_float(int v) { return __uint_as_float(static_cast<uint32_t>(v)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0L / std::sqrt((long double)a)); }
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaFuncGetAttributes(attributes, kernel) ((attributes)->ptxVersion = 90, cudaSuccess)

#include "../../csrc/layers/norm.cu"
#include "../../csrc/layers/rotary.cu"

using namespace vllm::layers;

// Offsets are those of data in the file; 0 for none. heads: [tokens, heads, head_dim] of one
// tensor, of which queries come first, keys next and values after them. cache: of K, then of V; the
// scales are 0.03 and 0.07 where it is E4M3.
struct Header {
  int64_t is_rotary, type, is_vector, is_neox;
  int64_t num_tokens, num_heads, num_queries, num_keys, head_dim, rotary_dim, max_position;
  int64_t heads, positions, cos_sin, query_norm, key_norm;
  int64_t cache, slots, num_slots, is_e4m3;
};

int main(int, char** words) {
  std::fstream file(words[1], std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const Header h = *reinterpret_cast<const Header*>(bytes.data());
  const auto floats = [&](int64_t offset) {
    return offset == 0 ? nullptr : reinterpret_cast<const float*>(bytes.data() + offset);
  };
  const auto type = static_cast<FloatType>(h.type);
  const int64_t element = type == FloatType::kFloat32 ? 4 : 2;
  const auto part = [&](int64_t first, int64_t count) {
    return Heads{bytes.data() + h.heads + first * h.head_dim * element, count,
                 h.num_heads * h.head_dim, h.head_dim};
  };
  cudaError_t error;
  if (h.is_rotary) {
    RotaryArgs args = {type, h.num_tokens, h.head_dim, h.rotary_dim};
    args.query = part(0, h.num_queries), args.key = part(h.num_queries, h.num_keys);
    args.positions = reinterpret_cast<const int64_t*>(bytes.data() + h.positions);
    args.cos_sin = floats(h.cos_sin), args.max_position = h.max_position;
    args.query_norm = floats(h.query_norm), args.key_norm = floats(h.key_norm);
    if (h.cache != 0) {
      const int64_t bytes_each = h.num_slots * h.num_keys * h.head_dim * (h.is_e4m3 ? 1 : element);
      args.cache.keys = bytes.data() + h.cache,
      args.cache.values = bytes.data() + h.cache + bytes_each;
      args.cache.value = part(h.num_queries + h.num_keys, h.num_keys);
      args.cache.slots = reinterpret_cast<const int64_t*>(bytes.data() + h.slots);
      args.cache.is_e4m3 = h.is_e4m3;
      if (h.is_e4m3) args.cache.k_scale = 0.03f, args.cache.v_scale = 0.07f;
    }
    args.is_neox = h.is_neox, args.is_vector = h.is_vector, args.eps = 1e-6f;
    error = launch_rotary(args, nullptr);
  } else {
    NormArgs args = {type, h.num_tokens, h.head_dim};
    args.x = args.out = part(0, h.num_queries);
    args.weight = floats(h.query_norm), args.eps = 1e-6f, args.is_vector = h.is_vector;
    error = launch_rms_norm(args, nullptr);
  }
  file.clear();
  file.seekp(0);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return error;
}
