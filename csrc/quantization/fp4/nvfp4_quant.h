// Quantising activations to NVFP4: what callers on the host see.
//
// A group is 16 consecutive columns of a row. With a float32 global scale G of the tensor (of the
// rows of one expert in the grouped form), in float32:
//
//   scale = E4M3(max|group| * (G / 6)), saturating at 448      6 is E2M1's largest magnitude
//   q     = E2M1(x * (G / scale)), saturating                  0 where scale is 0
//   x     ~ q * scale / G
//
// Divisions are IEEE's and both roundings are to nearest even. G is what compressed-tensors stores
// as `input_global_scale`, 448 * 6 / max|x|; ModelOpt stores its reciprocal as `input_scale` (and
// `weight_scale_2`). A NaN makes its group's scale NaN; infinity saturates.
//
// Every launcher is asynchronous on `stream`, allocates nothing and can be captured in a graph.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm::fp4 {

inline constexpr int kGroup = 16;
// Scale tiles of tensor-core GEMMs: 128 rows by 4 scale columns, 512 bytes; tiles of a row of tiles
// lie one after another. Within a tile, row r and column c are at 16 (r % 32) + 4 (r / 32) + c
// (PTX ISA, scale factors of mma with block scaling; cuBLAS, 1D block scaling layout).
inline constexpr int kTileRows = 128, kTileColumns = 4;

enum class InputType { kBFloat16, kFloat16 };
enum class ScaleLayout {
  kLinear,    // [m, groups]
  kSwizzled,  // tiles; [m and groups rounded up to tiles], zeros beyond m and groups
  kGrouped,   // the same for the rows of each expert, one expert after another
};

struct Nvfp4Quant {
  const void* x;  // contiguous [m, 16 groups], 16-byte aligned; [m, 32 groups] where is_gated
  InputType type;
  int64_t m, num_groups;      // num_groups: of a row
  const float* global_scale;  // [1], or [num_experts]
  uint8_t* q;                 // contiguous [m, 8 groups], 8-byte aligned
  uint8_t* scales;            // E4M3, 4-byte aligned
  ScaleLayout layout;
  bool is_gated;  // x is [gate | up], and silu(gate) * up, rounded to x's type, is quantised

  // kGrouped: expert e has rows expert_offsets[e] to expert_offsets[e + 1] of q; the first offset
  // is 0 and the last m, or rows are left out. scale_rows is what `scales` has room for.
  const int32_t* expert_offsets;  // [num_experts + 1]
  int num_experts;
  int64_t scale_rows;
  // kGrouped, not gated: row r of q is row pairs[r] / top_k of x, which has num_tokens rows; null:
  // row r. Rows that are left out may hold anything there.
  const int32_t* pairs;  // [m]
  int64_t num_tokens;
  int top_k;
};

inline constexpr int kMaxExperts = 1024;
// Groups are counted in 31 bits.
inline constexpr int64_t kMaxGroups = INT32_MAX;

cudaError_t launch_nvfp4_quant(const Nvfp4Quant& quant, int num_sms, cudaStream_t stream);

}  // namespace vllm::fp4
