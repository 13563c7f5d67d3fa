// The small kernels between a model's matrix products: what callers on the host see.
//
// All compute in float32 and round once to the stored type. Every launcher is asynchronous on
// `stream`, allocates nothing, takes empty inputs and can be captured in a graph. A row's result
// depends on that row alone: neither on the number of rows nor on alignment or strides.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm::layers {

enum class FloatType { kFloat32, kBFloat16, kFloat16 };

// Elements that one thread holds at a time; 16-byte accesses need multiples of it.
inline constexpr int kWidth = 8;
inline constexpr int64_t kMaxNormDim = 16384;
inline constexpr int64_t kMaxHeadDim = 32 * kWidth;  // a head lies in the lanes of one warp

// [tokens, heads, dim] with a contiguous last dimension, strides in elements; a matrix has one
// head.
struct Heads {
  void* data = nullptr;
  int64_t num_heads = 1, token_stride = 0, head_stride = 0;
};

// out = x * rsqrt(mean(x^2) + eps) * weight [dim]. With a residual, residual + x, rounded, replaces
// residual and x first. Any two of x, out and residual may be the same memory, never partly.
struct NormArgs {
  FloatType type;
  int64_t num_tokens = 0, dim = 0;  // dim <= kMaxNormDim
  Heads x, out, residual;           // residual.data null for none
  const float* weight = nullptr;
  float eps = 0;
  bool is_vector = false;  // every multiple of kWidth elements of every row is 16-byte aligned
};
cudaError_t launch_rms_norm(const NormArgs& args, cudaStream_t stream);

// Where K and V of new tokens are written: [slots, key.num_heads, head_dim], contiguous, of the
// type of key, or E4M3 of what is left after division by a scale.
struct CacheWrite {
  void *keys = nullptr, *values = nullptr;  // null for none
  Heads value;                              // [tokens, key.num_heads, head_dim]
  const int64_t* slots = nullptr;           // [tokens], negative for one that is not written
  bool is_e4m3 = false;
  float k_scale = 1, v_scale = 1;
};

// Rotates the first rotary_dim columns of every head of query and key in place, after the RMSNorm
// of whole heads where query_norm is given; then bit for bit what launch_rms_norm and a rotation
// of its rounded result give. Positions outside [0, max_position) rotate by NaN. With a cache, K
// goes there instead, rounded to its type on the way, and V as it is.
struct RotaryArgs {
  FloatType type;
  int64_t num_tokens = 0, head_dim = 0, rotary_dim = 0;  // rotary_dim (the norm: head_dim) <= 256
  Heads query, key;                                      // key.num_heads 0 for none
  const int64_t* positions = nullptr;                    // [tokens]
  const float* cos_sin = nullptr;                        // [max_position, rotary_dim]
  int64_t max_position = 0;
  bool is_neox = true;  // pairs (i, i + rotary_dim / 2), else (2 i, 2 i + 1)
  const float *query_norm = nullptr, *key_norm = nullptr;  // [head_dim]
  float eps = 0;
  CacheWrite cache;        // its heads have up to 256 columns
  bool is_vector = false;  // as in NormArgs, and rotary_dim is a multiple of 2 * kWidth
};
cudaError_t launch_rotary(const RotaryArgs& args, cudaStream_t stream);

// out [m, n] = silu(x[:, :n]) * x[:, n:], rows strides elements apart.
struct SiluArgs {
  FloatType type;
  const void* x = nullptr;
  void* out = nullptr;
  int64_t m = 0, n = 0, x_stride = 0, out_stride = 0;
  bool is_vector = false;
};
cudaError_t launch_silu_and_mul(const SiluArgs& args, cudaStream_t stream);

// out [num_ids, row_bytes] = weight[ids]; bytes are all ones, NaN in any floating type, where an id
// is outside [0, num_rows). Strides in bytes; rows are even numbers of bytes.
struct EmbeddingArgs {
  const int64_t* ids = nullptr;
  const void* weight = nullptr;
  void* out = nullptr;
  int64_t num_ids = 0, num_rows = 0, row_bytes = 0, weight_stride = 0, out_stride = 0;
  bool is_vector = false;  // rows are aligned multiples of 16 bytes
};
cudaError_t launch_embedding(const EmbeddingArgs& args, cudaStream_t stream);

// One token for each row of logits (sampling.cu says how). temperature, top_p, min_p, uniforms and
// top_k are read on the device.
struct SampleArgs {
  FloatType type;  // kFloat32 or kBFloat16
  const void* logits = nullptr;
  int64_t num_rows = 0, vocab = 0, row_stride = 0;  // 1 <= vocab < 2^30
  const float *temperature = nullptr, *top_p = nullptr, *min_p = nullptr;
  const int64_t* top_k = nullptr;
  const double* uniforms = nullptr;
  int64_t* tokens = nullptr;
  bool is_vector = false;  // rows start at multiples of 16 bytes
};
cudaError_t launch_sample(const SampleArgs& args, cudaStream_t stream);

}  // namespace vllm::layers
