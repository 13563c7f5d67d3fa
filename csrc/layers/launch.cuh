// Launches of kernels by the type of their elements.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../launch.cuh"
#include "layers.h"

namespace vllm::layers {

// Calls f.operator()<T>() with the device type of `type`.
template <typename F>
cudaError_t dispatch(FloatType type, F&& f) {
  switch (type) {
    case FloatType::kFloat32:
      return f.template operator()<float>();
    case FloatType::kBFloat16:
      return f.template operator()<__nv_bfloat16>();
    default:
      return f.template operator()<__half>();
  }
}

}  // namespace vllm::layers
