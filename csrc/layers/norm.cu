// RMSNorm of rows held in registers between the sum and the product, by some lanes of a warp (heads
// of q and k) or by a block (hidden states).
#include "launch.cuh"
#include "vector.cuh"

namespace vllm::layers {
namespace {

constexpr int kWarpThreads = 128;  // of blocks whose warps hold whole rows
constexpr int kManyChunks = 4;
// Beyond one chunk a thread needs more than the 64 registers that 1024 threads can have.
template <int kChunks>
constexpr int kMaxThreads = kChunks == 1 ? 1024 : kMaxNormDim / kWidth / kManyChunks;

template <typename T>
__device__ __forceinline__ T* row_of(const Heads& heads, unsigned row) {
  const unsigned num_heads = static_cast<unsigned>(heads.num_heads);
  return static_cast<T*>(heads.data) + row / num_heads * heads.token_stride +
         row % num_heads * heads.head_stride;
}

// num_lanes: threads per row, where they are fewer than the block's.
template <typename T, int kChunks, bool kIsBlock, bool kIsVector>
__global__ __launch_bounds__(kMaxThreads<kChunks>) void rms_norm_kernel(NormArgs args,
                                                                        unsigned num_rows,
                                                                        int num_lanes) {
  __shared__ float shared[32];
  wait_for_inputs();
  if constexpr (kIsBlock) num_lanes = blockDim.x;
  const unsigned row =
      kIsBlock ? blockIdx.x : blockIdx.x * (blockDim.x / num_lanes) + threadIdx.x / num_lanes;
  const bool is_row = row < num_rows;  // a block's last rows may be none
  const int lane = threadIdx.x % num_lanes;
  const T* x = is_row ? row_of<T>(args.x, row) : nullptr;
  T* residual = is_row && args.residual.data != nullptr ? row_of<T>(args.residual, row) : nullptr;
  float values[kChunks][kWidth], weight[kChunks][kWidth];
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * num_lanes + lane) * kWidth;
    const int valid = is_row ? num_valid(column, args.dim) : 0;
    load<kIsVector>(x + column, valid, values[c]);
    load<kIsVector>(args.weight + column, valid, weight[c]);
    if (residual != nullptr) {
      float before[kWidth];
      load<kIsVector>(residual + column, valid, before);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[c][i] += before[i];
      round_to<T>(values[c]);
      store<kIsVector>(residual + column, valid, values[c]);
    }
    sum = sum_of_squares(values[c], sum);
  }
  if constexpr (kIsBlock) {
    sum = sum_over_block(sum, shared);
  } else {
    sum = sum_over_lanes(sum, num_lanes);
  }
  const float factor = inverse_rms(sum, args.dim, args.eps);
  T* out = is_row ? row_of<T>(args.out, row) : nullptr;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * num_lanes + lane) * kWidth;
    scale(values[c], factor, weight[c]);
    store<kIsVector>(out + column, is_row ? num_valid(column, args.dim) : 0, values[c]);
  }
}

// Threads that hold one row, in whole warps.
int threads_for(int64_t dim, int num_chunks) {
  const int64_t threads = (dim + kWidth * num_chunks - 1) / (kWidth * num_chunks);
  return static_cast<int>((threads + 31) / 32 * 32);
}

template <typename T, bool kIsVector>
cudaError_t launch_typed(const NormArgs& args, unsigned num_rows, cudaStream_t stream) {
  if (args.dim <= 32 * kWidth) {
    const int lanes = lanes_for(args.dim), rows_per_block = kWarpThreads / lanes;
    const unsigned blocks = (num_rows - 1) / rows_per_block + 1;
    return launch(rms_norm_kernel<T, 1, false, kIsVector>, {blocks, kWarpThreads}, stream, args,
                  num_rows, lanes);
  }
  if (const int threads = threads_for(args.dim, 1); threads <= kMaxThreads<1>) {
    return launch(rms_norm_kernel<T, 1, true, kIsVector>, {num_rows, threads}, stream, args,
                  num_rows, threads);
  }
  const int threads = threads_for(args.dim, kManyChunks);
  return launch(rms_norm_kernel<T, kManyChunks, true, kIsVector>, {num_rows, threads}, stream, args,
                num_rows, threads);
}

}  // namespace

cudaError_t launch_rms_norm(const NormArgs& args, cudaStream_t stream) {
  const int64_t num_rows = args.num_tokens * args.x.num_heads;
  if (num_rows == 0 || args.dim == 0) return cudaSuccess;
  if (num_rows > INT32_MAX || args.dim > kMaxNormDim) return cudaErrorInvalidValue;
  return dispatch(args.type, [&]<typename T>() {
    return args.is_vector ? launch_typed<T, true>(args, static_cast<unsigned>(num_rows), stream)
                          : launch_typed<T, false>(args, static_cast<unsigned>(num_rows), stream);
  });
}

}  // namespace vllm::layers
