// out[M, N] = (x * x_scales)[M, K] * (W * scales)[N, K]^T on Hopper: E4M3, a float32 scale per
// token and 128 columns of x and per 128x128 block of W. Dense, or rows of x grouped by expert.
//
// One warp copies tiles of 128 columns of x and W by TMA into a ring of stages, another their
// scales; groups of four warps multiply 64 rows each by wgmma, and add each block's product, times
// its two scales, to float32 sums in registers, while the tensor cores multiply the next block.
// Instructions come from CuTe's wrappers; the block-scaled collective of CUTLASS 4.2 reaches
// neither DeepGEMM nor tiles that suit few tokens (bench_fp8_block_gemm.py has it as a peer).
//
// Few tiles: the thread blocks of a cluster divide the columns of K of one tile, and add their sums
// up through each other's shared memory, in the order of their ranks: no workspace, and the same
// result every time. Many tiles: thread blocks stay, and those of a cluster, whose tiles lie beside
// each other, load each a part of x for all.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <utility>

#include "sm90_fp8_store.cuh"
#include "sm90_fp8_tiles.cuh"
#include "tensor_map.h"

namespace vllm::gemm {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// Position in the ring of stages.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// ---------------------------------------------------------------- multiplying

// Low half of wgmma's descriptor of a tile in shared memory, which counts 16 bytes. In a cluster,
// the rank of the thread block stands above the 18 bits of the address.
__device__ __forceinline__ uint32_t wgmma_operand(const uint8_t* tile) {
  return (cute::cast_smem_ptr_to_uint(tile) & 0x3FFFF) >> 4 | 1 << 16;
}

// Rows of 128 bytes, swizzled over 128 bytes: eight rows are 1,024 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t operand) {
  return uint64_t{1024 >> 4 | 1 << 30} << 32 | operand;
}

template <class Mma, int kSize, size_t... kIndex>
__device__ __forceinline__ void wgmma(uint64_t x, uint64_t w, float (&acc)[kSize],
                                      cute::SM90::GMMA::ScaleOut keeps,
                                      std::index_sequence<kIndex...>) {
  Mma::fma(x, w, acc[kIndex]..., keeps);
}

// acc = x[64, 128] * w[kTileN, 128]^T, begun.
template <int kTileN>
__device__ __forceinline__ void begin_multiply(uint32_t x, uint32_t w, float (&acc)[kTileN / 2]) {
  using Shape = cute::Shape<cute::Int<64>, cute::Int<kTileN>, cute::Int<32>>;
  using Mma = decltype(cute::SM90::GMMA::ss_op_selector<cute::float_e4m3_t, cute::float_e4m3_t,
                                                        float, Shape>());
  static_assert(sizeof(typename Mma::CRegisters) == sizeof(acc));
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) cute::warpgroup_fence_operand(acc[i]);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 32 bytes of each row further
    wgmma<Mma>(wgmma_descriptor(x + 2 * i), wgmma_descriptor(w + 2 * i), acc,
               i == 0 ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One,
               std::make_index_sequence<kTileN / 2>{});
  }
  cute::warpgroup_commit_batch();
}

template <int kSize>
__device__ __forceinline__ void end_multiply(float (&acc)[kSize]) {
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(acc[i]);
}

// sums += acc, scaled. A lane holds, of every 8 columns, two of one row and two of the row 8 below.
template <int kTileN>
__device__ __forceinline__ void promote(const float (&acc)[kTileN / 2], const float (&scales)[2],
                                        float (&sums)[kTileN / 2]) {
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) sums[i] = fmaf(acc[i], scales[i / 2 % 2], sums[i]);
}

// ---------------------------------------------------------------- copying

__device__ __forceinline__ void copy_float(float* target, const float* source) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
      "l"(source));
}

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
    cute::SM90_TMA_LOAD_2D::copy(&w_map, reinterpret_cast<uint64_t*>(&full[stage]), kHint,
                                 ring + stage * Layout::kStageBytes + Layout::kBytesX, k * kBlockK,
                                 w_row);
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
// warp.
template <int kTileM>
struct ScaleCopier {
  const float* x[kTileM / 32];
  const float* w;
  int64_t step;

  __device__ __forceinline__ ScaleCopier(const Fp8BlockArgs& args, const Tile& tile, int first_k)
      : step(args.x_scales_ldk) {
    const int lane = threadIdx.x % 32;
    const int num_n = (args.n + kBlockK - 1) / kBlockK, num_k = (args.k + kBlockK - 1) / kBlockK;
    const int block = min(tile.column / kBlockK, num_n - 1);  // a tile beside the last: any
    w = args.scales + (int64_t{tile.expert} * num_n + block) * num_k + first_k;
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      const int row = min(tile.row + lane + i * 32, args.m - 1);
      x[i] = args.x_scales + row * args.x_scales_ld + first_k * step;
    }
  }

  // Those of one block of columns; next time, of the next.
  __device__ __forceinline__ void load(float* target, uint64_t* barrier) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      copy_float(target + lane + i * 32, x[i]);
      x[i] += step;
    }
    if (lane == 0) copy_float(target + kTileM, w);
    ++w;
    cutlass::arch::cpasync_barrier_arrive_noinc(barrier);
  }
};

// ---------------------------------------------------------------- the kernel

// What all warps of a thread block know.
template <int kTileM, int kTileN, int kStages, bool kIsSplit>
struct Block {
  using Layout = Sm90Layout<kTileM, kTileN, kStages, kIsSplit>;
  using Walk = Tiles<kTileM, kTileN, kIsSplit>;
  const Fp8BlockArgs& args;
  uint8_t* ring;
  uint8_t* staging;
  Barrier* full;
  cutlass::arch::ClusterBarrier* empty;
  float* scales;
  int cluster, rank, sharers;
  int first_k, last_k;    // blocks of columns
  int first_index, step;  // of tiles
};

__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

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

constexpr uint32_t kEndOfGroups = 1;  // a named barrier; 0 is __syncthreads

// What a group of four warps multiplies, 64 rows of x: the tensor cores work on one product while
// the group adds the one before, which lies in other registers, to its sums.
template <class B, int kTileN>
struct Multiplier {
  using Layout = typename B::Layout;
  using Product = float[kTileN / 2];
  const B& block;
  const int warp;
  const uint32_t x_operand = wgmma_operand(block.ring + warp / 4 * kGroupRows * kBlockK);
  const uint32_t w_operand = wgmma_operand(block.ring + Layout::kBytesX);
  Ring<Layout::kNumStages> place = {};  // of the next stage
  int stage = 0;                        // that is being multiplied
  Product sums;

  __device__ __forceinline__ void await_stage() { block.full[place.stage].wait(place.phase); }

  __device__ __forceinline__ void begin(Product& product) {
    stage = place.stage;
    const int offset = stage * (Layout::kStageBytes / 16);
    begin_multiply<kTileN>(x_operand + offset, w_operand + offset, product);
    place.advance();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) sums[i] = 0.0f;
  }

  // Adds the product of a stage, and gives the stage back to who fills it.
  __device__ __forceinline__ void add(const Product& product, const float (&scales)[2], int ended) {
    const int lane = threadIdx.x % 32;
    if (lane < block.sharers) block.empty[ended].arrive(Layout::kSplits ? block.rank : lane);
    promote<kTileN>(product, scales, sums);
  }

  // Of the two rows of which a lane holds a part.
  __device__ __forceinline__ void load_scales(float (&scales)[2]) const {
    const float* all = block.scales + stage * Layout::kNumScales;
    const int row = warp * 16 + threadIdx.x % 32 / 4;
    const float w_scale = all[Layout::kRows];
    scales[0] = all[row] * w_scale, scales[1] = all[row + 8] * w_scale;
  }

  // From one stage to the next.
  __device__ __forceinline__ void turn(Product& product, Product& next) {
    float scales[2];
    load_scales(scales);
    await_stage();
    end_multiply(product);
    const int ended = stage;
    begin(next);
    add(product, scales, ended);
  }

  __device__ __forceinline__ void end(Product& product) {
    float scales[2];
    load_scales(scales);
    end_multiply(product);
    add(product, scales, stage);
  }
};

// What ptxas (13.0) wants to leave wgmma asynchronous, which its C75xx messages and
// WARPGROUP.DEPBAR in the machine code tell: an accumulator that is on its way at the end of a loop
// is waited for by wait_group 0 alone, and begun at one place before the loop and at one in it.
template <class B, int kTileN>
__device__ __forceinline__ void multiply_tiles(const B& block, int warp) {
  using Layout = typename B::Layout;
  wait_for_previous_kernel();
  typename B::Walk tiles(block.args, block.cluster, block.rank);
  Tile tile = {};
  Multiplier<B, kTileN> multiplier{block, warp};
  const int num_k = block.last_k - block.first_k;
  for (int index = block.first_index; tiles.at(index, tile); index += block.step) {
    float even[kTileN / 2], odd[kTileN / 2];
    multiplier.clear();
    if (num_k > 0) {
      multiplier.await_stage();
      multiplier.begin(even);
#pragma unroll 1
      for (int i = (num_k - 1) / 2; i > 0; --i) {
        multiplier.turn(even, odd);
        multiplier.turn(odd, even);
      }
      if (num_k % 2 == 0) {
        multiplier.turn(even, odd);
        multiplier.end(odd);
      } else {
        multiplier.end(even);
      }
    }
    if constexpr (Layout::kSplits) break;
    store_warp<kTileN>(block.args, tile, tile.row + warp * 16, multiplier.sums,
                       block.staging + warp * 16 * kStagingPitch<kTileN>);
  }
  if constexpr (Layout::kSplits) {
    // All groups are done with the stages before one writes over them.
    cutlass::arch::NamedBarrier::sync(Layout::kMathThreads, kEndOfGroups);
    store_partial<kTileN, Layout>(block.ring, warp, multiplier.sums);
  }
}

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
      block.empty[i].init(Layout::kMathWarps * block.sharers);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (cluster == 1) {
    __syncthreads();
  } else {
    cute::cluster_sync();
  }
  asm volatile("griddepcontrol.launch_dependents;");

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < Layout::kMathWarps) {
    if constexpr (Layout::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<232>();
    multiply_tiles<B, kTileN>(block, warp);
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
    store_split<kTileN, Layout::kPartialPitch, Layout::kThreads>(
        args, tile, min(kTileM, tile.row_end - tile.row), reinterpret_cast<const float*>(ring),
        cluster, rank);
  }
  // Nobody leaves while another thread block reads its sums or writes to its stages.
  if (cluster > 1) cute::cluster_sync();
#endif
}

}  // namespace vllm::gemm
