// kRanks thread blocks that work on one row and read each other's shared memory.
#pragma once
#include <cooperative_groups.h>

#include <cstdint>

#include "vector.cuh"

namespace vllm::layers {

// Clusters exist from compute capability 9.0 on; kRanks = 1 runs everywhere.
template <int kRanks>
struct Cluster {
  static __device__ __forceinline__ int rank() {
    return kRanks == 1 ? 0 : static_cast<int>(blockIdx.x % kRanks);
  }

  // Orders shared memory between all threads of all ranks.
  static __device__ __forceinline__ void sync() {
    if constexpr (kRanks == 1) {
      __syncthreads();
    } else {
#if __CUDA_ARCH__ >= 900
      cooperative_groups::this_cluster().sync();
#endif
    }
  }

  // The same in two steps.
  static __device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kRanks > 1) cooperative_groups::this_cluster().barrier_arrive();
#endif
  }
  // Orders no memory: for what was read, or for nothing.
  static __device__ __forceinline__ void arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kRanks > 1) __cluster_barrier_arrive_relaxed();
#endif
  }
  static __device__ __forceinline__ void wait() {
    if constexpr (kRanks == 1) {
      __syncthreads();
    } else {
#if __CUDA_ARCH__ >= 900
      cooperative_groups::this_cluster().barrier_wait();
#endif
    }
  }

  // The same variable of another rank, which must have started and not ended.
  template <typename V>
  static __device__ __forceinline__ V* of(V* variable, int rank) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kRanks > 1)
      return cooperative_groups::this_cluster().map_shared_rank(variable, rank);
#endif
    return variable;
  }
};

template <typename V>
__device__ __forceinline__ V sum_over_warp(V value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, lanes);
  }
  return value;
}

// Sum of the values of this lane and those before it.
__device__ __forceinline__ uint64_t inclusive_sum_over_warp(uint64_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint64_t before = __shfl_up_sync(kAllLanes, value, lanes);
    if (lane >= lanes) value += before;
  }
  return value;
}

struct BlockSums {
  uint64_t up_to_here, total;
};

// The same over a block of kWarps warps. `shared` [kWarps] may be used again after a barrier.
template <int kWarps>
__device__ __forceinline__ BlockSums sums_over_block(uint64_t value, uint64_t* shared) {
  static_assert(kWarps <= 32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t up_to_here = inclusive_sum_over_warp(value);
  if (lane == 31) shared[warp] = up_to_here;
  __syncthreads();
  // Each warp adds up all of them for itself.
  const uint64_t of_warps = inclusive_sum_over_warp(lane < kWarps ? shared[lane] : 0);
  const uint64_t before = __shfl_sync(kAllLanes, of_warps, max(warp - 1, 0));
  const uint64_t total = __shfl_sync(kAllLanes, of_warps, kWarps - 1);
  return {up_to_here + (warp > 0 ? before : 0), total};
}

// 64-bit sums from native 32-bit atomics: the addition that wraps a low word around sees it.
template <int kSize>
struct Histogram {
  uint32_t low[kSize], high[kSize];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kSize; i += blockDim.x) low[i] = high[i] = 0;
  }
  // One more, of fewer than 2^32.
  __device__ __forceinline__ void count(int i) { atomicAdd(&low[i], 1u); }
  __device__ __forceinline__ void add(int i, uint64_t amount) {
    const uint32_t part = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&low[i], part);
    const uint32_t carry = before + part < before;
    const uint32_t rest = static_cast<uint32_t>(amount >> 32) + carry;
    if (rest != 0) atomicAdd(&high[i], rest);
  }
  __device__ __forceinline__ uint64_t get(int i) const {
    return static_cast<uint64_t>(high[i]) << 32 | low[i];
  }
};

}  // namespace vllm::layers
