// Packed linear weights: [panels, k, 32] elements, one panel per 32 output columns, zero padded.
// Within a row of 32, E4M3 and bfloat16 interleave column c with column c + 16, so that one shift
// or mask widens sixteen of them at once; rows of other types keep their order.
// 4-bit codes: [panels, quads, 64] bytes. A quad is four rows of k, of one scale block: the last
// quad of a block may hold fewer. As sixteen 32-bit lanes, lane l holds column l in its lower half
// and column l + 16 in its upper one, of rows 0, 2, 1 and 3 from the lowest nibble on: a shift
// brings any row of sixteen columns to the lowest bits of all lanes (AVX-512), and the even or odd
// bytes masked by 0x0F are one row of all columns (AVX2).
#pragma once
#include "types.h"

namespace vllm::cpu {

// weight: [n, k] with row stride `stride`. Returns how many elements are E4M3 NaNs (0x7F, 0xFF).
int64_t pack_weight(const void* weight, ElementType type, int64_t n, int64_t k, int64_t stride,
                    void* packed);

// Quads of a panel with k rows in scale blocks of block_k.
int64_t num_quads(int64_t k, int64_t block_k);
// codes: [n, k / 2] bytes with row stride `stride`, the even column in the low nibble.
void pack_codes(const void* codes, int64_t n, int64_t k, int64_t block_k, int64_t stride,
                void* packed);

}  // namespace vllm::cpu
