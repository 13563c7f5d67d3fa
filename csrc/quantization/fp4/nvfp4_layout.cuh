// Where the scales of a row go.
#pragma once
#include "nvfp4_quant.h"

namespace vllm::fp4 {

// Quotients of 31-bit numbers by a divisor >= 1 that is known before the launch.
class Divisor {
 public:
  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    magic_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }
  // magic / 2^(31 + shift) exceeds 1 / divisor by less than 2^-31 of it.
  __device__ __forceinline__ uint32_t quotient(uint32_t x) const {
    return static_cast<uint32_t>(uint64_t{x} * magic_ >> (31 + shift_));
  }
  __device__ __forceinline__ uint32_t value() const { return divisor_; }

 private:
  uint32_t divisor_, magic_;
  int shift_ = 0;
};

__host__ __device__ __forceinline__ int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Byte of a scale among tiles; tile_columns: tiles that lie side by side.
__device__ __forceinline__ int64_t swizzled_offset(uint32_t row, uint32_t column,
                                                   uint32_t tile_columns) {
  const int64_t tile = int64_t{row / kTileRows} * tile_columns + column / kTileColumns;
  const uint32_t row_in_tile = row % kTileRows;
  return tile * (kTileRows * kTileColumns) + row_in_tile % 32 * 16 + row_in_tile / 32 * 4 +
         column % kTileColumns;
}

// Rows of x and of the scales that belong to each expert, in shared memory.
struct ExpertTable {
  int32_t first_row[kMaxExperts + 1];
  int32_t first_scale_row[kMaxExperts + 1];

  // Called by all threads of a block. Offsets that run backwards or past m leave rows out; they
  // cannot lead outside x or the scales.
  __device__ void fill(const int32_t* offsets, int num_experts, int32_t m) {
    for (int e = threadIdx.x; e <= num_experts; e += blockDim.x) {
      first_row[e] = min(max(offsets[e], 0), m);
    }
    __syncthreads();
    if (threadIdx.x < 32) scan(num_experts);
    __syncthreads();
  }

  // The expert of a row, or -1.
  __device__ __forceinline__ int expert_of(int32_t row, int num_experts) const {
    int low = 0, high = num_experts;  // first_row[low] <= row < first_row[high]
    if (row < first_row[low] || row >= first_row[high]) return -1;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_row[middle] <= row ? low : high) = middle;
    }
    return low;
  }

 private:
  // first_scale_row: running sum of the experts' rows, each rounded up to whole tiles.
  __device__ void scan(int num_experts) {
    int32_t before = 0;
    const int lane = threadIdx.x;
    for (int base = 0; base <= num_experts; base += 32) {
      const int e = base + lane;
      const int32_t rows = e < num_experts ? max(first_row[e + 1] - first_row[e], 0) : 0;
      const int32_t padded = (rows + kTileRows - 1) / kTileRows * kTileRows;
      int32_t sum = padded;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      if (e <= num_experts) first_scale_row[e] = before + sum - padded;
      before += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
  }
};

}  // namespace vllm::fp4
