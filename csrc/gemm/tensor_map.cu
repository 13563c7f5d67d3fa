#include <cudaTypedefs.h>

#include "tensor_map.h"

namespace vllm::gemm {
namespace {

// The driver's function, asked for at run time: the library must load where there is no driver.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &state);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &state);
#endif
  if (error != cudaSuccess || state != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

}  // namespace

cudaError_t encode_byte_rows(CUtensorMap* map, const void* data, int64_t rows, int64_t columns,
                             int64_t stride, int box_rows) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[2] = {128, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace vllm::gemm
