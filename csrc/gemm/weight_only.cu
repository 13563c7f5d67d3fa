#include <algorithm>

#include "weight_only.h"

namespace vllm::gemm {

struct Fp8;
struct Nvfp4;
struct Int4;

// Defined in weight_only_<format>.cu.
template <typename Format>
cudaError_t launch_format(const WeightOnlyArgs& args, bool is_bf16, WeightOnlyShape shape,
                          bool has_clusters, cudaStream_t stream);
template <typename Format>
cudaError_t widen_format(const WeightOnlyWeight& weight, bool is_bf16, int first_row, int num_rows,
                         void* out, cudaStream_t stream);

namespace {

constexpr int kMostRounds = 4;

// Beginning and ending cost a thread block as much as some tiles of columns, so those of experts
// multiply several blocks of rows: as few as let all be resident together, or else so many that
// thread blocks are still handed out evenly.
int rounds_of(int64_t blocks_of_rows, int num_blocks, int resident) {
  const auto thread_blocks = [&](int rounds) {
    return (blocks_of_rows + rounds - 1) / rounds * num_blocks;
  };
  if (thread_blocks(kMostRounds) <= resident) {
    int rounds = 1;
    while (thread_blocks(rounds) > resident) ++rounds;
    return rounds;
  }
  int rounds = kMostRounds;
  while (rounds > 1 && thread_blocks(rounds) < 4 * resident) --rounds;
  return rounds;
}

}  // namespace

WeightOnlyShape weight_only_shape(WeightCode code, int m, int num_blocks,
                                  const WeightOnlyWeight& weight, int num_sms, bool has_clusters) {
  const int row_tiles = 2, tiles = token_tiles(m, has_clusters);
  const int rows = kTileRows * row_tiles * row_warps(tiles);
  const int64_t blocks_of_rows = (weight.n + rows - 1) / rows;
  const int resident = num_sms * blocks_at_once(tiles);
  if (num_blocks > 0) return {row_tiles, 1, rounds_of(blocks_of_rows, num_blocks, resident)};
  const int64_t blocks = blocks_of_rows * ((m + 8 * tiles - 1) / (8 * tiles));
  // As many thread blocks as are resident together, with four tiles of columns for every warp.
  const int least = 4 * kWeightOnlyWarps / row_warps(tiles);
  int splits = 1;
  while (has_clusters && splits < 8 && blocks * splits * 2 <= resident &&
         weight.column_tiles >= least * splits * 2) {
    splits *= 2;
  }
  return {row_tiles, splits, 1};
}

cudaError_t launch_weight_only(const WeightOnlyArgs& args, WeightCode code, bool is_bf16,
                               WeightOnlyShape shape, bool has_clusters, cudaStream_t stream) {
  const int num_blocks = args.blocks != nullptr ? args.num_blocks : args.m;
  if (num_blocks == 0 || args.weight.n == 0) return cudaSuccess;
  const auto launch = code == WeightCode::kFp8     ? launch_format<Fp8>
                      : code == WeightCode::kNvfp4 ? launch_format<Nvfp4>
                                                   : launch_format<Int4>;
  return launch(args, is_bf16, shape, has_clusters, stream);
}

cudaError_t launch_weight_only_widen(const WeightOnlyWeight& weight, WeightCode code, bool is_bf16,
                                     int first_row, int num_rows, void* out, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  const auto widen = code == WeightCode::kFp8     ? widen_format<Fp8>
                     : code == WeightCode::kNvfp4 ? widen_format<Nvfp4>
                                                  : widen_format<Int4>;
  return widen(weight, is_bf16, first_row, num_rows, out, stream);
}

}  // namespace vllm::gemm
