// RMSNorm and quantisation of a row that the threads of a block hold in registers.
#pragma once
#include "group_scales.cuh"

namespace vllm::w8a8 {

constexpr int kManyChunks = 4;
// Threads of a block that holds a row with one, or up to kManyChunks chunks per thread: beyond one
// chunk a thread needs more than the 64 registers that 1024 threads can have.
template <int kChunks>
constexpr int kMaxThreads = kChunks == 1 ? 1024 : kMaxRowColumns / kChunk / kManyChunks;

// Combines one value per thread over the block, for all threads, in an order that depends on the
// number of threads alone. What threads wrote before it, all may read after it.
template <typename Combine>
__device__ __forceinline__ float block_reduce(float value, float* shared, Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  if (num_warps == 1) {
    __syncwarp();
    return value;
  }
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < num_warps ? shared[lane] : 0.0f;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
}

// Of the c-th chunk of a thread.
__device__ __forceinline__ int64_t column_of(int thread, int c) {
  return (int64_t{c} * blockDim.x + thread) * kChunk;
}

template <typename T>
__device__ __forceinline__ Chunk<T> sum_of(const Chunk<T>& x, const Chunk<T>& y) {
  Chunk<T> sum;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 a = x.pair(i), b = y.pair(i);
    sum.set_pair(i, {a.x + b.x, a.y + b.y});
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(const Chunk<T>& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 a = x.pair(i);
    sum = __fmaf_rn(a.y, a.y, __fmaf_rn(a.x, a.x, sum));
  }
  return sum;
}

// x + residual rounded to T, in place of both; returns the sum of squares of the result.
template <bool kIsVector, typename T>
__device__ __forceinline__ float add_residual(Chunk<T>& x, T* residual, int valid) {
  if (residual != nullptr) {
    x = sum_of(x, load_chunk<kIsVector>(residual, valid));
    store_chunk<kIsVector>(residual, x, valid);
  }
  return sum_of_squares(x);
}

// x * inverse_rms * weight rounded to T.
template <typename T>
__device__ __forceinline__ void scale_chunk(Chunk<T>& x, const Chunk<float>& weight,
                                            float inverse_rms) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 a = x.pair(i), b = weight.pair(i);
    x.set_pair(i, {a.x * inverse_rms * b.x, a.y * inverse_rms * b.y});
  }
}

// Writes the codes and scales of a normed row; of one that only fills, zeros as scales.
template <bool kIsVector, typename T, int kChunks>
__device__ __forceinline__ void quantise_row(const Chunk<T> (&chunks)[kChunks],
                                             const Matrix& matrix, const GroupScales& scales,
                                             int64_t row, int thread) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t column = column_of(thread, c);
    float value[1] = {chunks[c].amax()};
    group_scales(value, scales);
    if (row < matrix.m) {
      const typename DivisorOf<T>::type divisor(value[0]);
      quantise_chunk<kIsVector>(matrix.q + row * matrix.k + column, chunks[c],
                                num_valid(column, matrix.k), divisor);
    }
    store_scales(scales, matrix.m, row, column, value);
  }
}

}  // namespace vllm::w8a8
