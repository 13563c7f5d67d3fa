// Quantising rows that one block holds in registers: what must see a whole row before it writes.
#include <algorithm>

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
// number of threads alone. What threads wrote before it, all may read after it. A thread calls
// `meanwhile` when its warp has its value and it waits for the others.
template <typename Combine, typename Meanwhile>
__device__ __forceinline__ float block_reduce(float value, float* shared, Combine combine,
                                              Meanwhile meanwhile) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  meanwhile();
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
  amax = block_reduce(amax, shared, [](float a, float b) { return max_or_nan(a, b); }, [] {});
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

// x + residual rounded to T, in place of x.
template <typename T>
__device__ __forceinline__ void add(Chunk<T>& x, const Chunk<T>& residual) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 a = x.pair(i), b = residual.pair(i);
    x.set_pair(i, {a.x + b.x, a.y + b.y});
  }
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
  if (valid == 0) {
    x = {};  // as it was: said again, it takes no registers until now
    return;
  }
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

// Behind the weight lie x and the residual of the row that a block comes to next, where they are
// asked for ahead: each thread's two units of its own chunk, apart, so that lanes read side by
// side.
constexpr int kUnitsPerChunk = 2;

__device__ __forceinline__ uint4* place_ahead(int64_t k, int thread, bool is_residual) {
  return weight_units + k / 4 + is_residual * kUnitsPerChunk * blockDim.x + thread;
}

// A thread asks for its own chunks alone, when it has used those of the row before.
template <typename T>
__device__ __forceinline__ void ask_for_row(const Matrix& matrix, const RmsNorm& norm, int64_t row,
                                            int thread) {
  const int64_t column = column_of(thread, 0);
  if (column >= matrix.k) return;
  const auto ask = [&](const T* source, bool is_residual) {
    uint4* place = place_ahead(matrix.k, thread, is_residual);
#pragma unroll
    for (int i = 0; i < kUnitsPerChunk; ++i) {
      copy_own_async(place + i * blockDim.x, reinterpret_cast<const uint4*>(source) + i);
    }
  };
  ask(static_cast<const T*>(matrix.x) + row * matrix.x_stride + column, false);
  if (norm.residual == nullptr) return;
  ask(static_cast<const T*>(norm.residual) + row * norm.residual_stride + column, true);
}

template <typename T>
__device__ __forceinline__ Chunk<T> take_chunk(int64_t k, int thread, int valid, bool is_residual) {
  static_assert(Chunk<T>::kWords == 4 * kUnitsPerChunk);
  Chunk<T> chunk = {};
  if (valid == 0) return chunk;
  const uint4* place = place_ahead(k, thread, is_residual);
#pragma unroll
  for (int i = 0; i < kUnitsPerChunk; ++i) {
    const uint4 unit = place[i * blockDim.x];
    chunk.words[4 * i] = unit.x, chunk.words[4 * i + 1] = unit.y;
    chunk.words[4 * i + 2] = unit.z, chunk.words[4 * i + 3] = unit.w;
  }
  return chunk;
}

// Norms a row that exists. `shared` is not the one of the row before, which may still be read.
// kIsAhead: the row was asked for, and `next_row` is asked for if it exists.
template <WeightIn kWeightIn, bool kIsVector, bool kIsAhead, typename T, int kChunks>
__device__ __forceinline__ void norm_row(Chunk<T> (&chunks)[kChunks], const Matrix& matrix,
                                         const RmsNorm& norm, int64_t row, int64_t next_row,
                                         int thread, float inverse_k,
                                         const Chunk<float>& own_weight, float* shared) {
  const int64_t k = matrix.k;
  if constexpr (kIsAhead) {
    wait_for_copies();
    chunks[0] = take_chunk<T>(k, thread, num_valid(column_of(thread, 0), k), false);
  } else {
    load_row<kIsVector>(static_cast<const T*>(matrix.x) + row * matrix.x_stride, k, thread, chunks);
  }
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (norm.residual != nullptr) {
      const int64_t column = column_of(thread, c);
      const int valid = num_valid(column, k);
      T* residual = static_cast<T*>(norm.residual) + row * norm.residual_stride + column;
      if constexpr (kIsAhead) {
        add(chunks[c], take_chunk<T>(k, thread, valid, true));
      } else {
        add(chunks[c], load_chunk<kIsVector>(residual, valid));
      }
      store_chunk<kIsVector>(residual, chunks[c], valid);
    }
    sum += sum_of_squares(chunks[c]);
  }
  if constexpr (kWeightIn == WeightIn::kShared && !kIsAhead) wait_for_copies();
  sum = block_reduce(
      sum, shared, [](float a, float b) { return a + b; },
      [&] {
        if constexpr (kIsAhead) {
          if (next_row < matrix.m) ask_for_row<T>(matrix, norm, next_row, thread);
        }
      });
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

// Of 1,024 threads on a multiprocessor: as many threads as it can run leave each 32 registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1200
template <typename T, WeightIn kWeightIn>
constexpr int kMinBlocks = kWeightIn == WeightIn::kShared && sizeof(T) == 2 ? 2 : 0;
#else
template <typename T, WeightIn kWeightIn>
constexpr int kMinBlocks = 0;  // chips of 12.x run 1,536 threads, for which there are more
#endif

template <typename T, int kChunks, bool kIsVector, WeightIn kWeightIn, bool kIsAhead>
__global__ __launch_bounds__(
    kMaxThreads<kChunks>,
    kMinBlocks<T, kWeightIn>) void rms_norm_group_quant_kernel(Matrix matrix, RmsNorm norm,
                                                               GroupScales scales,
                                                               float inverse_k) {
  static_assert(kWeightIn == WeightIn::kGlobal || (kChunks == 1 && kIsVector));
  static_assert(!kIsAhead || kWeightIn == WeightIn::kShared);
  __shared__ float shared[2][32];
  wait_for_inputs();
  Chunk<float> own_weight = {};
  if constexpr (kWeightIn == WeightIn::kRegisters) {
    const int64_t column = column_of(threadIdx.x, 0);
    own_weight = load_chunk<true>(norm.weight + column, num_valid(column, matrix.k));
  }
  if constexpr (kWeightIn == WeightIn::kShared) {
    if (blockIdx.x < matrix.m) {
      if constexpr (kIsAhead) ask_for_row<T>(matrix, norm, blockIdx.x, threadIdx.x);
      begin_to_share_weight(norm.weight, matrix.k);
    }
  }
  const auto run = [&](int64_t row, int thread, float* sums) {
    Chunk<T> chunks[kChunks] = {};
    if (row < matrix.m) {  // the same for the whole block
      norm_row<kWeightIn, kIsVector, kIsAhead>(chunks, matrix, norm, row, row + gridDim.x, thread,
                                               inverse_k, own_weight, sums);
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
// What a multiprocessor must still run where rows that are asked for ahead take shared memory:
// fewer would not keep it busy. Estimated.
constexpr int kMinThreadsAhead = 1280;

// How many blocks of a kernel a multiprocessor runs at a time; none where it has not the memory.
template <typename Kernel>
cudaError_t count_resident(Kernel kernel, int threads, size_t shared_bytes, int* result) {
  *result = 0;
  if (shared_bytes > kUsualSharedBytes) {
    int most_shared = 0;
    cudaError_t error = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&most_shared);
    if (error != cudaSuccess || shared_bytes + 256 > static_cast<size_t>(most_shared)) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(result, kernel, threads, shared_bytes);
}

template <typename T, int kChunks, bool kIsVector, WeightIn kWeightIn, bool kIsAhead = false>
cudaError_t launch_norm(const Matrix& matrix, const RmsNorm& norm, const GroupScales& scales,
                        int threads, int num_sms, cudaStream_t stream) {
  const auto kernel = rms_norm_group_quant_kernel<T, kChunks, kIsVector, kWeightIn, kIsAhead>;
  LaunchShape shape = {{}, threads};
  int64_t blocks = scales.num_rows;
  if constexpr (kWeightIn == WeightIn::kShared) {
    shape.shared_bytes = static_cast<size_t>(matrix.k) * sizeof(float);
    if constexpr (kIsAhead) {
      const int num_rows = norm.residual == nullptr ? 1 : 2;
      shape.shared_bytes += num_rows * kUnitsPerChunk * sizeof(uint4) * threads;
    }
    int num_resident = 0;
    const cudaError_t error = count_resident(kernel, threads, shape.shared_bytes, &num_resident);
    if (error != cudaSuccess) return error;
    if constexpr (kIsAhead) {
      if (num_resident * threads < kMinThreadsAhead) {
        return launch_norm<T, kChunks, kIsVector, kWeightIn>(matrix, norm, scales, threads, num_sms,
                                                             stream);
      }
    }
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
      const int64_t wanted = scales.num_rows * threads, held = int64_t{num_sms} * kMaxThreads<1>;
      auto launch_held = launch_norm<T, 1, true, WeightIn::kShared>;
      if (wanted <= held) {
        launch_held = launch_norm<T, 1, true, WeightIn::kRegisters>;
      } else if (wanted > 2 * held) {  // blocks come to a second row
        launch_held = launch_norm<T, 1, true, WeightIn::kShared, sizeof(T) == 2>;
      }
      return launch_held(matrix, norm, scales, threads, num_sms, stream);
    } else {
      return launch_norm<T, kChunks, kIsVector, WeightIn::kGlobal>(matrix, norm, scales, threads,
                                                                   num_sms, stream);
    }
  });
}

}  // namespace vllm::w8a8
