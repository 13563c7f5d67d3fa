// Host side of the skinny FP8 block GEMM (skinny_fp8_block.cuh).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm::gemm {

constexpr int kMaxSkinnyTokens = 16;

struct SkinnyArgs {
  const void* x;          // [m, k], rows ldx elements apart; of out's type, or E4M3 with scales:
  const float* x_scales;  // [m, ceil(k / 128)] with strides x_scales_ld, x_scales_ldk; or null
  const uint8_t* weight;  // [n, k] E4M3, rows ldw bytes apart
  const float* scales;    // [ceil(n / 128), ceil(k / 128)], rows lds apart
  const float* column_scales;  // [n] or null
  const float* bias;           // [n] or null
  void* out;                   // [m, n] bf16 or fp16, rows ldo elements apart
  int m, n, k;
  int64_t ldx, x_scales_ld, x_scales_ldk, ldw, lds, ldo;
};

// How a weight is spread over the chip: tiles of 16 rows and warps per thread block.
struct SkinnyShape {
  int row_tiles, warps;
};

// The shape that measured fastest for sizes like these (H100, bench_fp8_block_gemm.py --sweep).
SkinnyShape skinny_shape(int m, int n, bool is_quantised, int num_sms);

// Returns cudaErrorInvalidValue for a shape that was not compiled.
cudaError_t launch_skinny_fp8_block(const SkinnyArgs& args, bool is_bf16, SkinnyShape shape,
                                    cudaStream_t stream);

}  // namespace vllm::gemm
