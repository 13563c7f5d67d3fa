// x of a thread block's tokens on its way through shared memory, while products of earlier tiles
// are computed: of many tokens, tiles of columns that all warps multiply, read once for all rows;
// of few, a warp's own ones.
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

// kThreads: those that copy together. kSharing: tiles of columns of a stage. A row of a tile is 8
// chunks of 16 bytes, or 4 of E4M3; those of every other 128 bytes change places, so that lanes
// that read together meet no bank twice.
template <typename Format, typename X, int kTokens, int kSharing, int kThreads, int kStages>
struct StagedTokens {
  using Eight = typename EightOf<X>::type;
  static constexpr int kChunkColumns = 16 / sizeof(X);
  static constexpr int kChunks = kTileColumns / kChunkColumns;
  static constexpr int kTileChunks = kTokens * kChunks;
  static constexpr int kStageChunks = kSharing * kTileChunks;
  static constexpr int kBytes = kStages * kStageChunks * 16;
  static constexpr int kTilesAtOnce = kSharing < 8 / kChunks ? kSharing : 8 / kChunks;
  static constexpr int kRowsAtOnce = kThreads / (kChunks * kTilesAtOnce);
  static constexpr int kRows = kTokens / kRowsAtOnce;
  static constexpr int kCopies = kRows * (kSharing / kTilesAtOnce);  // of a thread, in a stage
  static_assert(kTokens % kRowsAtOnce == 0 && kSharing % kTilesAtOnce == 0);

  // Of each row that this thread copies: its chunk of the first tile of columns, and the number of
  // columns, 0 without a token.
  const X* rows[kRows];
  int num_columns[kRows];
  int stages;          // in weight_only_memory
  int places[2];       // of this lane's columns of both halves in the first stage
  int targets[kRows];  // of this thread's chunks of rows in the first stage

  // Of the rows that this thread copies: the token.
  static __device__ __forceinline__ int token(int i) {
    return threadIdx.x % kThreads / (kChunks * kTilesAtOnce) + i * kRowsAtOnce;
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

  // rows[] and num_columns[] are the caller's.
  __device__ __forceinline__ explicit StagedTokens(int stages) : stages(stages) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int eight = place_of_eight(group, Format::column(quad, half));
      places[half] = kept(stages + eight * static_cast<int>(sizeof(Eight)));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int chunk = tile(i) * kTileChunks + place(token(i), threadIdx.x % kChunks);
      targets[i] = kept(stages + chunk * 16);
    }
  }

  // Of this thread's copy i: the tile of a stage.
  static __device__ __forceinline__ int tile(int i) {
    return i / kRows * kTilesAtOnce + threadIdx.x % kThreads / kChunks % kTilesAtOnce;
  }
  static __device__ __forceinline__ int chunk_column() {
    return threadIdx.x % kChunks * kChunkColumns;
  }
  __device__ __forceinline__ uint4* target(int i, int slot) const {
    const int chunk = slot * kStageChunks + i / kRows * (kTilesAtOnce * kTileChunks);
    return reinterpret_cast<uint4*>(weight_only_memory + targets[i % kRows] + chunk * 16);
  }
  // Columns of it for tiles first_tile and on, less those of chunk_column().
  static __device__ __forceinline__ int column(int i, int first_tile) {
    return (first_tile + tile(i)) * kTileColumns;
  }

  // Tiles first_tile and on; what lies outside is zeros.
  __device__ __forceinline__ void start(int first_tile, int slot) const {
    static_assert(meets_no_bank_twice());
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = column(i, first_tile);
      copy_async<16>(target(i, slot), rows[i % kRows] + at, at < num_columns[i % kRows] ? 16 : 0);
    }
  }

  // All stages but the last, `stride` tiles apart, through registers: asynchronous copies end in
  // the order in which they began, and these would do so after those of weights that begin before.
  __device__ __forceinline__ void fill(int first_tile, int stride) const {
    uint4 held[kStages - 1][kCopies];
#pragma unroll
    for (int i = 0; i < (kStages - 1) * kCopies; ++i) {
      const int copy = i % kCopies, at = column(copy, first_tile + i / kCopies * stride);
      uint4& eight = held[i / kCopies][copy];
      eight = make_uint4(0, 0, 0, 0);
      if (at < num_columns[copy % kRows]) {
        eight = *reinterpret_cast<const uint4*>(rows[copy % kRows] + at);
      }
    }
#pragma unroll
    for (int i = 0; i < (kStages - 1) * kCopies; ++i) {
      *target(i % kCopies, i / kCopies) = held[i / kCopies][i % kCopies];
    }
  }

  // Eight columns of the token of this lane's group in a tile of 8, for its products.
  __device__ __forceinline__ Eight read(int slot, int tile, int token_tile, int half) const {
    static_assert(8 % (16 / kChunks) == 0);  // all tiles of tokens are laid out as the first one is
    const int offset = (slot * kStageChunks + tile * kTileChunks + token_tile * 8 * kChunks) * 16;
    return *reinterpret_cast<const Eight*>(weight_only_memory + places[half] + offset);
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
      const auto x = tokens.read(slot, tile, t, half);
      float own[kRowTiles][4] = {};
      // Products of other rows lie between those of one sum: each waits for the one before it.
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          float (&sum)[4] = Format::kScalesWeights ? sums[r][t] : own[r];
          mma<X>(sum, a[r][i], word(x, 2 * i), word(x, 2 * i + 1));
        }
      }
      if constexpr (!Format::kScalesWeights) {
#pragma unroll
        for (int i = 0; i < 4 * kRowTiles; ++i) {
          sums[i / 4][t][i % 4] += own[i / 4][i % 4] * factors[i / 4][i % 4 / 2];
        }
      }
    }
  }
}

}  // namespace vllm::gemm
