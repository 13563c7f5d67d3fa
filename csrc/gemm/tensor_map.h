// Descriptors of matrices for the tensor memory accelerator (TMA).
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace vllm::gemm {

// Fills `map` for boxes of `box_rows` rows of 128 bytes, swizzled over 128 bytes, out of a matrix
// of bytes [rows, columns] with rows `stride` bytes apart. What lies outside is read as zeros.
// Address: a multiple of 16; columns and stride: multiples of 16.
cudaError_t encode_byte_rows(CUtensorMap* map, const void* data, int64_t rows, int64_t columns,
                             int64_t stride, int box_rows);

}  // namespace vllm::gemm
