// How sm90_fp8_block.cuh multiplies: groups of four warps, 64 rows of x each.
#pragma once
#include <utility>

#include "sm90_fp8_stages.cuh"
#include "sm90_fp8_store.cuh"

namespace vllm::gemm {

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
    release_stage(block, ended);
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

}  // namespace vllm::gemm
