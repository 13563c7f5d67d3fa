// How sm90_fp8_block.cuh fills its ring of stages: one warp copies tiles of 128 columns of x and W
// by TMA, another their scales.
#pragma once
#include "sm90_fp8_stages.cuh"

namespace vllm::gemm {

// Tiles of x and W, by TMA: one lane of a warp.
template <class Layout>
struct TileCopier {
  const CUtensorMap& x_map;
  const CUtensorMap& w_map;
  uint8_t* ring;
  Barrier* full;
  int n, x_rows;      // rows of x that arrive in each stage
  int sharers, rank;  // each sharer loads its part of them for all
  int x_row = 0, w_row = 0;

  __device__ __forceinline__ void begin(const Tile& tile) {
    x_row = tile.row + rank * (x_rows / sharers);
    w_row = tile.expert * n + tile.column;
  }

  __device__ __forceinline__ void load_w(int stage, int k) const {
    full[stage].arrive_and_expect_tx(Layout::kBytesW + x_rows * kBlockK);
    uint64_t* barrier = reinterpret_cast<uint64_t*>(&full[stage]);
    uint8_t* target = ring + stage * Layout::kStageBytes + Layout::kBytesX;
    if constexpr (Layout::kIsTall) {
      cute::SM90_TMA_LOAD_5D::copy(&w_map, barrier, kHint, target, k * kBlockK, 0, 0, 0,
                                   w_row / 32);
    } else {
      cute::SM90_TMA_LOAD_2D::copy(&w_map, barrier, kHint, target, k * kBlockK, w_row);
    }
  }

  __device__ __forceinline__ void load_x(int stage, int k) const {
    uint64_t* barrier = reinterpret_cast<uint64_t*>(&full[stage]);
    uint8_t* target = ring + stage * Layout::kStageBytes;
    if (sharers == 1) {
      cute::SM90_TMA_LOAD_2D::copy(&x_map, barrier, kHint, target, k * kBlockK, x_row);
    } else {
      const uint16_t receivers = static_cast<uint16_t>((1 << sharers) - 1);
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&x_map, barrier, receivers, kHint,
                                             target + rank * (Layout::kBytesX / sharers),
                                             k * kBlockK, x_row);
    }
  }

  static constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
};

// Their scales, one by one, since they may lie at any distance from each other: all lanes of a
// warp. Of rows that do not exist none are: what then lies in their place meets no other row.
template <int kTileM>
struct ScaleCopier {
  const float* x[kTileM / 32];
  const float* w;
  int64_t step;
  int num_rows;  // from the first of this lane on

  __device__ __forceinline__ ScaleCopier(const Fp8BlockArgs& args, const Tile& tile, int first_k)
      : step(args.x_scales_ldk) {
    const int lane = threadIdx.x % 32, first_row = tile.row + lane;
    num_rows = tile.end - first_row;
    const int num_n = (args.n + kBlockK - 1) / kBlockK, num_k = (args.k + kBlockK - 1) / kBlockK;
    const int block = min(tile.column / kBlockK, num_n - 1);  // a tile beside the last: any
    w = args.scales + (int64_t{tile.expert} * num_n + block) * num_k + first_k;
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      x[i] = args.x_scales + (first_row + i * 32) * args.x_scales_ld + first_k * step;
    }
  }

  // Those of one block of columns; next time, of the next.
  __device__ __forceinline__ void load(float* target, uint64_t* barrier) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      if (i * 32 < num_rows) copy_float(target + lane + i * 32, x[i]);
      x[i] += step;
    }
    if (lane == 0) copy_float(target + kTileM, w);
    ++w;
    cutlass::arch::cpasync_barrier_arrive_noinc(barrier);
  }
};

template <class B>
__device__ __forceinline__ void copy_tiles(const B& block, const CUtensorMap& x_map,
                                           const CUtensorMap& w_map, int x_rows) {
  const int rank = block.sharers == 1 ? 0 : block.rank;
  TileCopier<typename B::Layout> copier = {x_map,        w_map,  block.ring,    block.full,
                                           block.args.n, x_rows, block.sharers, rank};
  const bool is_leader = cute::elect_one_sync();
  if (block.args.offsets != nullptr) wait_for_previous_kernel();
  typename B::Walk tiles(block.args, block.cluster, block.rank);
  Tile tile = {};
  Ring<B::Layout::kNumStages> place;
  int index = block.first_index, k = block.first_k;
  bool has_tile = tiles.at(index, tile);
  copier.begin(tile);
  // W does not depend on the kernel before this one: the ring is filled with it at once.
  const int num_early = has_tile ? min(B::Layout::kNumStages, block.last_k - k) : 0;
  for (int i = 0; i < num_early; ++i) {
    if (is_leader) copier.load_w(i, k + i);
  }
  wait_for_previous_kernel();
  for (int i = 0; i < num_early; ++i, ++k, place.advance()) {
    if (is_leader) copier.load_x(i, k);
  }
  while (has_tile) {
    for (; k < block.last_k; ++k, place.advance()) {
      block.empty[place.stage].wait(place.phase ^ 1);
      if (is_leader) {
        copier.load_w(place.stage, k);
        copier.load_x(place.stage, k);
      }
    }
    k = block.first_k;
    index += block.step;
    has_tile = !B::Layout::kSplits && tiles.at(index, tile);
    copier.begin(tile);
  }
}

template <class B>
__device__ __forceinline__ void copy_scales(const B& block) {
  using Layout = typename B::Layout;
  wait_for_previous_kernel();
  typename B::Walk tiles(block.args, block.cluster, block.rank);
  Tile tile = {};
  Ring<Layout::kNumStages> place;
  for (int index = block.first_index; tiles.at(index, tile); index += block.step) {
    ScaleCopier<Layout::kRows> copier(block.args, tile, block.first_k);
    for (int k = block.first_k; k < block.last_k; ++k, place.advance()) {
      block.empty[place.stage].wait(place.phase ^ 1);
      copier.load(block.scales + place.stage * Layout::kNumScales,
                  reinterpret_cast<uint64_t*>(&block.full[place.stage]));
    }
    if (Layout::kSplits) return;
  }
}

}  // namespace vllm::gemm
