// Launches that let the next kernel of the stream begin before this one ends.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>

namespace vllm {

// Waits until everything earlier in the stream is complete and visible, then lets the next kernel
// start (it waits in turn). Every thread calls this before it touches memory: a kernel launched
// here may begin while those before it still run. A GEMM that comes next fetches its weights
// meanwhile. (To let it start before the wait gains nothing: measured over MLPs of 1 to 256 rows.)
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

inline constexpr int kMaxDevices = 64;  // that answers are remembered for

// A positive attribute of the current GPU, asked for once.
template <cudaDeviceAttr kAttribute>
cudaError_t device_attribute(int* value) {
  static std::atomic<int> known[kMaxDevices] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  *value = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (*value > 0) return cudaSuccess;
  error = cudaDeviceGetAttribute(value, kAttribute, device);
  if (error == cudaSuccess && device < kMaxDevices) known[device] = *value;
  return error;
}

static __global__ void probe_kernel() {}

// Whether the kernels of this file know clusters and wait_for_inputs on the current GPU: code made
// for an older chip than 9.0, and compiled further by the driver, does neither. Asked for once.
static cudaError_t has_clusters(bool* result) {
  static std::atomic<int> known[kMaxDevices] = {};  // 1 for no, 2 for yes
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  int answer = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (error != cudaSuccess) return error;
    answer = attributes.ptxVersion >= 90 ? 2 : 1;
    if (device < kMaxDevices) known[device] = answer;
  }
  *result = answer == 2;
  return cudaSuccess;
}

struct LaunchShape {
  dim3 grid;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;  // blocks along x that share a cluster
};

template <typename... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                   const std::type_identity_t<Parameters>&... args) {
  bool is_recent = false;
  const cudaError_t error = has_clusters(&is_recent);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = is_recent ? (shape.cluster > 1 ? 2 : 1) : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace vllm
