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

cudaError_t encode_bytes(CUtensorMap* map, const void* data, int num_dims, const cuuint64_t* sizes,
                         const cuuint64_t* strides, const cuuint32_t* box) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kSteps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, num_dims, const_cast<void*>(data), sizes, strides,
             box, kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t encode_byte_rows(CUtensorMap* map, const void* data, int64_t rows, int64_t columns,
                             int64_t stride, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[2] = {128, static_cast<cuuint32_t>(box_rows)};
  return encode_bytes(map, data, 2, sizes, strides, box);
}

cudaError_t encode_interleaved_rows(CUtensorMap* map, const void* data, int64_t rows,
                                    int64_t columns, int64_t stride, int box_rows) {
  const cuuint64_t step = static_cast<cuuint64_t>(stride);
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(columns), 2, 4, 4,
                               static_cast<cuuint64_t>(rows / 32)};
  const cuuint64_t strides[4] = {step, 8 * step, 2 * step, 32 * step};
  const cuuint32_t box[5] = {128, 2, 4, 4, static_cast<cuuint32_t>(box_rows / 32)};
  return encode_bytes(map, data, 5, sizes, strides, box);
}

}  // namespace vllm::gemm
