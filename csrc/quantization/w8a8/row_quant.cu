// Quantising rows that one block holds in registers: what must see a whole row before it writes.
#include "../../launch.cuh"
#include "dispatch.cuh"
#include "group_scales.cuh"

namespace vllm::w8a8 {
namespace {

constexpr int kManyChunks = 4;
// Threads of a block that holds a row with one, or up to kManyChunks chunks per thread: beyond one
// chunk a thread needs more than the 64 registers that 1024 threads can have.
template <int kChunks>
constexpr int kMaxThreads = kChunks == 1 ? 1024 : kMaxRowColumns / kChunk / kManyChunks;

// Combines one value per thread over the block, for all threads, in an order that depends on the
// number of threads alone.
template <typename Combine>
__device__ __forceinline__ float block_reduce(float value, float* shared, Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  if (num_warps == 1) return value;
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < num_warps ? shared[lane] : 0.0f;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
}

template <bool kIsVector, typename T, int kChunks>
__device__ __forceinline__ void load_row(const T* row, int64_t k, Chunk<T> (&chunks)[kChunks]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t column = (int64_t{c} * blockDim.x + threadIdx.x) * kChunk;
    chunks[c] = load_chunk<kIsVector>(row + column, num_valid(column, k));
  }
}

template <typename T, int kChunks, bool kIsVector>
__global__ __launch_bounds__(kMaxThreads<kChunks>) void token_quant_kernel(Matrix matrix,
                                                                           float* scales,
                                                                           float min_amax,
                                                                           const float* max_amax) {
  __shared__ float shared[32];
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  Chunk<T> chunks[kChunks];
  load_row<kIsVector>(static_cast<const T*>(matrix.x) + row * matrix.x_stride, matrix.k, chunks);
  float amax = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) amax = max_or_nan(amax, chunks[c].amax());
  amax = block_reduce(amax, shared, [](float a, float b) { return max_or_nan(a, b); });
  // Not fminf: NaN must stay.
  if (max_amax != nullptr && amax > *max_amax) amax = *max_amax;
  const float scale = scale_of(max_or_nan(amax, min_amax));
  if (threadIdx.x == 0) scales[row] = scale;
  const typename DivisorOf<T>::type divisor(scale);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t column = (int64_t{c} * blockDim.x + threadIdx.x) * kChunk;
    quantise_chunk<kIsVector>(matrix.q + row * matrix.k + column, chunks[c],
                              num_valid(column, matrix.k), divisor);
  }
}

// x + residual rounded to T, in place of both; returns the sum of squares of the result.
template <bool kIsVector, typename T>
__device__ __forceinline__ float add_residual(Chunk<T>& x, T* residual, int valid) {
  if (residual != nullptr) {
    const Chunk<T> before = load_chunk<kIsVector>(residual, valid);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 a = x.pair(i), b = before.pair(i);
      x.set_pair(i, {a.x + b.x, a.y + b.y});
    }
    store_chunk<kIsVector>(residual, x, valid);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 a = x.pair(i);
    sum = __fmaf_rn(a.y, a.y, __fmaf_rn(a.x, a.x, sum));
  }
  return sum;
}

// x * inverse_rms * weight rounded to T.
template <bool kIsVector, typename T>
__device__ __forceinline__ void scale_chunk(Chunk<T>& x, const float* weight, int valid,
                                            float inverse_rms) {
  const Chunk<float> w = load_chunk<kIsVector>(weight, valid);
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 a = x.pair(i), b = w.pair(i);
    x.set_pair(i, {a.x * inverse_rms * b.x, a.y * inverse_rms * b.y});
  }
}

template <typename T, int kChunks, bool kIsVector>
__global__ __launch_bounds__(kMaxThreads<kChunks>) void rms_norm_group_quant_kernel(
    Matrix matrix, RmsNorm norm, GroupScales scales, float inverse_k) {
  __shared__ float shared[32];
  wait_for_inputs();
  const int64_t row = blockIdx.x, k = matrix.k;
  const bool is_filling = row >= matrix.m;  // the same for the whole block
  Chunk<T> chunks[kChunks] = {};
  if (!is_filling) {
    load_row<kIsVector>(static_cast<const T*>(matrix.x) + row * matrix.x_stride, k, chunks);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t column = (int64_t{c} * blockDim.x + threadIdx.x) * kChunk;
      T* residual = static_cast<T*>(norm.residual);
      if (residual != nullptr) residual += row * norm.residual_stride + column;
      sum += add_residual<kIsVector>(chunks[c], residual, num_valid(column, k));
    }
    sum = block_reduce(sum, shared, [](float a, float b) { return a + b; });
    const float inverse_rms = rsqrtf(__fmul_rn(sum, inverse_k) + norm.eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t column = (int64_t{c} * blockDim.x + threadIdx.x) * kChunk;
      scale_chunk<kIsVector>(chunks[c], norm.weight + column, num_valid(column, k), inverse_rms);
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t column = (int64_t{c} * blockDim.x + threadIdx.x) * kChunk;
    float value[1] = {chunks[c].amax()};
    group_scales(value, scales);
    if (!is_filling) {
      const typename DivisorOf<T>::type divisor(value[0]);
      quantise_chunk<kIsVector>(matrix.q + row * k + column, chunks[c], num_valid(column, k),
                                divisor);
    }
    store_scales(scales, matrix.m, row, column, value);
  }
}

// Threads that hold k columns, in whole warps: whole groups, then, lie within warps.
int num_threads(int64_t k, int num_chunks) {
  const int64_t threads = (k + kChunk * num_chunks - 1) / (kChunk * num_chunks);
  return static_cast<int>((threads + 31) / 32 * 32);
}

// Calls f.operator()<T, chunks per thread, is vector>(threads) for the matrix.
template <typename F>
cudaError_t dispatch_rows(const Matrix& matrix, F&& f) {
  if (matrix.k > kMaxRowColumns) return cudaErrorInvalidValue;
  return dispatch(matrix.type, [&]<typename T>() {
    const bool is_short = num_threads(matrix.k, 1) <= kMaxThreads<1>;
    const int threads = num_threads(matrix.k, is_short ? 1 : kManyChunks);
    if (!matrix.is_vector) {
      return f.template operator()<T, kManyChunks, false>(num_threads(matrix.k, kManyChunks));
    }
    return is_short ? f.template operator()<T, 1, true>(threads)
                    : f.template operator()<T, kManyChunks, true>(threads);
  });
}

}  // namespace

cudaError_t launch_token_quant(const Matrix& matrix, float* scales, float min_amax,
                               const float* max_amax, cudaStream_t stream) {
  if (matrix.m == 0) return cudaSuccess;
  if (matrix.m > INT32_MAX) return cudaErrorInvalidConfiguration;
  return dispatch_rows(matrix, [&]<typename T, int kChunks, bool kIsVector>(int threads) {
    const LaunchShape shape = {static_cast<unsigned>(matrix.m), threads};
    return launch(token_quant_kernel<T, kChunks, kIsVector>, shape, stream, matrix, scales,
                  min_amax, max_amax);
  });
}

cudaError_t launch_rms_norm_group_quant(const Matrix& matrix, const RmsNorm& norm,
                                        const GroupScales& scales, cudaStream_t stream) {
  if (scales.num_rows == 0) return cudaSuccess;
  if (scales.num_rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  const float inverse_k = 1.0f / static_cast<float>(matrix.k);
  return dispatch_rows(matrix, [&]<typename T, int kChunks, bool kIsVector>(int threads) {
    const LaunchShape shape = {static_cast<unsigned>(scales.num_rows), threads};
    return launch(rms_norm_group_quant_kernel<T, kChunks, kIsVector>, shape, stream, matrix, norm,
                  scales, inverse_k);
  });
}

}  // namespace vllm::w8a8
