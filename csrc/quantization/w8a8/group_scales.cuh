// The scale of a group of columns, whose chunks lie in neighbouring lanes of a warp.
#pragma once
#include "chunk.cuh"
#include "fp8_quant.h"

namespace vllm::w8a8 {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;
inline constexpr int kChunkShift = 4;
static_assert(kChunk == 1 << kChunkShift);

// Replaces each value by the largest of its run of group_lanes lanes. Values of several rows go
// together: their shuffles overlap.
template <int kRows>
__device__ __forceinline__ void group_max(float (&amax)[kRows], int group_lanes) {
#pragma unroll 1
  for (int lanes = 1; lanes < group_lanes; lanes *= 2) {
#pragma unroll
    for (float& value : amax) value = max_or_nan(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
}

// The largest magnitudes of chunks -> the scales of their groups.
template <int kRows>
__device__ __forceinline__ void group_scales(float (&values)[kRows], const GroupScales& scales) {
  group_max(values, 1 << (scales.group_shift - kChunkShift));
#pragma unroll
  for (float& value : values) value = scale_of(max_or_nan(value, scales.min_amax));
  if (!scales.is_ue8m0) return;
#pragma unroll
  for (float& value : values) value = ceil_to_power_of_two(value);
}

// Writes the words of kRows consecutive rows, of which scales.num_rows exist.
template <int kRows, typename Word>
__device__ __forceinline__ void store_rows(const GroupScales& scales, int64_t first_row,
                                           int64_t column, const Word (&words)[kRows]) {
  Word* target = static_cast<Word*>(scales.data) + first_row * scales.row_stride +
                 column * scales.group_stride;
  if constexpr (kRows > 1) {
    struct alignas(kRows * sizeof(Word)) Run {
      Word words[kRows];
    };
    if (scales.is_vector) {
      Run run;
#pragma unroll
      for (int r = 0; r < kRows; ++r) run.words[r] = words[r];
      if (first_row < scales.num_rows) *reinterpret_cast<Run*>(target) = run;
      return;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r < scales.num_rows) target[r * scales.row_stride] = words[r];
  }
}

// Writes the scales of kRows consecutive rows for the group of the chunk at `column`, zeros for
// rows from num_tokens on. All lanes of the warp call it, with consecutive chunks, the first
// lane's at a multiple of 512.
template <int kRows>
__device__ __forceinline__ void store_scales(const GroupScales& scales, int64_t num_tokens,
                                             int64_t first_row, int64_t column,
                                             const float (&values)[kRows]) {
  const int lane = threadIdx.x % 32, group_lanes = 1 << (scales.group_shift - kChunkShift);
  const int64_t group = column >> scales.group_shift;
  const bool exists = group < scales.num_groups;
  if (!scales.is_packed) {
    float words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) words[r] = first_row + r < num_tokens ? values[r] : 0.0f;
    if (exists && (lane & (group_lanes - 1)) == 0) store_rows(scales, first_row, group, words);
    return;
  }
  int32_t words[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool is_filled = exists && first_row + r < num_tokens;
    const uint32_t exponent = is_filled ? __float_as_uint(values[r]) >> 23 & 0xFF : 0;
    uint32_t word = exponent << (8 * (group & 3));
    word |= __shfl_xor_sync(kAllLanes, word, group_lanes);
    words[r] = static_cast<int32_t>(word | __shfl_xor_sync(kAllLanes, word, 2 * group_lanes));
  }
  if (exists && (lane & (4 * group_lanes - 1)) == 0) {
    store_rows(scales, first_row, group >> 2, words);
  }
}

}  // namespace vllm::w8a8
