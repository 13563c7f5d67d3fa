#include <tvm/ffi/optional.h>

#include <bit>
#include <cmath>

#include "../quantization/w8a8/fp8_quant.h"
#include "cuda_check.h"
#include "cuda_peers.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;
using w8a8::GroupScales;
using w8a8::Matrix;

constexpr int64_t kVectorElements = 16, kVectorBytes = 16;

w8a8::InputType input_type(const TensorView& x, const char* name) {
  switch (float_type(x, name)) {
    case cpu::ElementType::kFloat32:
      return w8a8::InputType::kFloat32;
    case cpu::ElementType::kBFloat16:
      return w8a8::InputType::kBFloat16;
    default:
      return w8a8::InputType::kFloat16;
  }
}

// x [m, k * columns_per_output] -> q [m, k].
Matrix matrix_of(const TensorView& x, const TensorView& q, int64_t columns_per_output = 1) {
  check_cuda(x, "x", 2);
  check_last_contiguous(x, "x");
  check_cuda(q, "q", 2, x, "x");
  check_contiguous(q, "q");
  VLLM_CHECK(is_type(q, kDLFloat8_e4m3fn, 8),
             "q: given " << type_name(q.dtype()) << "; accepted: float8_e4m3fn");
  Matrix matrix;
  matrix.m = q.size(0), matrix.k = q.size(1);
  VLLM_CHECK(matrix.k >= 1 && matrix.k < INT32_MAX,
             "q: given " << matrix.k << " columns; accepted: 1 to " << INT32_MAX - 1);
  check_size(x, "x", 0, matrix.m, "rows of q");
  check_size(x, "x", 1, matrix.k * columns_per_output,
             columns_per_output == 1 ? "columns of q" : "twice the columns of q");
  matrix.x = data_of(x), matrix.type = input_type(x, "x");
  matrix.x_stride = matrix.m > 1 ? x.stride(0) : x.size(1);
  matrix.q = static_cast<uint8_t*>(data_of(q));
  matrix.is_vector = matrix.k % kVectorElements == 0 && has_aligned_rows(x, kVectorBytes) &&
                     is_aligned(q, kVectorBytes);
  return matrix;
}

// The same; rows that lie back to back are one long row.
Matrix flat_matrix_of(const TensorView& x, const TensorView& q) {
  Matrix matrix = matrix_of(x, q);
  if (matrix.x_stride == matrix.k) {
    matrix.k *= matrix.m, matrix.m = 1, matrix.x_stride = matrix.k;
    matrix.is_vector = is_aligned(x, kVectorBytes) && is_aligned(q, kVectorBytes);
  }
  return matrix;
}

float checked_min_amax(double min_amax) {
  VLLM_CHECK(std::isfinite(min_amax) && min_amax >= w8a8::kMinAmax,
             "min_amax: given " << min_amax << "; accepted: " << w8a8::kMinAmax << " or more");
  return static_cast<float>(min_amax);
}

// A float32 vector of `size` scales.
float* scale_vector(const TensorView& scale, const char* name, const TensorView& x, int64_t size,
                    const char* meaning) {
  check_cuda(scale, name, 1, x, "x");
  check_type(scale, name, kDLFloat, 32);
  check_size(scale, name, 0, size, meaning);
  check_contiguous(scale, name);
  return static_cast<float*>(data_of(scale));
}

// Rows or columns may be apart, but neither overlaps the other.
void check_scale_strides(const TensorView& scales) {
  const int64_t rows = scales.size(0), columns = scales.size(1);
  const int64_t row_stride = scales.stride(0), column_stride = scales.stride(1);
  const bool is_row_major =
      (columns <= 1 || column_stride == 1) && (rows <= 1 || row_stride >= columns);
  const bool is_column_major =
      (rows <= 1 || row_stride == 1) && (columns <= 1 || column_stride >= rows);
  VLLM_CHECK(is_row_major || is_column_major, "scales: given strides "
                                                  << row_stride << ", " << column_stride
                                                  << " for shape " << shape_name(scales)
                                                  << "; accepted: row-major or column-major");
}

// scales: float32 [m, ceil(k / group_size)], or int32 [m, ceil(groups / 4)] of packed exponents;
// with m rounded up to a multiple of four instead, the rows from m on are filled with zeros.
GroupScales group_scales_of(const TensorView& scales, const TensorView& x, const Matrix& matrix,
                            int64_t group_size, double min_amax, bool is_ue8m0) {
  check_cuda(scales, "scales", 2, x, "x");
  GroupScales result;
  result.is_packed = is_type(scales, kDLInt, 32);
  if (!result.is_packed) check_type(scales, "scales", kDLFloat, 32);
  const int64_t most = result.is_packed ? 128 : 512;
  VLLM_CHECK(
      group_size >= 16 && group_size <= most && std::has_single_bit(uint64_t(group_size)),
      "group_size: given " << group_size << "; accepted: a power of two from 16 to " << most);
  VLLM_CHECK(is_ue8m0 || !result.is_packed,
             "is_ue8m0: given False for int32 scales; accepted: True (they hold exponents)");
  result.num_groups = (matrix.k + group_size - 1) / group_size;
  check_size(scales, "scales", 1,
             result.is_packed ? (result.num_groups + 3) / 4 : result.num_groups,
             result.is_packed ? "packs of four groups" : "groups of columns of q");
  result.num_rows = scales.size(0);
  const int64_t padded = (matrix.m + 3) / 4 * 4;
  VLLM_CHECK(result.num_rows == matrix.m || result.num_rows == padded,
             "scales: given shape " << shape_name(scales) << "; accepted: " << matrix.m
                                    << " rows (rows of x), or " << padded << " with filling");
  check_scale_strides(scales);
  result.data = data_of(scales);
  result.row_stride = scales.stride(0), result.group_stride = scales.stride(1);
  result.group_shift = std::countr_zero(uint64_t(group_size));
  result.min_amax = checked_min_amax(min_amax);
  result.is_ue8m0 = is_ue8m0;
  result.is_vector = result.row_stride == 1 && result.num_rows % 4 == 0 &&
                     is_aligned(scales, kVectorBytes) &&
                     (scales.size(1) <= 1 || result.group_stride % 4 == 0);
  return result;
}

// q [m, k] = x / scale [1].
void fp8_quant_static(TensorView x, TensorView scale, TensorView q) {
  const Matrix matrix = flat_matrix_of(x, q);
  const float* given = scale_vector(scale, "scale", x, 1, "one scale for the tensor");
  const DeviceGuard guard(x);
  check_launch(w8a8::launch_static_quant(matrix, given, stream_of(x)), "fp8_quant_static");
}

// scale [1] = max(max|x|, min_amax) / 448, and q = x / scale.
void fp8_quant_tensor(TensorView x, TensorView q, TensorView scale, double min_amax) {
  const Matrix matrix = flat_matrix_of(x, q);
  float* result = scale_vector(scale, "scale", x, 1, "one scale for the tensor");
  const DeviceGuard guard(x);
  check_launch(w8a8::launch_tensor_quant(matrix, result, checked_min_amax(min_amax), num_sms(x),
                                         stream_of(x)),
               "fp8_quant_tensor");
}

// The same for every row, scales [m]; max_amax [1] bounds max|x| of a row from above.
void fp8_quant_token(TensorView x, TensorView q, TensorView scales, double min_amax,
                     Optional<TensorView> max_amax) {
  const Matrix matrix = matrix_of(x, q);
  VLLM_CHECK(matrix.k <= w8a8::kMaxRowColumns,
             "x: given " << matrix.k << " columns; accepted: up to " << w8a8::kMaxRowColumns);
  float* result = scale_vector(scales, "scales", x, matrix.m, "rows of x");
  const float* bound =
      max_amax.has_value() ? scale_vector(*max_amax, "max_amax", x, 1, "one bound") : nullptr;
  const DeviceGuard guard(x);
  check_launch(
      w8a8::launch_token_quant(matrix, result, checked_min_amax(min_amax), bound, stream_of(x)),
      "fp8_quant_token");
}

void quantise_groups(const TensorView& x, const TensorView& q, const TensorView& scales,
                     int64_t group_size, double min_amax, bool is_ue8m0, bool is_gated,
                     const char* name) {
  const Matrix matrix = matrix_of(x, q, is_gated ? 2 : 1);
  const GroupScales layout = group_scales_of(scales, x, matrix, group_size, min_amax, is_ue8m0);
  const DeviceGuard guard(x);
  check_launch(w8a8::launch_group_quant(matrix, layout, is_gated, num_sms(x), stream_of(x)), name);
}

// x [m, k] -> q [m, k], scales as group_scales_of takes them.
void fp8_quant_group(TensorView x, TensorView q, TensorView scales, int64_t group_size,
                     double min_amax, bool is_ue8m0) {
  quantise_groups(x, q, scales, group_size, min_amax, is_ue8m0, false, "fp8_quant_group");
}

// x [m, 2 k] -> the same of silu(x[:, :k]) * x[:, k:].
void silu_and_mul_fp8_quant_group(TensorView x, TensorView q, TensorView scales, int64_t group_size,
                                  double min_amax, bool is_ue8m0) {
  quantise_groups(x, q, scales, group_size, min_amax, is_ue8m0, true,
                  "silu_and_mul_fp8_quant_group");
}

// The norm of x [m, k], whose operands may take from matrix that it is a vector.
w8a8::RmsNorm norm_of(Matrix& matrix, const TensorView& x, const Optional<TensorView>& residual,
                      const TensorView& weight, double eps, const Optional<TensorView>& normed) {
  VLLM_CHECK(matrix.k <= w8a8::kMaxRowColumns,
             "x: given " << matrix.k << " columns; accepted: up to " << w8a8::kMaxRowColumns);
  VLLM_CHECK(std::isfinite(eps) && eps >= 0, "eps: given " << eps << "; accepted: 0 or more");
  w8a8::RmsNorm norm = {};
  norm.weight = scale_vector(weight, "weight", x, matrix.k, "columns of x");
  norm.eps = static_cast<float>(eps);
  matrix.is_vector = matrix.is_vector && is_aligned(weight, kVectorBytes);
  if (residual.has_value()) {
    const TensorView given = *residual;
    check_cuda(given, "residual", 2, x, "x");
    check_size(given, "residual", 0, matrix.m, "rows of x");
    check_size(given, "residual", 1, matrix.k, "columns of x");
    check_same_type(float_type(given, "residual"), given, "residual", float_type(x, "x"), "x");
    check_last_contiguous(given, "residual");
    norm.residual = data_of(given);
    norm.residual_stride = matrix.m > 1 ? given.stride(0) : matrix.k;
    matrix.is_vector = matrix.is_vector && has_aligned_rows(given, kVectorBytes);
  }
  if (normed.has_value()) {
    const TensorView given = *normed;
    check_cuda(given, "normed", 2, x, "x");
    check_size(given, "normed", 0, matrix.m, "rows of x");
    check_size(given, "normed", 1, matrix.k, "columns of x");
    check_same_type(float_type(given, "normed"), given, "normed", float_type(x, "x"), "x");
    check_contiguous(given, "normed");
    norm.normed = data_of(given);
    matrix.is_vector = matrix.is_vector && is_aligned(given, kVectorBytes);
  }
  return norm;
}

// x [m, k] -> the same of rms_norm(x); with a residual [m, k], residual += x first and its norm.
// normed [m, k] receives what is quantised.
void rms_norm_fp8_quant_group(TensorView x, Optional<TensorView> residual, TensorView weight,
                              double eps, Optional<TensorView> normed, TensorView q,
                              TensorView scales, int64_t group_size, double min_amax,
                              bool is_ue8m0) {
  Matrix matrix = matrix_of(x, q);
  const w8a8::RmsNorm norm = norm_of(matrix, x, residual, weight, eps, normed);
  const GroupScales layout = group_scales_of(scales, x, matrix, group_size, min_amax, is_ue8m0);
  const DeviceGuard guard(x);
  check_launch(w8a8::launch_rms_norm_group_quant(matrix, norm, layout, stream_of(x)),
               "rms_norm_fp8_quant_group");
}

// The same of the sum of x over the ranks, with a residual.
void peer_sum_rms_norm_fp8_quant_group(TensorView x, TensorView residual, TensorView weight,
                                       double eps, Optional<TensorView> normed, TensorView q,
                                       TensorView scales, int64_t group_size, double min_amax,
                                       bool is_ue8m0, TensorView inboxes, int64_t rank,
                                       TensorView rounds) {
  Matrix matrix = matrix_of(x, q);
  const w8a8::RmsNorm norm = norm_of(matrix, x, residual, weight, eps, normed);
  const GroupScales layout = group_scales_of(scales, x, matrix, group_size, min_amax, is_ue8m0);
  const layers::Peers peers = peers_of(x, inboxes, rank, rounds);
  VLLM_CHECK(matrix.is_vector && matrix.k <= w8a8::kMaxPeerNormColumns,
             "x: given rows of " << matrix.k << "; accepted: multiples of 16 up to "
                                 << w8a8::kMaxPeerNormColumns
                                 << ", 16-byte aligned in all operands");
  const DeviceGuard guard(x);
  check_launch(w8a8::launch_peer_norm_quant(matrix, norm, layout, peers, stream_of(x)),
               "peer_sum_rms_norm_fp8_quant_group");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quant_static, fp8_quant_static);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quant_tensor, fp8_quant_tensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quant_token, fp8_quant_token);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quant_group, fp8_quant_group);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul_fp8_quant_group, silu_and_mul_fp8_quant_group);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fp8_quant_group, rms_norm_fp8_quant_group);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_sum_rms_norm_fp8_quant_group, peer_sum_rms_norm_fp8_quant_group);

}  // namespace vllm
