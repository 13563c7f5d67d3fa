// Element types as the kernels of csrc/layers take them.
#pragma once
#include "../layers/layers.h"
#include "cuda_check.h"

namespace vllm {

inline constexpr int64_t kVectorBytes = 16;

inline layers::FloatType type_of(const TensorView& tensor, const char* name) {
  switch (float_type(tensor, name)) {
    case cpu::ElementType::kFloat32:
      return layers::FloatType::kFloat32;
    case cpu::ElementType::kBFloat16:
      return layers::FloatType::kBFloat16;
    default:
      return layers::FloatType::kFloat16;
  }
}

}  // namespace vllm
