// Packed linear weights: [panels, k, 32] elements, one panel per 32 output columns, zero padded.
// Within a row of 32, E4M3 and bfloat16 interleave column c with column c + 16, so that one shift
// or mask widens sixteen of them at once; float16 and float32 rows keep their order.
#pragma once
#include "types.h"

namespace vllm::cpu {

// weight: [n, k] with row stride `stride`. Returns how many elements are E4M3 NaNs (0x7F, 0xFF).
int64_t pack_weight(const void* weight, ElementType type, int64_t n, int64_t k, int64_t stride,
                    void* packed);

}  // namespace vllm::cpu
