// Argument checks of exported CUDA functions, their stream and their launch errors. Wrong arguments
// are ValueErrors that name the argument; what CUDA reports is a RuntimeError.
#pragma once
#include <cuda_runtime.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <string>
#include <utility>

#include "check.h"

namespace vllm {

// A CUDA tensor of `num_dims` dimensions.
inline void check_cuda(const TensorView& tensor, const char* name, int num_dims) {
  VLLM_CHECK(tensor.device().device_type == kDLCUDA,
             name << ": given a tensor of DLPack device type " << tensor.device().device_type
                  << "; accepted: a CUDA tensor");
  VLLM_CHECK(tensor.ndim() == num_dims, name << ": given shape " << shape_name(tensor)
                                             << "; accepted: " << num_dims << " dimensions");
}

// The same, on the GPU of `other`.
inline void check_cuda(const TensorView& tensor, const char* name, int num_dims,
                       const TensorView& other, const char* other_name) {
  check_cuda(tensor, name, num_dims);
  VLLM_CHECK(tensor.device().device_id == other.device().device_id,
             name << ": given a tensor on GPU " << tensor.device().device_id << "; accepted: GPU "
                  << other.device().device_id << ", where " << other_name << " is");
}

inline int64_t element_bytes(const TensorView& tensor) { return (tensor.dtype().bits + 7) / 8; }

inline bool is_aligned(const TensorView& tensor, int64_t num_bytes) {
  return reinterpret_cast<uintptr_t>(data_of(tensor)) % num_bytes == 0;
}

inline void check_aligned(const TensorView& tensor, const char* name, int64_t num_bytes) {
  VLLM_CHECK(is_aligned(tensor, num_bytes),
             name << ": given data at an address that is no multiple of " << num_bytes
                  << " bytes; accepted: aligned data (call .clone())");
}

// Whether every row of a matrix starts at a multiple of `num_bytes`.
inline bool has_aligned_rows(const TensorView& tensor, int64_t num_bytes) {
  const bool is_stride_aligned =
      tensor.size(0) <= 1 || tensor.stride(0) * element_bytes(tensor) % num_bytes == 0;
  return is_aligned(tensor, num_bytes) && is_stride_aligned;
}

// A matrix of contiguous rows that all start at a multiple of `num_bytes`; rows may be apart.
inline void check_rows(const TensorView& tensor, const char* name, int64_t num_bytes) {
  check_last_contiguous(tensor, name);
  check_aligned(tensor, name, num_bytes);
  VLLM_CHECK(has_aligned_rows(tensor, num_bytes),
             name << ": given rows " << tensor.stride(0) * element_bytes(tensor)
                  << " bytes apart; accepted: a multiple of " << num_bytes);
}

// The first byte of a tensor, and the one after its last.
inline std::pair<uintptr_t, uintptr_t> extent_of(const TensorView& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(data_of(tensor));
  int64_t last = 0;
  for (int i = 0; i < tensor.ndim(); ++i) {
    if (tensor.size(i) == 0) return {begin, begin};
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return {begin, begin + (last + 1) * element_bytes(tensor)};
}

// Where thread blocks write while others still read. Also refuses tensors that lie between each
// other's rows.
inline void check_apart(const TensorView& out, const char* name, const TensorView& other,
                        const char* other_name) {
  const auto [begin, end] = extent_of(out);
  const auto [other_begin, other_end] = extent_of(other);
  VLLM_CHECK(end <= other_begin || other_end <= begin || begin == end || other_begin == other_end,
             name << ": given memory that " << other_name << " lies in; accepted: memory apart");
}

// A matrix whose rows do not lie in each other.
inline void check_own_rows(const TensorView& out, const char* name) {
  check_last_contiguous(out, name);
  VLLM_CHECK(out.size(0) <= 1 || out.stride(0) >= out.size(1),
             name << ": given rows " << out.stride(0) << " elements apart; accepted: at least "
                  << out.size(1));
}

// The stream that the caller's framework works on, on the tensor's GPU.
inline cudaStream_t stream_of(const TensorView& tensor) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, tensor.device().device_id));
}

// float32 of each column of out; null where there is none.
inline const float* check_columns(const tvm::ffi::Optional<TensorView>& given, const char* name,
                                  const TensorView& out) {
  if (!given.has_value()) return nullptr;
  const TensorView& columns = given.value();
  check_cuda(columns, name, 1, out, "out");
  check_type(columns, name, kDLFloat, 32);
  check_size(columns, name, 0, out.size(1), "columns of out");
  check_contiguous(columns, name);
  check_apart(out, "out", columns, name);
  return static_cast<const float*>(data_of(columns));
}

inline void check_launch(cudaError_t error, const char* name) {
  if (__builtin_expect(error != cudaSuccess, 0)) {
    TVM_FFI_THROW(RuntimeError) << name << ": " << cudaGetErrorString(error);
  }
}

// Makes a tensor's GPU current while a function runs: launches go to the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(const TensorView& tensor) {
    check_launch(cudaGetDevice(&before_), "cudaGetDevice");
    is_changed_ = before_ != tensor.device().device_id;
    if (is_changed_) check_launch(cudaSetDevice(tensor.device().device_id), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (is_changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

// Multiprocessors of the tensor's GPU, asked for once.
inline int num_sms(const TensorView& tensor) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> counts[kMaxDevices] = {};
  const int device = tensor.device().device_id;
  int count = device < kMaxDevices ? counts[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "num_sms");
    if (device < kMaxDevices) counts[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

}  // namespace vllm
