// Host side of the GEMMs of Blackwell, which CUTLASS's collectives compute. Compiled and inspected;
// not run on hardware. Each function is absent from a build without code for its architecture.
#pragma once
#include "sm90_fp8_block.h"

namespace vllm::gemm {

// As launch_sm90_fp8_block, without groups. x_scales: x_scales_ld == 1, and x_scales_ldk a multiple
// of 4 that holds m rounded up to 4. Rows of out start at multiples of 16 bytes, and n % 8 == 0.
[[gnu::weak]] cudaError_t launch_sm100_fp8_block(const Fp8BlockArgs& args, int num_sms,
                                                 cudaStream_t stream);
[[gnu::weak]] cudaError_t launch_sm120_fp8_block(const Fp8BlockArgs& args, int num_sms,
                                                 cudaStream_t stream);

// As launch_sm90_fp8_block, with groups and nothing empty. x_scales: x_scales_ldk == 1. weight: ldw
// == k. Rows of out start at multiples of 16 bytes, n % 8 == 0, bf16 alone (each type doubles the
// time to compile). workspace: on the GPU, at a multiple of 128, as many bytes as the function
// before it says.
[[gnu::weak]] size_t sm100_fp8_grouped_workspace(const Fp8BlockArgs& args, int num_sms);
[[gnu::weak]] cudaError_t launch_sm100_fp8_grouped(const Fp8BlockArgs& args, void* workspace,
                                                   int num_sms, cudaStream_t stream);
[[gnu::weak]] size_t sm120_fp8_grouped_workspace(const Fp8BlockArgs& args, int num_sms);
[[gnu::weak]] cudaError_t launch_sm120_fp8_grouped(const Fp8BlockArgs& args, void* workspace,
                                                   int num_sms, cudaStream_t stream);

// out[m, n] = alpha * (a * a_scales) [m, k] * (b * b_scales) [n, k]^T + bias. a, b: pairs of E2M1,
// rows of k / 2 bytes, k % 32 == 0. Scales: E4M3 per 16 columns, in tiles of 128 rows x 4 scales
// (nvfp4_utils.cuh); rows filled up to 128, scales to 4.
struct Nvfp4Args {
  const uint8_t *a, *b;
  const uint8_t *a_scales, *b_scales;
  const float* alpha;  // one, on the GPU: the product of both global scales
  const float* bias;   // [n] or null
  void* out;           // [m, n] bf16 or fp16, rows ldo elements apart; n % 8 == 0, ldo % 8 == 0
  int m, n, k;
  int64_t ldo;
  bool is_bf16;

  // The grouped form alone: rows [offsets[e], offsets[e + 1]) of a meet num_parts weights of expert
  // e, whose products lie side by side in a row of out. b: [num_experts * num_parts, n, k / 2], the
  // scales of each padded to whole tiles; alpha: [num_experts * num_parts]; a_scales: of the rows
  // of each expert, one expert after another, each padded to whole tiles (nvfp4_quant.h: kGrouped).
  const int32_t* offsets;  // [num_experts + 1] on the GPU
  int num_experts, num_parts;
};
[[gnu::weak]] cudaError_t launch_sm100_nvfp4(const Nvfp4Args& args, int num_sms,
                                             cudaStream_t stream);
[[gnu::weak]] cudaError_t launch_sm120_nvfp4(const Nvfp4Args& args, int num_sms,
                                             cudaStream_t stream);

// With groups and nothing empty; at most 1,024 experts; bf16 alone and no bias. workspace: as those
// above.
[[gnu::weak]] size_t sm100_nvfp4_grouped_workspace(const Nvfp4Args& args, int num_sms);
[[gnu::weak]] cudaError_t launch_sm100_nvfp4_grouped(const Nvfp4Args& args, void* workspace,
                                                     int num_sms, cudaStream_t stream);
[[gnu::weak]] size_t sm120_nvfp4_grouped_workspace(const Nvfp4Args& args, int num_sms);
[[gnu::weak]] cudaError_t launch_sm120_nvfp4_grouped(const Nvfp4Args& args, void* workspace,
                                                     int num_sms, cudaStream_t stream);

}  // namespace vllm::gemm
