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

// The same, but of every 32 rows the one numbered 8 t + 2 j + e (t, j < 4, e < 2) arrives as row
// 8 j + 2 t + e: lane t of a quad, which has columns 2 t and 2 t + 1 of every 8 of wgmma's result,
// then has 8 neighbours of every 32. rows and box_rows: multiples of 32. A box begins at {column,
// 0, 0, 0, row / 32}.
cudaError_t encode_interleaved_rows(CUtensorMap* map, const void* data, int64_t rows,
                                    int64_t columns, int64_t stride, int box_rows);

}  // namespace vllm::gemm
