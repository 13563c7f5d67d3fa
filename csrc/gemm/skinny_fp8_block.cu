#include "skinny_fp8_block.cuh"

namespace vllm::gemm {
namespace {

// Of an SM's memory, percent for shared memory: the rest holds the bytes of W that are on their
// way. Without it the kernel runs with what the one before left it, after sm90_fp8_block_kernel
// next to nothing: 21 us instead of 13 for 4096 x 12288 (H200, docs/performance.md). This is more
// than the sums of two thread blocks take.
constexpr int kSharedPercent = 30;

template <typename T, bool kIsQuantised, int kTokenTiles, int kRowTiles, int kWarps>
cudaError_t launch(const SkinnyArgs& args, cudaStream_t stream) {
  const auto kernel = skinny_fp8_block_kernel<T, kIsQuantised, kTokenTiles, kRowTiles, kWarps>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kSharedPercent);
  if (error != cudaSuccess) return error;
  // Lets the next kernel of the stream begin to read its own weights while this one ends.
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((args.n + 16 * kRowTiles - 1) / (16 * kRowTiles));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

using Launch = cudaError_t (*)(const SkinnyArgs&, cudaStream_t);

struct Row {
  SkinnyShape shape;
  Launch launch[2][2][2];  // by fp16 / bf16, by whether x is quantised, by tiles of 8 tokens
};

template <typename T, int kRowTiles, int kWarps>
constexpr void fill(Launch (&table)[2][2]) {
  table[0][0] = launch<T, false, 1, kRowTiles, kWarps>;
  table[0][1] = launch<T, false, 2, kRowTiles, kWarps>;
  table[1][0] = launch<T, true, 1, kRowTiles, kWarps>;
  table[1][1] = launch<T, true, 2, kRowTiles, kWarps>;
}

template <int kRowTiles, int kWarps>
constexpr Row row() {
  Row row = {{kRowTiles, kWarps}, {}};
  fill<__half, kRowTiles, kWarps>(row.launch[0]);
  fill<__nv_bfloat16, kRowTiles, kWarps>(row.launch[1]);
  return row;
}

constexpr Row kTable[] = {row<1, 4>(), row<1, 8>(),  row<1, 16>(), row<2, 4>(),
                          row<2, 8>(), row<2, 16>(), row<4, 4>(),  row<4, 8>()};

}  // namespace

SkinnyShape skinny_shape(int m, int n, bool is_quantised, int num_sms) {
  // Rows enough for two thread blocks of 16 on every multiprocessor need fewer warps in each.
  const bool is_short = n <= 2 * 16 * num_sms;
  if (!is_quantised) return {2, is_short ? 16 : 8};  // x is quantised once per thread block
  if (is_short) return {1, 16};
  return {m <= 8 ? 1 : 2, 8};
}

cudaError_t launch_skinny_fp8_block(const SkinnyArgs& args, bool is_bf16, SkinnyShape shape,
                                    cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return cudaSuccess;
  for (const Row& row : kTable) {
    if (row.shape.row_tiles == shape.row_tiles && row.shape.warps == shape.warps) {
      return row.launch[is_bf16][args.x_scales != nullptr][args.m > 8](args, stream);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace vllm::gemm
