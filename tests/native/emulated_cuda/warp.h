// What the 32 threads of a warp tell each other, emulated.
#pragma once
#include "emulated_cuda.h"

struct NumThreads {
  operator unsigned() const { return static_cast<unsigned>(emulated::block->fibers.size()); }
};
inline const struct {
  NumThreads x;
} blockDim;

inline void __syncwarp() { emulated::meet(emulated::block->warps[threadIdx.x / 32].meeting); }

namespace emulated {

// What each lane of the warp brings: all take part. Until they do so the time after the next.
template <typename V>
const uint64_t* said_by_all(V value) {
  static_assert(sizeof(V) <= 8);
  Warp& warp = block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  uint64_t* said = warp.said[warp.num_times[lane]++ % 2];
  std::memcpy(&said[lane], &value, sizeof(V));
  __syncwarp();
  return said;
}

template <typename V>
V value_of(int source, V value) {
  std::memcpy(&value, &said_by_all(value)[source], sizeof(V));
  return value;
}

}  // namespace emulated

template <typename V>
V __shfl_sync(unsigned, V value, int source) {
  return emulated::value_of(source, value);
}
template <typename V>
V __shfl_xor_sync(unsigned, V value, int lanes) {
  return emulated::value_of((threadIdx.x % 32) ^ lanes, value);
}
template <typename V>
V __shfl_up_sync(unsigned, V value, int lanes) {
  const int lane = threadIdx.x % 32;
  return emulated::value_of(lane < lanes ? lane : lane - lanes, value);
}
inline unsigned __ballot_sync(unsigned, bool is_set) {
  const uint64_t* said = emulated::said_by_all(uint64_t{is_set});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(said[lane]) << lane;
  return bits;
}
