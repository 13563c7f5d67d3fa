// What csrc/layers/sampling_ptx.cuh does, from the description of PTX.
#pragma once
#include <cmath>

namespace vllm::layers {

inline float max_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
}
inline float power_of_two(float x) { return std::exp2(x); }

}  // namespace vllm::layers
