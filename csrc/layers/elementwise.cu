// SiLU with its product, and the rows of an embedding: every element is read once.
#include "launch.cuh"
#include "vector.cuh"

namespace vllm::layers {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;

// x / (1 + exp(-x)), its quotient rounded as IEEE division rounds, like torch's own kernel.
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, 1.0f + expf(-x)); }

template <typename T, bool kIsVector>
__global__ __launch_bounds__(kThreads) void silu_and_mul_kernel(SiluArgs args) {
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kWidth;
  const int valid = num_valid(column, args.n);
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride + column;
  float gate[kWidth], up[kWidth];
  load<kIsVector>(x, valid, gate);
  load<kIsVector>(x + args.n, valid, up);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) gate[i] = silu(gate[i]) * up[i];
  store<kIsVector>(static_cast<T*>(args.out) + row * args.out_stride + column, valid, gate);
}

template <typename Unit>
__device__ __forceinline__ Unit all_ones() {
  if constexpr (sizeof(Unit) == 16) {
    return {0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu};
  } else {
    return static_cast<Unit>(~0u);
  }
}

template <typename Unit>
__global__ __launch_bounds__(kThreads) void embedding_kernel(EmbeddingArgs args) {
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  const int64_t offset = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * sizeof(Unit);
  if (offset >= args.row_bytes) return;
  const int64_t id = args.ids[row];
  Unit value = all_ones<Unit>();
  if (id >= 0 && id < args.num_rows) {
    const char* source = static_cast<const char*>(args.weight) + id * args.weight_stride;
    value = *reinterpret_cast<const Unit*>(source + offset);
  }
  char* out = static_cast<char*>(args.out) + row * args.out_stride;
  *reinterpret_cast<Unit*>(out + offset) = value;
}

// A row of blocks for each row of `size` elements, kThreads * per_thread of them to a block.
cudaError_t shape_of(int64_t num_rows, int64_t size, int64_t per_thread, LaunchShape* shape) {
  const int64_t blocks = (size - 1) / (kThreads * per_thread) + 1;
  if (num_rows > INT32_MAX || blocks > kMaxGridY) return cudaErrorInvalidValue;
  *shape = {dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(blocks)), kThreads};
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_silu_and_mul(const SiluArgs& args, cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return cudaSuccess;
  LaunchShape shape;
  const cudaError_t error = shape_of(args.m, args.n, kWidth, &shape);
  if (error != cudaSuccess) return error;
  return dispatch(args.type, [&]<typename T>() {
    return args.is_vector ? launch(silu_and_mul_kernel<T, true>, shape, stream, args)
                          : launch(silu_and_mul_kernel<T, false>, shape, stream, args);
  });
}

cudaError_t launch_embedding(const EmbeddingArgs& args, cudaStream_t stream) {
  if (args.num_ids == 0 || args.row_bytes == 0) return cudaSuccess;
  LaunchShape shape;
  const int64_t unit = args.is_vector ? sizeof(uint4) : sizeof(uint16_t);
  const cudaError_t error = shape_of(args.num_ids, args.row_bytes, unit, &shape);
  if (error != cudaSuccess) return error;
  return args.is_vector ? launch(embedding_kernel<uint4>, shape, stream, args)
                        : launch(embedding_kernel<uint16_t>, shape, stream, args);
}

}  // namespace vllm::layers
