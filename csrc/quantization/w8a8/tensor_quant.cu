// Quantising a whole tensor by one scale: given, or computed by a first pass.
#include "dispatch.cuh"
#include "group_scales.cuh"

namespace vllm::w8a8 {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8;

// Chunks that keep 128 bytes of loads in flight per thread.
template <typename T>
constexpr int kChunks = 8 / sizeof(T);
template <typename T>
constexpr int kTileColumns = kThreads * kChunks<T> * kChunk;

// One tile of a row. Only the last chunk of a row may be partial, and then not in a vector tile.
template <typename T>
struct Tile {
  int64_t row, first_column;
  bool is_vector;

  __device__ __forceinline__ Tile(const Matrix& matrix, int64_t index, int64_t tiles_per_row) {
    row = index / tiles_per_row;
    const int64_t start = index % tiles_per_row * kTileColumns<T>;
    first_column = start + threadIdx.x * kChunk;
    is_vector = matrix.is_vector && (matrix.k % kChunk == 0 || start + kTileColumns<T> <= matrix.k);
  }

  __device__ __forceinline__ int64_t column(int c) const {
    return first_column + int64_t{c} * kThreads * kChunk;
  }

  template <bool kIsVector>
  __device__ __forceinline__ void load(const Matrix& matrix, Chunk<T> (&chunks)[kChunks<T>]) const {
    const T* x = static_cast<const T*>(matrix.x) + row * matrix.x_stride;
#pragma unroll
    for (int c = 0; c < kChunks<T>; ++c) {
      chunks[c] = load_chunk<kIsVector>(x + column(c), num_valid(column(c), matrix.k));
    }
  }
};

template <typename T>
int64_t tiles_per_row(const Matrix& matrix) {
  return (matrix.k + kTileColumns<T> - 1) / kTileColumns<T>;
}

template <bool kIsVector, typename Divisor, typename T>
__device__ __forceinline__ void quantise_tile(const Matrix& matrix, const Tile<T>& tile,
                                              const Divisor& divisor) {
  Chunk<T> chunks[kChunks<T>];
  tile.template load<kIsVector>(matrix, chunks);
#pragma unroll
  for (int c = 0; c < kChunks<T>; ++c) {
    const int64_t column = tile.column(c);
    quantise_chunk<kIsVector>(matrix.q + tile.row * matrix.k + column, chunks[c],
                              num_valid(column, matrix.k), divisor);
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void static_quant_kernel(Matrix matrix, const float* scale,
                                                                int64_t num_tiles,
                                                                int64_t tiles_per_row) {
  // Backwards: after a first pass over the tensor, its end is what L2 still holds.
  const Tile<T> tile(matrix, num_tiles - 1 - blockIdx.x, tiles_per_row);
  const float divisor = *scale;
  if (tile.is_vector && divisor >= SharedDivisor::kMinScale) {
    quantise_tile<true>(matrix, tile, typename DivisorOf<T>::type(divisor));
  } else {  // an edge, or a scale that is tiny, negative, zero or NaN
    quantise_tile<false>(matrix, tile, ExactDivisor(divisor));
  }
}

template <bool kIsVector, typename T>
__device__ __forceinline__ float tile_amax(const Matrix& matrix, const Tile<T>& tile) {
  Chunk<T> chunks[kChunks<T>];
  tile.template load<kIsVector>(matrix, chunks);
  float amax = 0.0f;
#pragma unroll
  for (const Chunk<T>& chunk : chunks) amax = max_or_nan(amax, chunk.amax());
  return amax;
}

// Raises *scale to the scale of the tensor. As x -> max(x, min) / 448 is monotonic, the largest of
// the blocks' scales is the scale of the largest; bits of positive floats, NaN above them, order as
// integers.
template <typename T>
__global__ __launch_bounds__(kThreads) void tensor_scale_kernel(Matrix matrix, float* scale,
                                                                float min_amax, int64_t num_tiles,
                                                                int64_t tiles_per_row) {
  __shared__ float shared[kThreads / 32];
  float amax = 0.0f;
  for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const Tile<T> tile(matrix, index, tiles_per_row);
    amax = max_or_nan(
        amax, tile.is_vector ? tile_amax<true>(matrix, tile) : tile_amax<false>(matrix, tile));
  }
  float largest[1] = {amax};
  group_max(largest, 32);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest[0];
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const float other : shared) amax = max_or_nan(amax, other);
    atomicMax(reinterpret_cast<unsigned*>(scale),
              __float_as_uint(scale_of(max_or_nan(amax, min_amax))));
  }
}

}  // namespace

cudaError_t launch_static_quant(const Matrix& matrix, const float* scale, cudaStream_t stream) {
  return dispatch(matrix.type, [&]<typename T>() {
    const int64_t per_row = tiles_per_row<T>(matrix), num_tiles = per_row * matrix.m;
    if (num_tiles == 0) return cudaSuccess;
    if (num_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
    static_quant_kernel<T><<<static_cast<unsigned>(num_tiles), kThreads, 0, stream>>>(
        matrix, scale, num_tiles, per_row);
    return cudaGetLastError();
  });
}

cudaError_t launch_tensor_quant(const Matrix& matrix, float* scale, float min_amax, int num_sms,
                                cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(scale, 0, sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  const cudaError_t scaled = dispatch(matrix.type, [&]<typename T>() {
    const int64_t per_row = tiles_per_row<T>(matrix), num_tiles = per_row * matrix.m;
    // An empty tensor takes a block too: its scale is that of min_amax.
    const int64_t wanted = num_tiles > 0 ? num_tiles : 1;
    const int64_t most = int64_t{kBlocksPerSm} * num_sms;
    tensor_scale_kernel<T>
        <<<static_cast<unsigned>(wanted < most ? wanted : most), kThreads, 0, stream>>>(
            matrix, scale, min_amax, num_tiles, per_row);
    return cudaGetLastError();
  });
  return scaled != cudaSuccess ? scaled : launch_static_quant(matrix, scale, stream);
}

}  // namespace vllm::w8a8
