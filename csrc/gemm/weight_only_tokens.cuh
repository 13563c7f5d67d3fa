// x of a thread block's tokens on its way through shared memory, for tiles of columns that all of
// its warps multiply: read once for all rows, while products of earlier tiles are computed.
#pragma once
#include "weight_only_tiles.cuh"

namespace vllm::gemm {

// kSharing: tiles of columns of a stage. A row of a tile is 8 chunks of 16 bytes; those of odd rows
// change places, so that eight lanes, which read two rows, meet no bank twice.
template <typename Format, typename T, int kTokens, int kSharing>
struct StagedTokens {
  static constexpr int kStages = 3;
  static constexpr int kStageChunks = kSharing * kTokens * 8;
  static constexpr int kBytes = kStages * kStageChunks * 16;
  static constexpr int kRowsAtOnce = kWeightOnlyThreads / 8;
  static constexpr int kRows = kTokens / kRowsAtOnce;

  uint4* stages;
  const T* x;
  int k;
  int rows[kRows];  // where the rows of x begin that this thread copies; negative for none

  static constexpr __device__ __forceinline__ int place(int token, int chunk) {
    return token * 8 + (chunk ^ (token % 2 * Format::kOddChunks));
  }
  static constexpr __device__ bool meets_no_bank_twice() {
    for (int first = 0; first < 64; first += 8) {  // lanes that read together, of both halves
      int banks = 0;
      for (int lane = first % 32; lane < first % 32 + 8; ++lane) {
        banks |= 1 << place(lane / 4, Format::column(lane % 4, first / 32) / 8) % 8;
      }
      if (banks != 255) return false;
    }
    return true;
  }

  // Copies tiles first_tile and on; what lies outside is zeros.
  __device__ __forceinline__ void start(int first_tile, int slot) const {
    static_assert(meets_no_bank_twice());
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kSharing; ++i) {
      const int column = (first_tile + i) * kTileColumns + chunk * 8;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int token = threadIdx.x / 8 + j * kRowsAtOnce;
        const bool is_inside = rows[j] >= 0 && column < k;  // k % 8 == 0
        copy_async(stages + slot * kStageChunks + i * kTokens * 8 + place(token, chunk),
                   x + (is_inside ? rows[j] + column : 0), is_inside ? 16 : 0);
      }
    }
  }

  // Eight columns of a token, for a lane's products.
  __device__ __forceinline__ uint4 read(int slot, int tile, int token, int chunk) const {
    return stages[slot * kStageChunks + tile * kTokens * 8 + place(token, chunk)];
  }
};

// Adds the products of one tile of columns. Widened once for all tokens.
template <typename Format, typename T, int kTokenTiles, typename Tiles, typename Tokens,
          int kRowTiles>
__device__ __forceinline__ void multiply_staged(const typename Tiles::Loaded& loaded,
                                                const Tokens& tokens, int slot, int tile,
                                                float (&sums)[kRowTiles][kTokenTiles][4]) {
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a[kRowTiles][2][4];
    float factors[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      typename ScaleOf<Format>::type scales[2];
      Tiles::scales_of(loaded, r, half, scales);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Format::template widen<T>(loaded.codes[r], half * 2 + i, scales, a[r][i]);
        if constexpr (!Format::kScalesWeights) factors[r][i] = Format::factor(scales[i]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const uint4 x = tokens.read(slot, tile, t * 8 + group, Format::column(quad, half) / 8);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        float own[4] = {};
        float (&sum)[4] = Format::kScalesWeights ? sums[r][t] : own;
        mma<T>(sum, a[r][0], x.x, x.y);
        mma<T>(sum, a[r][1], x.z, x.w);
        if constexpr (!Format::kScalesWeights) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][t][i] += own[i] * factors[r][i / 2];
        }
      }
    }
  }
}

}  // namespace vllm::gemm
