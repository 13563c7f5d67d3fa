// Quantising activations to FP8 (E4M3): what callers on the host see.
//
// q = x / scale rounded to nearest even, saturating at +-448; scale = max(max|x|, min_amax) / 448
// over the values that share it, both by IEEE float32 division. NaN stays NaN and makes its scale
// NaN. Every launcher is asynchronous on `stream`, allocates nothing and can be captured in a
// graph.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../../layers/peers.h"

namespace vllm::w8a8 {

enum class InputType { kFloat32, kBFloat16, kFloat16 };

// Columns that one block can hold in registers between its two looks at a row.
inline constexpr int64_t kMaxRowColumns = 32768;
// Smallest amax that divisions by the scale are exact for (fp8_rounding.cuh).
inline constexpr double kMinAmax = 1e-30;

// x [m, k] with rows x_stride elements apart; q [m, k] contiguous.
struct Matrix {
  const void* x;
  InputType type;
  int64_t m, k, x_stride;
  uint8_t* q;
  // Whether aligned 16-byte accesses reach every run of 16 elements from a multiple of 16 on, and
  // rows are made of such runs.
  bool is_vector;
};

// One scale per row and group of group_size columns; the last group of a row may be partial.
struct GroupScales {
  void* data;          // float32, or int32 of four exponent bytes: the lowest is the first group's
  int64_t num_rows;    // >= m; rows from m on are filling and receive zeros
  int64_t row_stride;  // elements from a row to the next
  int64_t group_stride;  // elements from a group (a pack of four) to the next
  int64_t num_groups;    // ceil(k / group_size)
  int group_shift;       // log2 of group_size, 4 to 9; at most 7 where packed
  float min_amax;
  bool is_ue8m0;   // rounded up to a power of two
  bool is_packed;  // implies is_ue8m0
  bool is_vector;  // runs of four rows can be written by aligned 16-byte stores
};

// Per row and group. is_gated: x is [m, 2 k], and silu(x[:, :k]) * x[:, k:], rounded to x's type,
// is quantised. One read of x, one write of q and scales.
cudaError_t launch_group_quant(const Matrix& matrix, const GroupScales& scales, bool is_gated,
                               int num_sms, cudaStream_t stream);

// RMSNorm, then per row and group. y = x * rsqrt(mean(x^2) + rms_eps) * weight [k] rounded to x's
// type; with a residual, x + residual (rounded) replaces residual and x. k <= kMaxRowColumns.
struct RmsNorm {
  const float* weight;
  void* residual;  // like x, or null
  int64_t residual_stride;
  void* normed;  // receives y [m, k], contiguous, of x's type; or null
  float eps;
};
cudaError_t launch_rms_norm_group_quant(const Matrix& matrix, const RmsNorm& norm,
                                        const GroupScales& scales, cudaStream_t stream);

// The same of the sum of x over the ranks, added in float32 in their order and rounded once: bit
// for bit that of launch_peer_sum's result. For matrices with is_vector, and a residual.
inline constexpr int64_t kMaxPeerNormColumns = 8192;
cudaError_t launch_peer_norm_quant(const Matrix& matrix, const RmsNorm& norm,
                                   const GroupScales& scales, const layers::Peers& peers,
                                   cudaStream_t stream);

// One scale [m] per row. max_amax: null, or a float32 that bounds max|x| from above.
cudaError_t launch_token_quant(const Matrix& matrix, float* scales, float min_amax,
                               const float* max_amax, cudaStream_t stream);

// The two below take a k that is no multiple of 16 with is_vector too: a tensor whose rows lie back
// to back is best given as one long row, whose end may be ragged.

// One given scale.
cudaError_t launch_static_quant(const Matrix& matrix, const float* scale, cudaStream_t stream);

// One computed scale: reads x twice, since no value can be rounded before the last was seen.
cudaError_t launch_tensor_quant(const Matrix& matrix, float* scale, float min_amax, int num_sms,
                                cudaStream_t stream);

}  // namespace vllm::w8a8
