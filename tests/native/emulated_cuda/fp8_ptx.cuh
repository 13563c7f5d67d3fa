// What csrc/quantization/w8a8/fp8_ptx.cuh does, from the description of PTX.
#pragma once
#include <cmath>

#include "warp.h"

namespace vllm::w8a8 {

inline float max_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
}
inline float approximate_reciprocal(float x) { return 1.0f / x; }
template <typename Word>
void forget(Word&) {}
struct Copy {
  uint4* target;
  const void* source;
};
inline thread_local std::vector<Copy> begun[1024];  // by each thread; done as late as may be

inline void copy_async(uint4* target, const void* source) {
  begun[threadIdx.x].push_back({target, source});
}
inline void wait_for_copies() {
  for (const Copy& copy : begun[threadIdx.x]) std::memcpy(copy.target, copy.source, sizeof(uint4));
  begun[threadIdx.x].clear();
}

}  // namespace vllm::w8a8
