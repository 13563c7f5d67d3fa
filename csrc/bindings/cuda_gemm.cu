#include <tvm/ffi/extra/c_env_api.h>

#include "../gemm/skinny_fp8_block.h"
#include "cuda_check.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;

void skinny_gemm(TensorView x, Optional<TensorView> x_scales, TensorView weight, TensorView scales,
                 Optional<TensorView> column_scales, Optional<TensorView> bias, TensorView out,
                 int64_t row_tiles, int64_t warps) {
  check_cuda(x, "x", 2);
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0);
  gemm::SkinnyArgs args = {};
  VLLM_CHECK(m <= gemm::kMaxSkinnyTokens,
             "x: given " << m << " rows; accepted: at most " << gemm::kMaxSkinnyTokens);
  VLLM_CHECK(k % 16 == 0, "x: given " << k << " columns; accepted: a multiple of 16");
  const bool is_bf16 = is_type(out, kDLBfloat, 16);
  VLLM_CHECK(is_bf16 || is_type(out, kDLFloat, 16),
             "out: given " << type_name(out.dtype()) << "; accepted: bfloat16, float16");
  if (x_scales.has_value()) {
    const TensorView given = x_scales.value();
    check_cuda(given, "x_scales", 2, x, "x");
    check_type(given, "x_scales", kDLFloat, 32);
    check_size(given, "x_scales", 0, m, "rows of x");
    check_size(given, "x_scales", 1, (k + 127) / 128, "blocks of 128 columns of x");
    check_apart(out, "out", given, "x_scales");
    check_type(x, "x", kDLFloat8_e4m3fn, 8);
    args.x_scales = static_cast<const float*>(data_of(given));
    args.x_scales_ld = given.stride(0), args.x_scales_ldk = given.stride(1);
  } else {
    check_type(x, "x", is_bf16 ? kDLBfloat : kDLFloat, 16);
  }
  check_rows(x, "x", 16);
  check_cuda(weight, "weight", 2, x, "x");
  VLLM_CHECK(is_type(weight, kDLFloat8_e4m3fn, 8),
             "weight: given " << type_name(weight.dtype()) << "; accepted: float8_e4m3fn");
  check_size(weight, "weight", 1, k, "columns of x");
  check_rows(weight, "weight", 16);
  check_cuda(scales, "scales", 2, x, "x");
  check_type(scales, "scales", kDLFloat, 32);
  check_size(scales, "scales", 0, (n + 127) / 128, "blocks of 128 rows of weight");
  check_size(scales, "scales", 1, (k + 127) / 128, "blocks of 128 columns of weight");
  check_last_contiguous(scales, "scales");
  check_cuda(out, "out", 2, x, "x");
  check_size(out, "out", 0, m, "rows of x");
  check_size(out, "out", 1, n, "rows of weight");
  check_own_rows(out, "out");
  check_apart(out, "out", x, "x");
  check_apart(out, "out", weight, "weight");
  check_apart(out, "out", scales, "scales");
  args.column_scales = check_columns(column_scales, "column_scales", out);
  args.bias = check_columns(bias, "bias", out);
  args.x = data_of(x);
  args.weight = static_cast<const uint8_t*>(data_of(weight));
  args.scales = static_cast<const float*>(data_of(scales));
  args.out = data_of(out);
  args.m = static_cast<int>(m), args.n = static_cast<int>(n), args.k = static_cast<int>(k);
  args.ldx = x.stride(0), args.ldw = weight.stride(0);
  args.lds = scales.stride(0), args.ldo = out.stride(0);
  gemm::SkinnyShape shape = gemm::skinny_shape(args.m, args.n, x_scales.has_value(), num_sms(x));
  if (row_tiles > 0) shape.row_tiles = static_cast<int>(row_tiles);
  if (warps > 0) shape.warps = static_cast<int>(warps);
  const DeviceGuard guard(x);
  check_launch(gemm::launch_skinny_fp8_block(args, is_bf16, shape, stream_of(x)),
               "skinny_fp8_block_gemm");
}

// out [m, n] = fp8(x [m, k]) * weight [n, k]^T (+ bias [n]), m <= 16. scales float32
// [ceil(n / 128), ceil(k / 128)]. x in E4M3 comes with x_scales float32 [m, ceil(k / 128)].
// row_tiles and warps: 0 for the measured choice.
void skinny_fp8_block_gemm(TensorView x, Optional<TensorView> x_scales, TensorView weight,
                           TensorView scales, Optional<TensorView> bias, TensorView out,
                           int64_t row_tiles, int64_t warps) {
  skinny_gemm(x, x_scales, weight, scales, {}, bias, out, row_tiles, warps);
}

// The same of x in E4M3 with columns of the product multiplied by column_scales, float32 [n],
// before the bias: for weights with a scale for each row.
void skinny_fp8_channel_gemm(TensorView x, TensorView x_scales, TensorView weight,
                             TensorView scales, TensorView column_scales, Optional<TensorView> bias,
                             TensorView out) {
  skinny_gemm(x, x_scales, weight, scales, column_scales, bias, out, 0, 0);
}

}  // namespace
}  // namespace vllm

TVM_FFI_DLL_EXPORT_TYPED_FUNC(skinny_fp8_block_gemm, vllm::skinny_fp8_block_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(skinny_fp8_channel_gemm, vllm::skinny_fp8_channel_gemm);
