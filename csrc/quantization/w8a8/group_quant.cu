// Quantising per row and group of columns, plainly or after silu(gate) * up.
#include "../../launch.cuh"
#include "dispatch.cuh"
#include "group_scales.cuh"

namespace vllm::w8a8 {
namespace {

constexpr int kWarps = 4;
constexpr int kWarpColumns = 32 * kChunk;  // one warp: 512 columns of kRows rows

// Rows that keep 128 bytes of loads in flight per thread.
template <typename T, bool kIsGated>
constexpr int rows_in_flight() {
  return 8 / sizeof(T) / (kIsGated ? 2 : 1);
}

// The chunks at `column` of rows row, row + 1 ... of what is quantised.
template <int kRows, bool kIsGated, bool kIsVector, typename T>
__device__ __forceinline__ void load_rows(Chunk<T> (&chunks)[kRows], const Matrix& matrix,
                                          int64_t row, int column, int valid) {
  const T* x = static_cast<const T*>(matrix.x) + row * matrix.x_stride + column;
  Chunk<T> up[kIsGated ? kRows : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int present = row + r < matrix.m ? valid : 0;
    chunks[r] = load_chunk<kIsVector>(x + r * matrix.x_stride, present);
    if constexpr (kIsGated) {
      up[r] = load_chunk<kIsVector>(x + r * matrix.x_stride + matrix.k, present);
    }
  }
  if constexpr (kIsGated) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) chunks[r] = silu_and_mul(chunks[r], up[r]);
  }
}

// Blocks of a row of the grid lie along the columns: what runs together reads whole rows.
template <typename T, int kRows, bool kIsGated, bool kIsVector>
__global__ __launch_bounds__(32 * kWarps) void group_quant_kernel(Matrix matrix,
                                                                  GroupScales scales) {
  wait_for_inputs();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * kWarpColumns + lane * kChunk;
  const int valid = num_valid(column, matrix.k);
  for (int64_t row = (int64_t{blockIdx.y} * kWarps + warp) * kRows; row < scales.num_rows;
       row += int64_t{gridDim.y} * kWarps * kRows) {
    Chunk<T> chunks[kRows];
    load_rows<kRows, kIsGated, kIsVector>(chunks, matrix, row, column, valid);
    float values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[r] = chunks[r].amax();
    group_scales(values, scales);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const typename DivisorOf<T>::type divisor(values[r]);
      quantise_chunk<kIsVector>(matrix.q + (row + r) * matrix.k + column, chunks[r],
                                row + r < matrix.m ? valid : 0, divisor);
    }
    store_scales(scales, matrix.m, row, column, values);
  }
}

template <typename T, int kRows, bool kIsGated, bool kIsVector>
cudaError_t launch_rows(const Matrix& matrix, const GroupScales& scales, cudaStream_t stream) {
  constexpr int64_t kMaxGridRows = 65535;
  const int64_t column_tiles = (matrix.k + kWarpColumns - 1) / kWarpColumns;
  const int64_t row_tiles = (scales.num_rows + kWarps * kRows - 1) / (kWarps * kRows);
  if (row_tiles == 0) return cudaSuccess;
  const dim3 grid(column_tiles, row_tiles < kMaxGridRows ? row_tiles : kMaxGridRows);
  return launch(group_quant_kernel<T, kRows, kIsGated, kIsVector>, {grid, 32 * kWarps}, stream,
                matrix, scales);
}

template <typename T, bool kIsGated>
cudaError_t launch_typed(const Matrix& matrix, const GroupScales& scales, int num_sms,
                         cudaStream_t stream) {
  if (!matrix.is_vector) return launch_rows<T, 1, kIsGated, false>(matrix, scales, stream);
  // Rows are taken together where that still leaves every multiprocessor two blocks.
  constexpr int kRows = rows_in_flight<T, kIsGated>();
  const int64_t num_warps = (matrix.k + kWarpColumns - 1) / kWarpColumns * matrix.m / kRows;
  if (num_warps >= int64_t{2} * kWarps * num_sms) {
    return launch_rows<T, kRows, kIsGated, true>(matrix, scales, stream);
  }
  return launch_rows<T, 1, kIsGated, true>(matrix, scales, stream);
}

}  // namespace

cudaError_t launch_group_quant(const Matrix& matrix, const GroupScales& scales, bool is_gated,
                               int num_sms, cudaStream_t stream) {
  return dispatch(matrix.type, [&]<typename T>() {
    return is_gated ? launch_typed<T, true>(matrix, scales, num_sms, stream)
                    : launch_typed<T, false>(matrix, scales, num_sms, stream);
  });
}

}  // namespace vllm::w8a8
