// The ring of stages of sm90_fp8_block.cuh, and what all warps of a thread block know.
#pragma once
#include "sm90_fp8_ptx.cuh"
#include "sm90_fp8_tiles.cuh"

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

// Lanes of a warp that arrive where a stage is given back. racecheck takes an arrival for that of
// its own lane alone: a build for it lets all of them arrive (tests/kernels/gpu/sanitize.py).
#ifdef VLLM_RACECHECK
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

// Gives a stage back to who fills it: a lane for each thread block does so for its whole warp,
// whose reads __syncwarp puts before.
template <class B>
__device__ __forceinline__ void release_stage(const B& block, int stage) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if constexpr (kArrivingLanes > 1) {
    for (int i = 0; i < block.sharers; ++i) {
      block.empty[stage].arrive(B::Layout::kSplits ? block.rank : i);
    }
  } else if (lane < block.sharers) {
    block.empty[stage].arrive(B::Layout::kSplits ? block.rank : lane);
  }
}

}  // namespace vllm::gemm
