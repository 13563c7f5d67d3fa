// out[M, N] = (x * x_scales)[M, K] * (W * scales)[N, K]^T on Hopper: E4M3, a float32 scale per
// token and 128 columns of x and per 128x128 block of W. Dense, or rows of x grouped by expert.
//
// One warp copies tiles of 128 columns of x and W by TMA into a ring of stages, another their
// scales; groups of four warps multiply 64 rows each by wgmma, and add each block's product, times
// its two scales, to float32 sums in registers: while one group adds, the other multiplies.
// Instructions come from CuTe's wrappers; the block-scaled collective of CUTLASS 4.2 reaches
// neither DeepGEMM nor tiles that suit few tokens (bench_fp8_block_gemm.py has it as a peer).
//
// Few tiles: the thread blocks of a cluster divide the columns of K of one tile, and add their sums
// up through each other's shared memory, in the order of their ranks: no workspace, and the same
// result every time. Many tiles: thread blocks stay, and the two of a cluster, whose tiles lie
// beside each other, load each half of x for both.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <utility>

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

// Rows of 128 bytes, swizzled over 128 bytes: eight rows are 1,024 bytes.
__device__ __forceinline__ uint64_t wgmma_operand(const uint8_t* tile) {
  const uint64_t address = (cute::cast_smem_ptr_to_uint(tile) & 0x3FFFF) >> 4;
  return address | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

template <class Mma, int kSize, size_t... kIndex>
__device__ __forceinline__ void wgmma(uint64_t x, uint64_t w, float (&acc)[kSize],
                                      cute::SM90::GMMA::ScaleOut keeps,
                                      std::index_sequence<kIndex...>) {
  Mma::fma(x, w, acc[kIndex]..., keeps);
}

// acc = x[64, 128] * w[kTileN, 128]^T, begun.
template <int kTileN>
__device__ __forceinline__ void begin_multiply(const uint8_t* x, const uint8_t* w,
                                               float (&acc)[kTileN / 2]) {
  using Shape = cute::Shape<cute::Int<64>, cute::Int<kTileN>, cute::Int<32>>;
  using Mma = decltype(cute::SM90::GMMA::ss_op_selector<cute::float_e4m3_t, cute::float_e4m3_t,
                                                        float, Shape>());
  static_assert(sizeof(typename Mma::CRegisters) == sizeof(acc));
  const uint64_t x_operand = wgmma_operand(x), w_operand = wgmma_operand(w);
#pragma unroll
  for (float& value : acc) cute::warpgroup_fence_operand(value);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 32 bytes of each row further
    wgmma<Mma>(x_operand + 2 * i, w_operand + 2 * i, acc,
               i == 0 ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One,
               std::make_index_sequence<kTileN / 2>{});
  }
  cute::warpgroup_commit_batch();
}

template <int kSize>
__device__ __forceinline__ void end_multiply(float (&acc)[kSize]) {
  cute::warpgroup_wait<0>();
#pragma unroll
  for (float& value : acc) cute::warpgroup_fence_operand(value);
}

// sums += acc, scaled. A lane holds, of every 8 columns, two of one row and two of the row 8 below.
template <int kTileN>
__device__ __forceinline__ void promote(const float (&acc)[kTileN / 2], const float (&scales)[2],
                                        float (&sums)[kTileN / 2]) {
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) sums[i] = fmaf(acc[i], scales[i / 2 % 2], sums[i]);
}

// ---------------------------------------------------------------- writing

__device__ __forceinline__ uint32_t pack(float low, float high, bool is_bf16) {
  if (is_bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Eight neighbouring columns of one row; the row is inside.
__device__ __forceinline__ void store(const Fp8BlockArgs& args, int row, int column, uint4 values) {
  uint16_t* out = static_cast<uint16_t*>(args.out) + row * args.ldo + column;
  if (args.is_vector) {
    if (column < args.n) *reinterpret_cast<uint4*>(out) = values;
    return;
  }
  const uint16_t* single = reinterpret_cast<const uint16_t*>(&values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < args.n) out[i] = single[i];
  }
}

// The 16 rows of a warp, through its own shared memory: lanes then write whole lines.
template <int kTileN>
__device__ __forceinline__ void store_warp(const Fp8BlockArgs& args, const Tile& tile,
                                           int first_row, const float (&sums)[kTileN / 2],
                                           uint8_t* staging) {
  constexpr int kColumns = kStagingColumns<kTileN>, kPitch = kStagingPitch<kTileN>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < kTileN / kColumns; ++part) {
    const int first_column = tile.column + part * kColumns;
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      const int column = i / 4 * 8 + lane % 4 * 2, row = lane / 4 + i / 2 % 2 * 8;
      float2 bias = make_float2(0.0f, 0.0f);
      if (args.bias != nullptr) {
        if (first_column + column < args.n) bias.x = args.bias[first_column + column];
        if (first_column + column + 1 < args.n) bias.y = args.bias[first_column + column + 1];
      }
      const float* pair = sums + part * kColumns / 2 + i;
      *reinterpret_cast<uint32_t*>(staging + row * kPitch + column * 2) =
          pack(pair[0] + bias.x, pair[1] + bias.y, args.is_bf16);
    }
    __syncwarp();
    constexpr int kVectors = kColumns / 8;
#pragma unroll
    for (int i = lane; i < 16 * kVectors; i += 32) {
      const int row = i / kVectors, column = i % kVectors * 8;
      if (first_row + row < tile.row_end) {
        store(args, first_row + row, first_column + column,
              *reinterpret_cast<const uint4*>(staging + row * kPitch + column * 2));
      }
    }
    __syncwarp();
  }
}

__device__ __forceinline__ float4 load_cluster(const float* own, uint32_t rank) {
  float4 v;
  const uint32_t address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(own), rank);
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Adds up what the thread blocks of a cluster left in `partial`; each writes its share of the tile.
template <int kTileN, int kPitch, int kThreads>
__device__ __forceinline__ void store_split(const Fp8BlockArgs& args, const Tile& tile,
                                            int num_rows, const float* partial, int cluster,
                                            int rank) {
  constexpr int kVectors = kTileN / 8;
  for (int i = rank * kThreads + threadIdx.x; i < num_rows * kVectors; i += cluster * kThreads) {
    const int row = i / kVectors, column = i % kVectors * 8;
    float sum[8] = {};
    if (args.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (tile.column + column + j < args.n) sum[j] = args.bias[tile.column + column + j];
      }
    }
#pragma unroll 4
    for (int source = 0; source < cluster; ++source) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 v = load_cluster(partial + row * kPitch + column + half * 4, source);
        sum[half * 4] += v.x, sum[half * 4 + 1] += v.y;
        sum[half * 4 + 2] += v.z, sum[half * 4 + 3] += v.w;
      }
    }
    const uint4 values = {pack(sum[0], sum[1], args.is_bf16), pack(sum[2], sum[3], args.is_bf16),
                          pack(sum[4], sum[5], args.is_bf16), pack(sum[6], sum[7], args.is_bf16)};
    store(args, tile.row + row, tile.column + column, values);
  }
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
    } else {  // two
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(
          &x_map, barrier, 3, kHint, target + rank * (Layout::kBytesX / 2), k * kBlockK, x_row);
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

// Named barriers of a thread block; 0 is __syncthreads. Groups that multiply at the same time would
// add at the same time too: where copying does not set the two apart, they take turns.
constexpr uint32_t kTurnOfGroup0 = 1, kEndOfGroups = 3;

// The 64 rows, step after step, of one group and one stage.
template <class B, int kTileN>
__device__ __forceinline__ void multiply_stage(const B& block, int stage, int warp_row, int group,
                                               float (&sums)[B::Layout::kSteps][kTileN / 2]) {
  using Layout = typename B::Layout;
  using cutlass::arch::NamedBarrier;
  const int lane = threadIdx.x % 32, group_row = group * Layout::kSteps * kGroupRows;
  const uint8_t* tiles = block.ring + stage * Layout::kStageBytes;
  const float* scales = block.scales + stage * Layout::kNumScales;
  const float w_scale = scales[Layout::kRows];
#pragma unroll
  for (int i = 0; i < Layout::kSteps; ++i) {
    float acc[kTileN / 2];
    if (Layout::kTakesTurns) NamedBarrier::sync(Layout::kMathThreads, kTurnOfGroup0 + group);
    begin_multiply<kTileN>(tiles + (group_row + i * kGroupRows) * kBlockK, tiles + Layout::kBytesX,
                           acc);
    if (Layout::kTakesTurns) NamedBarrier::arrive(Layout::kMathThreads, kTurnOfGroup0 + 1 - group);
    const int row = warp_row + i * kGroupRows + lane / 4;
    const float both[2] = {scales[row] * w_scale, scales[row + 8] * w_scale};
    end_multiply(acc);
    if (i + 1 == Layout::kSteps && lane < block.sharers) {
      block.empty[stage].arrive(Layout::kSplits ? block.rank : lane);
    }
    promote<kTileN>(acc, both, sums[i]);
  }
}

template <class B, int kTileN>
__device__ __forceinline__ void multiply_tiles(const B& block, int warp) {
  using Layout = typename B::Layout;
  using cutlass::arch::NamedBarrier;
  const int lane = threadIdx.x % 32, group = warp / 4;
  const int warp_row = group * Layout::kSteps * kGroupRows + warp % 4 * 16;
  wait_for_previous_kernel();
  typename B::Walk tiles(block.args, block.cluster, block.rank);
  Tile tile = {};
  Ring<Layout::kNumStages> place;
  if (Layout::kTakesTurns && group == 1) {
    NamedBarrier::arrive(Layout::kMathThreads, kTurnOfGroup0);
  }
  for (int index = block.first_index; tiles.at(index, tile); index += block.step) {
    float sums[Layout::kSteps][kTileN / 2] = {};
    for (int k = block.first_k; k < block.last_k; ++k, place.advance()) {
      block.full[place.stage].wait(place.phase);
      multiply_stage<B, kTileN>(block, place.stage, warp_row, group, sums);
    }
    if constexpr (Layout::kSplits) {
      // All groups are done with the stages before one writes over them.
      NamedBarrier::sync(Layout::kMathThreads, kEndOfGroups);
      float* partial = reinterpret_cast<float*>(block.ring);
#pragma unroll
      for (int i = 0; i < kTileN / 2; i += 2) {
        const int column = i / 4 * 8 + lane % 4 * 2, row = warp_row + lane / 4 + i / 2 % 2 * 8;
        *reinterpret_cast<float2*>(partial + row * Layout::kPartialPitch + column) =
            make_float2(sums[0][i], sums[0][i + 1]);
      }
      break;
    } else {
#pragma unroll
      for (int i = 0; i < Layout::kSteps; ++i) {
        store_warp<kTileN>(block.args, tile, tile.row + warp_row + i * kGroupRows, sums[i],
                           block.staging + warp * 16 * kStagingPitch<kTileN>);
      }
    }
  }
  if (Layout::kTakesTurns && group == 0) NamedBarrier::sync(Layout::kMathThreads, kTurnOfGroup0);
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
