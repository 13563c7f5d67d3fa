#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp8_quant.h"

namespace vllm::w8a8 {

// Calls f.operator()<T>() with the device type of `type`.
template <typename F>
cudaError_t dispatch(InputType type, F&& f) {
  switch (type) {
    case InputType::kFloat32:
      return f.template operator()<float>();
    case InputType::kBFloat16:
      return f.template operator()<__nv_bfloat16>();
    default:
      return f.template operator()<__half>();
  }
}

}  // namespace vllm::w8a8
