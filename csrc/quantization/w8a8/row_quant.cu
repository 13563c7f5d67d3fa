// Quantising rows that one block holds in registers: what must see a whole row before it writes.
#include <algorithm>

#include "../../launch.cuh"
#include "dispatch.cuh"
#include "row_norm.cuh"

namespace vllm::w8a8 {
namespace {

template <bool kIsVector, typename T, int kChunks>
__device__ __forceinline__ void load_row(const T* row, int64_t k, int thread,
                                         Chunk<T> (&chunks)[kChunks]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t column = column_of(thread, c);
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
  const int thread = threadIdx.x;
  Chunk<T> chunks[kChunks];
  load_row<kIsVector>(static_cast<const T*>(matrix.x) + row * matrix.x_stride, matrix.k, thread,
                      chunks);
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
    const int64_t column = column_of(thread, c);
    quantise_chunk<kIsVector>(matrix.q + row * matrix.k + column, chunks[c],
                              num_valid(column, matrix.k), divisor);
  }
}

// Where the norm's weight is once the sum of a row is known. Registers and shared memory are filled
// while the first row is on its way, so that the weight is not waited for after it.
//   kRegisters  few rows, one to a block: a thread's chunk takes registers that would halve the
//               threads of a multiprocessor, which few rows leave idle anyway, while shared memory
//               stays free for a GEMM that starts early.
//   kShared     many rows, several to a block, which fetches the weight once. Lanes that read 16
//               bytes beside each other touch 4 lines at a time; with 64 each they touch 16.
//   kGlobal     what is not aligned, or too wide for a chunk per thread: fetched for every row.
enum class WeightIn { kGlobal, kRegisters, kShared };

extern __shared__ uint4 weight_units[];  // of four columns

// Neighbouring lanes, whose chunks are four units, read from different banks.
__device__ __forceinline__ int place_of_unit(int unit) { return unit ^ (unit >> 3 & 3); }

__device__ __forceinline__ void begin_to_share_weight(const float* weight, int64_t k) {
  for (int unit = threadIdx.x; unit < k / 4; unit += blockDim.x) {
    copy_async(&weight_units[place_of_unit(unit)], weight + 4 * unit);
  }
}

// x * inverse_rms * weight rounded to T, four columns after four: there are no registers for more.
template <typename T>
__device__ __forceinline__ void scale_by_shared_weight(Chunk<T>& x, int thread, int valid,
                                                       float inverse_rms) {
  if (valid == 0) return;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kWords; ++i) forget(x.words[i]);
  const int place = place_of_unit(thread * (kChunk / 4));
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    const uint4 unit = weight_units[place ^ i];
    const float2 a = x.pair(2 * i), b = x.pair(2 * i + 1);
    x.set_pair(2 * i, {a.x * inverse_rms * __uint_as_float(unit.x),
                       a.y * inverse_rms * __uint_as_float(unit.y)});
    x.set_pair(2 * i + 1, {b.x * inverse_rms * __uint_as_float(unit.z),
                           b.y * inverse_rms * __uint_as_float(unit.w)});
  }
}

// Norms a row that exists. `shared` is not the one of the row before, which may still be read.
template <WeightIn kWeightIn, bool kIsVector, typename T, int kChunks>
__device__ __forceinline__ void norm_row(Chunk<T> (&chunks)[kChunks], const Matrix& matrix,
                                         const RmsNorm& norm, int64_t row, int thread,
                                         float inverse_k, const Chunk<float>& own_weight,
                                         float* shared) {
  const int64_t k = matrix.k;
  load_row<kIsVector>(static_cast<const T*>(matrix.x) + row * matrix.x_stride, k, thread, chunks);
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t column = column_of(thread, c);
    T* residual = static_cast<T*>(norm.residual);
    if (residual != nullptr) residual += row * norm.residual_stride + column;
    sum += add_residual<kIsVector>(chunks[c], residual, num_valid(column, k));
  }
  if constexpr (kWeightIn == WeightIn::kShared) wait_for_copies();
  sum = block_reduce(sum, shared, [](float a, float b) { return a + b; });
  const float inverse_rms = rsqrtf(__fmul_rn(sum, inverse_k) + norm.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t column = column_of(thread, c);
    const int valid = num_valid(column, k);
    if constexpr (kWeightIn == WeightIn::kGlobal) {
      scale_chunk(chunks[c], load_chunk<kIsVector>(norm.weight + column, valid), inverse_rms);
    } else if constexpr (kWeightIn == WeightIn::kShared) {
      scale_by_shared_weight(chunks[c], thread, valid, inverse_rms);
    } else {
      scale_chunk(chunks[c], own_weight, inverse_rms);
    }
    if (norm.normed == nullptr) continue;
    store_chunk<kIsVector>(static_cast<T*>(norm.normed) + row * k + column, chunks[c], valid);
  }
}

// Of 1,024 threads on a multiprocessor: as many threads as it can run leave each 32 registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1200
template <typename T, WeightIn kWeightIn>
constexpr int kMinBlocks = kWeightIn == WeightIn::kShared && sizeof(T) == 2 ? 2 : 0;
#else
template <typename T, WeightIn kWeightIn>
constexpr int kMinBlocks = 0;  // chips of 12.x run 1,536 threads, for which there are more
#endif

template <typename T, int kChunks, bool kIsVector, WeightIn kWeightIn>
__global__ __launch_bounds__(
    kMaxThreads<kChunks>,
    kMinBlocks<T, kWeightIn>) void rms_norm_group_quant_kernel(Matrix matrix, RmsNorm norm,
                                                               GroupScales scales,
                                                               float inverse_k) {
  static_assert(kWeightIn == WeightIn::kGlobal || (kChunks == 1 && kIsVector));
  __shared__ float shared[2][32];
  wait_for_inputs();
  Chunk<float> own_weight = {};
  if constexpr (kWeightIn == WeightIn::kRegisters) {
    const int64_t column = column_of(threadIdx.x, 0);
    own_weight = load_chunk<true>(norm.weight + column, num_valid(column, matrix.k));
  }
  if constexpr (kWeightIn == WeightIn::kShared) {
    if (blockIdx.x < matrix.m) begin_to_share_weight(norm.weight, matrix.k);
  }
  const auto run = [&](int64_t row, int thread, float* sums) {
    Chunk<T> chunks[kChunks] = {};
    if (row < matrix.m) {  // the same for the whole block
      norm_row<kWeightIn, kIsVector>(chunks, matrix, norm, row, thread, inverse_k, own_weight,
                                     sums);
    }
    quantise_row<kIsVector>(chunks, matrix, scales, row, thread);
  };
  if constexpr (kWeightIn == WeightIn::kShared) {
    int turn = 0;
#pragma unroll 1
    for (unsigned row = blockIdx.x; row < scales.num_rows; row += gridDim.x, turn ^= 1) {
      int thread = threadIdx.x;
      forget(thread);  // or what follows from it takes registers through all rows, and some spill
      run(row, thread, shared[turn]);
    }
  } else {
    run(blockIdx.x, threadIdx.x, shared[0]);
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

constexpr size_t kUsualSharedBytes = (48 << 10) - 256;  // beside the kernel's own

template <typename T, int kChunks, bool kIsVector, WeightIn kWeightIn>
cudaError_t launch_norm(const Matrix& matrix, const RmsNorm& norm, const GroupScales& scales,
                        int threads, int num_sms, cudaStream_t stream) {
  const auto kernel = rms_norm_group_quant_kernel<T, kChunks, kIsVector, kWeightIn>;
  LaunchShape shape = {{}, threads};
  int64_t blocks = scales.num_rows;
  if constexpr (kWeightIn == WeightIn::kShared) {
    shape.shared_bytes = static_cast<size_t>(matrix.k) * sizeof(float);
    if (shape.shared_bytes > kUsualSharedBytes) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes));
      if (error != cudaSuccess) return error;
    }
    int num_resident = 0;  // on a multiprocessor
    const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &num_resident, kernel, threads, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    blocks = std::min(blocks, int64_t{num_sms} * std::max(num_resident, 1));
  }
  shape.grid = dim3(static_cast<unsigned>(blocks));
  const float inverse_k = 1.0f / static_cast<float>(matrix.k);
  return launch(kernel, shape, stream, matrix, norm, scales, inverse_k);
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
  int num_sms = 0;
  const cudaError_t error = device_attribute<cudaDevAttrMultiProcessorCount>(&num_sms);
  if (error != cudaSuccess) return error;
  return dispatch_rows(matrix, [&]<typename T, int kChunks, bool kIsVector>(int threads) {
    if constexpr (kChunks == 1 && kIsVector) {
      const bool is_few = scales.num_rows * threads <= int64_t{num_sms} * kMaxThreads<1>;
      const auto launch_held = is_few ? launch_norm<T, 1, true, WeightIn::kRegisters>
                                      : launch_norm<T, 1, true, WeightIn::kShared>;
      return launch_held(matrix, norm, scales, threads, num_sms, stream);
    } else {
      return launch_norm<T, kChunks, kIsVector, WeightIn::kGlobal>(matrix, norm, scales, threads,
                                                                   num_sms, stream);
    }
  });
}

}  // namespace vllm::w8a8
