// How sm90_fp8_block.cuh cuts its product: sizes of a tile in shared memory, and the order of
// tiles.
#pragma once
#include <cuda_runtime.h>

#include "sm90_fp8_block.h"

namespace vllm::gemm {

constexpr int kBlockK = 128;    // columns that share a scale: bytes of a row in one stage
constexpr int kGroupRows = 64;  // rows of one wgmma, which four warps share
constexpr int kGroupThreads = 128;
constexpr int kBandRows = 2048;  // whose tiles run together, so that W is read from L2

// Columns of a tile that a warp writes at a time, through 16 rows in shared memory. Rows are 16
// bytes longer than that, which spreads them over the banks.
template <int kTileN>
constexpr int kStagingColumns = kTileN < 64 ? kTileN : 64;
template <int kTileN>
constexpr int kStagingPitch = kStagingColumns<kTileN> * 2 + 16;

template <int kTileM, int kTileN, int kStages, bool kIsSplit>
struct Sm90Layout {
  static_assert(kBlockK % kTileN == 0, "a tile must lie in one row of blocks");
  static constexpr int kRows = kTileM, kColumns = kTileN, kNumStages = kStages;
  static constexpr bool kSplits = kIsSplit;
  // Of a tall tile, a group multiplies two halves of 64 rows, one after the other.
  static constexpr bool kIsTall = kTileM == 256;
  static constexpr int kNumGroups = kTileM / kGroupRows / (kIsTall ? 2 : 1);
  static constexpr int kMathThreads = kNumGroups * kGroupThreads;
  static constexpr int kMathWarps = kMathThreads / 32;
  // Where a thread needs more than 168 registers, four warps that need few give theirs up.
  static constexpr bool kMovesRegisters = kNumGroups > 1 && (kTileN > 64);
  static constexpr int kThreads = kMathThreads + (kMovesRegisters ? kGroupThreads : 64);
  static constexpr int kBytesX = kTileM * kBlockK, kBytesW = kTileN * kBlockK;
  static constexpr int kNumScales = kTileM + 1;  // of a stage: x's, then W's
  static constexpr int kStageBytes = kBytesX + kBytesW;
  static constexpr int kStagingBytes =
      kIsSplit || kIsTall ? 0 : kMathWarps * 16 * kStagingPitch<kTileN>;
  // Partial sums of a split tile take the place of the stages, once all are multiplied.
  static constexpr int kPartialPitch = kTileN + 8;  // floats
  static constexpr int kRingBytes = kStages * kStageBytes;
  static_assert(!kIsSplit || kTileM * kPartialPitch * 4 <= kRingBytes);
  static constexpr int kBytes = kRingBytes + kStagingBytes + kStages * (kNumScales * 4 + 2 * 8);
};

// One tile of out, from row `row` and column `column` on. Of the rows that it reaches it writes
// those in [first, end): others are another tile's, another expert's, or do not exist.
struct Tile {
  int row, first, end, column, expert;

  __device__ bool writes(int one) const { return one >= first && one < end; }
};

// Walks through the tiles; every warp has one. Thread blocks of a cluster that is not split get
// tiles beside each other.
template <int kTileM, int kTileN, bool kIsSplit>
class Tiles {
 public:
  __device__ Tiles(const Fp8BlockArgs& args, int cluster, int rank)
      : args_(args),
        width_((kIsSplit ? 1 : cluster) * kTileN),
        offset_((kIsSplit ? 0 : rank) * kTileN),
        num_n_((args.n + width_ - 1) / width_) {}

  __device__ bool at(int index, Tile& tile) {
    return args_.offsets == nullptr ? dense_at(index, tile) : grouped_at(index, tile);
  }

 private:
  // Where there are rows enough, the last tile of [begin, end) begins earlier instead of reaching
  // beyond, where TMA would fill in zeros for nothing.
  __device__ Tile tile_of(int begin, int end, int m_index, int n_index, int expert) const {
    const int first = begin + m_index * kTileM, row = max(begin, min(first, end - kTileM));
    return {row, first, end, n_index * width_ + offset_, expert};
  }

  __device__ bool dense_at(int index, Tile& tile) const {
    const int num_m = (args_.m + kTileM - 1) / kTileM;
    if (index >= num_m * num_n_) return false;
    const int band = kBandRows / kTileM, first = index / (band * num_n_) * band;
    const int height = min(band, num_m - first), rest = index % (band * num_n_);
    tile = tile_of(0, args_.m, first + rest % height, rest / height, 0);
    return true;
  }

  // Indices ascend: experts before the chunk of 32 that held the last tile are not looked at again.
  __device__ bool grouped_at(int index, Tile& tile) {
    const int lane = threadIdx.x % 32;
    for (; chunk_ < args_.num_experts; chunk_ += 32) {
      const int expert = min(chunk_ + lane, args_.num_experts);
      const int begin = args_.offsets[expert];
      const int end = args_.offsets[min(expert + 1, args_.num_experts)];
      const int own = (end - begin + kTileM - 1) / kTileM * num_n_;
      int sum = own;  // of the lanes up to this one
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      const unsigned beyond = __ballot_sync(~0u, index < tiles_before_ + sum);
      if (beyond != 0) {
        const int source = __ffs(beyond) - 1;
        const int before = tiles_before_ + __shfl_sync(~0u, sum - own, source);
        const int first = __shfl_sync(~0u, begin, source), last = __shfl_sync(~0u, end, source);
        const int num_m = (last - first + kTileM - 1) / kTileM, rest = index - before;
        tile = tile_of(first, last, rest % num_m, rest / num_m, chunk_ + source);
        return true;
      }
      tiles_before_ += __shfl_sync(~0u, sum, 31);
    }
    return false;
  }

  const Fp8BlockArgs& args_;
  int width_, offset_, num_n_;
  int chunk_ = 0, tiles_before_ = 0;
};

}  // namespace vllm::gemm
