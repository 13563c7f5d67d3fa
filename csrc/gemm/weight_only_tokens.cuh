// x of a thread block's tokens on its way through shared memory, for tiles of columns that all of
// its warps multiply: read once for all rows, while products of earlier tiles are computed.
#pragma once
#include "weight_only_tiles.cuh"

namespace vllm::gemm {

// Eight columns of x, in the registers of a lane.
template <typename X>
struct EightOf {
  using type = uint4;
};
template <>
struct EightOf<E4m3> {
  using type = uint2;
};

// kSharing: tiles of columns of a stage. A row of a tile is 8 chunks of 16 bytes, or 4 of E4M3;
// those of every other 128 bytes change places, so that lanes that read together meet no bank
// twice.
template <typename Format, typename X, int kTokens, int kSharing>
struct StagedTokens {
  using Eight = typename EightOf<X>::type;
  static constexpr int kStages = 3;
  static constexpr int kChunkColumns = 16 / sizeof(X);
  static constexpr int kChunks = kTileColumns / kChunkColumns;
  static constexpr int kTileChunks = kTokens * kChunks;
  static constexpr int kStageChunks = kSharing * kTileChunks;
  static constexpr int kBytes = kStages * kStageChunks * 16;
  static constexpr int kTilesAtOnce = kSharing < 8 / kChunks ? kSharing : 8 / kChunks;
  static constexpr int kRowsAtOnce = kWeightOnlyThreads / (kChunks * kTilesAtOnce);
  static constexpr int kRows = kTokens / kRowsAtOnce;
  static_assert(kTokens % kRowsAtOnce == 0);

  uint4* stages;
  const X* x;
  int k;
  int rows[kRows];  // where the rows of x begin that this thread copies; negative for none

  // Of the rows that this thread copies: the token.
  static __device__ __forceinline__ int token(int i) {
    return threadIdx.x / (kChunks * kTilesAtOnce) + i * kRowsAtOnce;
  }
  static constexpr __device__ __forceinline__ int place(int token, int chunk) {
    return token * kChunks + (chunk ^ (token / (8 / kChunks) % 2 * Format::kOddChunks));
  }
  // The same for eight columns, in units of them.
  static constexpr __device__ __forceinline__ int place_of_eight(int token, int column) {
    const int chunk = place(token, column / kChunkColumns);
    return chunk * (kChunkColumns / 8) + column % kChunkColumns / 8;
  }
  static constexpr __device__ bool meets_no_bank_twice() {
    constexpr int kLanes = 128 / sizeof(Eight);
    for (int first = 0; first < 64; first += kLanes) {  // lanes that read together, of both halves
      int banks = 0;
      for (int lane = first % 32; lane < first % 32 + kLanes; ++lane) {
        const int column = Format::column(lane % 4, first / 32);
        banks |= 1 << place_of_eight(lane / 4, column) % kLanes;
      }
      if (banks != (1 << kLanes) - 1) return false;
    }
    return true;
  }

  // Copies tiles first_tile and on; what lies outside is zeros.
  __device__ __forceinline__ void start(int first_tile, int slot) const {
    static_assert(meets_no_bank_twice());
    const int chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int i = 0; i < kSharing; i += kTilesAtOnce) {
      const int tile = i + threadIdx.x / kChunks % kTilesAtOnce;
      const int column = (first_tile + tile) * kTileColumns + chunk * kChunkColumns;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const bool is_inside = rows[j] >= 0 && column < k;  // k % kChunkColumns == 0
        copy_async(stages + slot * kStageChunks + tile * kTileChunks + place(token(j), chunk),
                   x + (is_inside ? rows[j] + column : 0), is_inside ? 16 : 0);
      }
    }
  }

  // Eight columns of a token, for a lane's products.
  __device__ __forceinline__ Eight read(int slot, int tile, int token, int column) const {
    const uint4* own = stages + slot * kStageChunks + tile * kTileChunks;
    return reinterpret_cast<const Eight*>(own)[place_of_eight(token, column)];
  }
};

// Adds the products of one tile of columns. Widened once for all tokens.
template <typename Format, typename T, int kTokenTiles, typename Tiles, typename Tokens,
          int kRowTiles>
__device__ __forceinline__ void multiply_staged(const typename Tiles::Loaded& loaded,
                                                const Tokens& tokens, int slot, int tile,
                                                float (&sums)[kRowTiles][kTokenTiles][4]) {
  using X = typename Format::template Activation<T>;
  constexpr int kProducts = Format::kProducts;
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a[kRowTiles][kProducts][4];
    float factors[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      typename ScaleOf<Format>::type scales[2];
      Tiles::scales_of(loaded, r, half, scales);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        Format::template widen<T>(loaded.codes[r], half * kProducts + i, scales, a[r][i]);
      }
      if constexpr (!Format::kScalesWeights) {
        factors[r][0] = Format::factor(scales[0]), factors[r][1] = Format::factor(scales[1]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const auto x = tokens.read(slot, tile, t * 8 + group, Format::column(quad, half));
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        float own[4] = {};
        float (&sum)[4] = Format::kScalesWeights ? sums[r][t] : own;
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          mma<X>(sum, a[r][i], word(x, 2 * i), word(x, 2 * i + 1));
        }
        if constexpr (!Format::kScalesWeights) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][t][i] += own[i] * factors[r][i / 2];
        }
      }
    }
  }
}

}  // namespace vllm::gemm
