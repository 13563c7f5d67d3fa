// out[M, N] = (x * x_scales)[M, K] * (W * scales)[N, K]^T on Hopper: E4M3, a float32 scale per
// token and 128 columns of x and per 128x128 block of W. Dense, or rows of x grouped by expert.
//
// One warp copies tiles of 128 columns of x and W by TMA into a ring of stages, another their
// scales; groups of four warps multiply 64 rows each by wgmma, and add each block's product, times
// its two scales, to float32 sums in registers, while the tensor cores multiply the next block
// (those of tall tiles, for many tokens, twice 64 rows: sm90_fp8_tall.cuh). Instructions come from
// CuTe's wrappers; the block-scaled collective of CUTLASS 4.2 reaches neither DeepGEMM nor tiles
// that suit few tokens (bench_fp8_block_gemm.py has it as a peer).
//
// Few tiles: the thread blocks of a cluster divide the columns of K of one tile, and add their sums
// up through each other's shared memory, in the order of their ranks: no workspace, and the same
// result every time. Many tiles: thread blocks stay, and those of a cluster, whose tiles lie beside
// each other, load each a part of x for all.
#pragma once
#include "sm90_fp8_copy.cuh"
#include "sm90_fp8_multiply.cuh"
#include "sm90_fp8_tall.cuh"
#include "tensor_map.h"

namespace vllm::gemm {

template <int kTileM, int kTileN, int kStages, bool kIsSplit>
__global__ void __launch_bounds__(Sm90Layout<kTileM, kTileN, kStages, kIsSplit>::kThreads,
                                  kTileM == kGroupRows ? 2 : 1)
    sm90_fp8_block_kernel(const Fp8BlockArgs args, const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ CUtensorMap w_map, const int cluster,
                          const int x_rows) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using B = Block<kTileM, kTileN, kStages, kIsSplit>;
  using Layout = typename B::Layout;
  extern __shared__ __align__(1024) uint8_t ring[];  // as the swizzle wants
  Barrier* full = reinterpret_cast<Barrier*>(ring + Layout::kRingBytes + Layout::kStagingBytes);
  const int rank = cluster == 1 ? 0 : cute::block_rank_in_cluster();
  const int num_k = (args.k + kBlockK - 1) / kBlockK;
  const B block = {args,
                   ring,
                   ring + Layout::kRingBytes,
                   full,
                   full + kStages,
                   reinterpret_cast<float*>(full + 2 * kStages),
                   cluster,
                   rank,
                   kIsSplit ? 1 : cluster,
                   kIsSplit ? num_k * rank / cluster : 0,
                   kIsSplit ? num_k * (rank + 1) / cluster : num_k,
                   static_cast<int>(blockIdx.x) / cluster,
                   static_cast<int>(gridDim.x) / cluster};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      block.full[i].init(1 + 32);  // the bytes of TMA, and the scales of each lane
      block.empty[i].init(Layout::kMathWarps * kArrivingLanes * block.sharers);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (cluster == 1) {
    __syncthreads();
  } else {
    cute::cluster_sync();
  }
  launch_next_kernel();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < Layout::kMathWarps) {
    if constexpr (Layout::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<232>();
    if constexpr (Layout::kIsTall) {
      multiply_tall_tiles(block, warp);
    } else {
      multiply_tiles<B, kTileN>(block, warp);
    }
  } else {
    if constexpr (Layout::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == Layout::kMathWarps) copy_tiles(block, x_map, w_map, x_rows);
    if (warp == Layout::kMathWarps + 1) copy_scales(block);
    __syncwarp();
  }
  if constexpr (kIsSplit) {
    Tile tile = {};
    typename B::Walk(args, cluster, rank).at(block.first_index, tile);
    cute::cluster_sync();
    store_split<Layout>(args, tile, reinterpret_cast<const float*>(ring), cluster, rank);
  }
  // Nobody leaves while another thread block reads its sums or writes to its stages.
  if (cluster > 1) cute::cluster_sync();
#endif
}

}  // namespace vllm::gemm
