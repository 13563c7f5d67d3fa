// Host side of the weight-only GEMM (weight_only.cuh).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm::gemm {

// kW4a8: int4 by activations in E4M3.
enum class WeightCode { kFp8, kNvfp4, kInt4, kW4a8 };

// Rows and columns of W in a tile: what one warp multiplies at a time.
constexpr int kTileRows = 16;
constexpr int kTileColumns = 64;
constexpr int kWeightOnlyWarps = 8;
constexpr int kWeightOnlyThreads = 32 * kWeightOnlyWarps;

// A weight as `weight_only_layout.py` packs it; with experts, those of all of them on end.
struct WeightOnlyWeight {
  const void* codes;         // [tiles of rows][tiles of columns][loads][32 lanes] of 16 bytes
  const void* scales;        // NVFP4: [tiles of rows][tiles of columns][32 lanes] of 2 bytes;
                             // others: float32 [tiles of rows][groups][scale_rows], or null for 1
  const float* row_factors;  // [n], or null for 1
  int n, k;
  int column_tiles, groups;
  int scale_rows;    // 16, or 1 where all rows of a tile have the same scales
  int column_shift;  // log2 of the columns of a group; 31 for a single one
};

struct WeightOnlyArgs {
  WeightOnlyWeight weight;
  const void* x;          // [m, k] bf16 or fp16, of kW4a8 E4M3; rows ldx elements apart
  const float* x_scales;  // [m] of E4M3, else null
  const float* bias;      // [n], of every expert, or null
  void* out;              // [m, n] bf16 or fp16, x's type unless that is E4M3; rows ldo apart
  int m, ldx;
  int64_t ldo;
  // Experts, or null: int32 [3, num_blocks], for each block of at most block_rows rows its expert
  // (negative for none), first row and the end of the expert's rows. order: pair of each row, whose
  // row of x is pair / top_k; null where row i of the output is of row i of x.
  const int* blocks;
  const int* order;
  int num_blocks, block_rows;
  uint32_t top_k_inverse;  // inverse_of(top_k)
  // Blocks were complete before the kernel before this one let this one start: weights are on their
  // way while that one ends.
  bool has_blocks_before;

  // Of a pair, exactly: dividing takes 20 instructions.
  constexpr int divided_by_top_k(int pair) const {
    if (top_k_inverse == 0) return pair;
    return static_cast<int>(uint64_t{top_k_inverse} * static_cast<uint32_t>(pair) >> 32);
  }
};

// 2^32 / top_k rounded up, 0 for top_k 1: the product with a number below 2^32 / top_k is too large
// by less than 2^32 / top_k. top_k is at most 1024, and pairs are fewer than 2^22.
constexpr uint32_t inverse_of(int64_t top_k) {
  return static_cast<uint32_t>(((int64_t{1} << 32) + top_k - 1) / top_k);
}

// Tiles of 8 tokens that a thread block multiplies together, for so many of them. Without clusters
// nothing but tokens and rows fills the chip, so blocks of many are for many.
constexpr int token_tiles(int num_tokens, bool has_clusters) {
  if (num_tokens <= 8) return 1;
  if (num_tokens <= 16) return 2;
  if (num_tokens <= 32) return 4;
  return num_tokens <= (has_clusters ? 64 : 256) ? 8 : 16;
}

// Warps of a thread block that have rows of their own; the others share rows, not columns.
constexpr int row_warps(int token_tiles) {
  return token_tiles >= 16 ? 8 : token_tiles >= 4 ? 4 : 1;
}

// Thread blocks of a multiprocessor, as registers and, of 9.0, shared memory allow.
constexpr int blocks_at_once(int token_tiles) {
  return token_tiles <= 2 ? 3 : token_tiles <= 8 ? 2 : 1;
}

// Stages of a thread block that are in flight or multiplied, for so many bytes of each: as many as
// fit into the shared memory of the chips that have least.
constexpr int weight_only_stages(int bytes) {
  const int stages = (99 << 10) / bytes;
  return stages > 4 ? 4 : stages < 2 ? 2 : stages;
}

// How a weight is spread over the chip: tiles of rows per warp, thread blocks (of a cluster, from
// 9.0 on) that share the columns, and blocks of rows that a thread block of few tokens multiplies
// one after another.
struct WeightOnlyShape {
  int row_tiles, splits, rounds;
};

// As many thread blocks as are resident together, with columns enough for each; for num_blocks
// blocks of m tokens of experts, 0 without experts. Estimated, not measured (bench_weight_only.py
// --sweep).
WeightOnlyShape weight_only_shape(WeightCode code, int m, int num_blocks,
                                  const WeightOnlyWeight& weight, int num_sms, bool has_clusters);

// Returns cudaErrorInvalidValue for a shape that was not compiled; `code` is not kW4a8.
cudaError_t launch_weight_only(const WeightOnlyArgs& args, WeightCode code, bool is_bf16,
                               WeightOnlyShape shape, bool has_clusters, cudaStream_t stream);

// The same for kW4a8; null in a build for no architecture with FP8 products (8.9 and later).
[[gnu::weak]] cudaError_t launch_w4a8(const WeightOnlyArgs& args, bool is_bf16,
                                      WeightOnlyShape shape, bool has_clusters,
                                      cudaStream_t stream);

// out [num_rows, k] = rows first_row and on of the weight, scales multiplied in; first_row is a
// multiple of 16; `code` is not kW4a8.
cudaError_t launch_weight_only_widen(const WeightOnlyWeight& weight, WeightCode code, bool is_bf16,
                                     int first_row, int num_rows, void* out, cudaStream_t stream);

}  // namespace vllm::gemm
