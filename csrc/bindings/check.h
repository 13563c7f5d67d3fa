// Argument checks of exported functions. Every failure is a ValueError that names the argument,
// what was given and what is accepted.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <string>

#include "../cpu/types.h"

namespace vllm {

using tvm::ffi::TensorView;

#define VLLM_CHECK(condition, message) \
  if (__builtin_expect(!(condition), 0)) TVM_FFI_THROW(ValueError) << message

inline std::string type_name(DLDataType type) {
  const std::string bits = std::to_string(type.bits);
  if (type.lanes != 1) return "a vector type";
  switch (type.code) {
    case kDLFloat:
      return "float" + bits;
    case kDLBfloat:
      return "bfloat" + bits;
    case kDLInt:
      return "int" + bits;
    case kDLUInt:
      return "uint" + bits;
    case kDLBool:
      return "bool";
    case kDLFloat8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return "DLPack type code " + std::to_string(type.code) + " of " + bits + " bits";
  }
}

inline std::string shape_name(const TensorView& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.size(i));
  }
  return text + "]";
}

inline bool is_type(const TensorView& tensor, int code, int bits) {
  const DLDataType type = tensor.dtype();
  return type.code == code && type.bits == bits && type.lanes == 1;
}

// Device and number of dimensions.
inline void check_cpu(const TensorView& tensor, const char* name, int num_dims) {
  VLLM_CHECK(tensor.device().device_type == kDLCPU,
             name << ": given a tensor of DLPack device type " << tensor.device().device_type
                  << "; accepted: a CPU tensor");
  VLLM_CHECK(tensor.ndim() == num_dims, name << ": given shape " << shape_name(tensor)
                                             << "; accepted: " << num_dims << " dimensions");
}

inline void check_size(const TensorView& tensor, const char* name, int dim, int64_t expected,
                       const char* meaning) {
  VLLM_CHECK(tensor.size(dim) == expected, name << ": given shape " << shape_name(tensor)
                                                << "; dimension " << dim << " must be " << expected
                                                << " (" << meaning << ")");
}

inline void check_last_contiguous(const TensorView& tensor, const char* name) {
  const int last = tensor.ndim() - 1;
  VLLM_CHECK(tensor.size(last) <= 1 || tensor.stride(last) == 1,
             name << ": given a last dimension with stride " << tensor.stride(last)
                  << "; accepted: stride 1 (call .contiguous())");
}

inline void check_contiguous(const TensorView& tensor, const char* name) {
  VLLM_CHECK(tensor.IsContiguous(), name << ": given a strided tensor of shape "
                                         << shape_name(tensor)
                                         << "; accepted: a contiguous one (call .contiguous())");
}

inline void* data_of(const TensorView& tensor) {
  return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

// float32, bfloat16 or float16.
inline cpu::ElementType float_type(const TensorView& tensor, const char* name) {
  if (is_type(tensor, kDLFloat, 32)) return cpu::ElementType::kFloat32;
  if (is_type(tensor, kDLBfloat, 16)) return cpu::ElementType::kBFloat16;
  VLLM_CHECK(is_type(tensor, kDLFloat, 16), name << ": given " << type_name(tensor.dtype())
                                                 << "; accepted: float32, bfloat16, float16");
  return cpu::ElementType::kFloat16;
}

// The same, or E4M3 (uint8 is taken as its codes).
inline cpu::ElementType storage_type(const TensorView& tensor, const char* name) {
  if (is_type(tensor, kDLFloat8_e4m3fn, 8) || is_type(tensor, kDLUInt, 8)) {
    return cpu::ElementType::kE4M3;
  }
  VLLM_CHECK(is_type(tensor, kDLFloat, 32) || is_type(tensor, kDLBfloat, 16) ||
                 is_type(tensor, kDLFloat, 16),
             name << ": given " << type_name(tensor.dtype())
                  << "; accepted: float32, bfloat16, float16, float8_e4m3fn, uint8 (E4M3 codes)");
  return float_type(tensor, name);
}

inline void check_type(const TensorView& tensor, const char* name, int code, int bits) {
  const DLDataType expected{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  VLLM_CHECK(is_type(tensor, code, bits), name << ": given " << type_name(tensor.dtype())
                                               << "; accepted: " << type_name(expected));
}

// A contiguous vector of `size` elements.
inline void check_vector(const TensorView& tensor, const char* name, int code, int bits,
                         int64_t size, const char* meaning) {
  check_cpu(tensor, name, 1);
  check_type(tensor, name, code, bits);
  check_size(tensor, name, 0, size, meaning);
  check_contiguous(tensor, name);
}

inline void check_same_type(cpu::ElementType given, const TensorView& tensor, const char* name,
                            cpu::ElementType expected, const char* other) {
  VLLM_CHECK(given == expected, name << ": given " << type_name(tensor.dtype())
                                     << "; accepted: the type of " << other);
}

// A matrix whose rows may be apart.
inline cpu::Rows rows_of(const TensorView& tensor, const char* name) {
  check_cpu(tensor, name, 2);
  check_last_contiguous(tensor, name);
  return {data_of(tensor), float_type(tensor, name), tensor.stride(0)};
}

// A [tokens, heads, head_dim] view with a contiguous head_dim.
inline cpu::Heads heads_of(const TensorView& tensor, const char* name) {
  check_cpu(tensor, name, 3);
  check_last_contiguous(tensor, name);
  return {data_of(tensor), float_type(tensor, name), tensor.stride(0), tensor.stride(1)};
}

}  // namespace vllm
