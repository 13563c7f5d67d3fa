// Host side of the block-scaled FP8 GEMM of Hopper (sm90_fp8_block.cuh). Its functions are absent
// from a build without code for sm_90a.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm::gemm {

// out[m, n] = (x * x_scales) [m, k] * (weight * scales) [n, k]^T * column_scales + bias. Grouped:
// the rows [offsets[e], offsets[e + 1]) of x meet weight[e]; other rows of out are not written.
struct Fp8BlockArgs {
  const uint8_t* x;            // [m, k] E4M3, rows ldx bytes apart; a multiple of 16
  const float* x_scales;       // [m, ceil(k / 128)], strides x_scales_ld and x_scales_ldk
  const uint8_t* weight;       // [num_experts, n, k] E4M3, rows ldw bytes apart; a multiple of 16
  const float* scales;         // [num_experts, ceil(n / 128), ceil(k / 128)] contiguous
  const float* column_scales;  // [n] or null
  const float* bias;           // [n] or null
  const int32_t* offsets;      // [num_experts + 1] on the GPU, ascending; null for one dense matrix
  void* out;                   // [m, n] bf16 or fp16, rows ldo elements apart
  int m, n, k, num_experts;
  int64_t x_scales_ld, x_scales_ldk, ldx, ldw, ldo;
  bool is_bf16;
  bool is_vector;  // rows of out start at multiples of 16 bytes and n % 8 == 0
};

// How the product is cut. A thread block computes tile_m x tile_n outputs; `cluster` thread blocks
// work together: they divide the columns of K of one tile (is_split), or they compute tiles beside
// each other and load each row of x once.
struct Sm90Tiling {
  int tile_m, tile_n, cluster;
  bool is_split;
};

// The first `num_rows` rows of x by one tiling; where there are more, those after them by another.
struct Sm90Plan {
  int num_rows;
  Sm90Tiling first, rest;
};

// What measured fastest for sizes like these (H100, bench_fp8_block_gemm.py --sweep).
[[gnu::weak]] Sm90Plan sm90_plan(const Fp8BlockArgs& args, int num_sms);

// Returns cudaErrorInvalidValue for a tiling that was not compiled, and for 256 rows where rows of
// out are not is_vector, n % 32 != 0 or k == 0.
[[gnu::weak]] cudaError_t launch_sm90_fp8_block(const Fp8BlockArgs& args, const Sm90Plan& plan,
                                                int num_sms, cudaStream_t stream);

}  // namespace vllm::gemm
