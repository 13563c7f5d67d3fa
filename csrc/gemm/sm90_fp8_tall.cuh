// How sm90_fp8_block.cuh multiplies tiles of 256 rows, which read shared memory less. With the
// tensor cores always busy, wgmma would read 96 bytes a cycle (24 KiB in the 256 cycles of 64 x 128
// x 128 products) and TMA write 47 (48 KiB in 1,024), of 128 that there are: so they can be busy
// for 89 % of the time. With tiles of 128 rows, where TMA writes 64, it is 80 %.
#pragma once
#include "sm90_fp8_multiply.cuh"

namespace vllm::gemm {

// A group's two halves of 64 rows, one below the other. There are registers for one product: it is
// added to the sums of its half before the next begins, while the tensor cores work for the other
// group.
template <class B>
struct TallMultiplier {
  using Layout = typename B::Layout;
  static constexpr int kColumns = Layout::kColumns, kSize = kColumns / 2;
  const B& block;
  const int warp;
  const int lane = threadIdx.x % 32;
  const int first_row = warp / 4 * 2 * kGroupRows + warp % 4 * 16 + lane / 4;  // of the upper half
  const uint32_t x_operand = wgmma_operand(block.ring + warp / 4 * 2 * kGroupRows * kBlockK);
  const uint32_t w_operand = wgmma_operand(block.ring + Layout::kBytesX);
  Ring<Layout::kNumStages> place = {};
  float product[kSize], sums[2][kSize];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[0][i] = sums[1][i] = 0.0f;
  }

  __device__ __forceinline__ void await_stage() { block.full[place.stage].wait(place.phase); }

  __device__ __forceinline__ void begin(int half) {
    const int offset = place.stage * (Layout::kStageBytes / 16);
    begin_multiply<kColumns>(x_operand + offset + half * (kGroupRows * kBlockK / 16),
                             w_operand + offset, product);
  }

  // Of the two rows of which a lane holds a part.
  __device__ __forceinline__ void load_scales(int half, float (&scales)[2]) const {
    const float* all = block.scales + place.stage * Layout::kNumScales;
    const int row = first_row + half * kGroupRows;
    const float w_scale = all[Layout::kRows];
    scales[0] = all[row] * w_scale, scales[1] = all[row + 8] * w_scale;
  }

  // From the upper half of a stage to its lower.
  __device__ __forceinline__ void turn_half() {
    float scales[2];
    load_scales(0, scales);
    end_multiply(product);
    promote<kColumns>(product, scales, sums[0]);
    begin(1);
  }

  // From the lower half of a stage to the next stage. Without one, what begins is a product of
  // anything that nobody adds: a branch around it would make ptxas wait for each (C7517).
  __device__ __forceinline__ void turn_stage(bool has_next) {
    float scales[2];
    load_scales(1, scales);
    const int ended = place.stage;
    place.advance();
    if (has_next) await_stage();
    end_multiply(product);
    release_stage(block, ended);
    promote<kColumns>(product, scales, sums[1]);
    begin(0);
  }

  __device__ __forceinline__ void store(const Tile& tile, int half) const {
    store_neighbours<kColumns>(block.args, tile, tile.row + first_row + half * kGroupRows,
                               sums[half]);
  }
};

// One loop over the tiles, with one way out of it: with two, ptxas (13.0) keeps the operands of
// wgmma in registers of each lane (R2UR before every QGMMA), which costs a tenth of the time.
template <class B>
__device__ __forceinline__ void multiply_tall_tiles(const B& block, int warp) {
  wait_for_previous_kernel();
  typename B::Walk tiles(block.args, block.cluster, block.rank);
  Tile tile = {};
  int index = block.first_index;
  bool has_tile = tiles.at(index, tile);
  if (!has_tile) return;
  TallMultiplier<B> multiplier{block, warp};
  multiplier.await_stage();
  multiplier.begin(0);
  while (has_tile) {
    multiplier.clear();
#pragma unroll 1
    for (int k = 1; k < block.last_k; ++k) {
      multiplier.turn_half();
      multiplier.turn_stage(true);
    }
    multiplier.turn_half();
    const Tile done = tile;
    has_tile = tiles.at(index += block.step, tile);
    // Each half is written while a product is on its way: the last of this tile, the first of the
    // next.
    multiplier.store(done, 0);
    multiplier.turn_stage(has_tile);
    multiplier.store(done, 1);
  }
  end_multiply(multiplier.product);
}

}  // namespace vllm::gemm
