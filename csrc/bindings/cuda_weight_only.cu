#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/string.h>

#include <bit>

#include "../gemm/weight_only.h"
#include "cuda_check.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::String;

gemm::WeightCode code_of(const String& format) {
  const std::string name = format;
  if (name == "fp8") return gemm::WeightCode::kFp8;
  if (name == "nvfp4") return gemm::WeightCode::kNvfp4;
  if (name == "w4a8") return gemm::WeightCode::kW4a8;
  VLLM_CHECK(name == "int4", "format: given \"" << name
                                                << "\"; accepted: \"fp8\", \"nvfp4\", \"int4\", "
                                                   "\"w4a8\"");
  return gemm::WeightCode::kInt4;
}

// A packed weight [n, k]; num_experts 0 for one without experts. All formats but FP8 need scales.
gemm::WeightOnlyWeight weight_of(const TensorView& codes, const Optional<TensorView>& scales,
                                 const Optional<TensorView>& row_factors, gemm::WeightCode code,
                                 int64_t columns_per_scale, int64_t num_experts, int64_t n,
                                 int64_t k) {
  const int lead = num_experts > 0;
  const int64_t tiles = (n + gemm::kTileRows - 1) / gemm::kTileRows;
  const int64_t column_tiles = (k + gemm::kTileColumns - 1) / gemm::kTileColumns;
  const auto check_lead = [&](const TensorView& tensor, const char* name) {
    if (lead) check_size(tensor, name, 0, num_experts, "experts");
  };
  check_cuda(codes, "codes", 5 + lead);
  check_type(codes, "codes", kDLUInt, 8);
  check_lead(codes, "codes");
  check_size(codes, "codes", lead, tiles, "tiles of 16 rows");
  check_size(codes, "codes", lead + 1, column_tiles, "tiles of 64 columns");
  check_size(codes, "codes", lead + 2, code == gemm::WeightCode::kFp8 ? 2 : 1, "loads of a lane");
  check_size(codes, "codes", lead + 3, 32, "lanes");
  check_size(codes, "codes", lead + 4, 16, "bytes of a load");
  check_contiguous(codes, "codes");
  check_aligned(codes, "codes", 16);
  gemm::WeightOnlyWeight weight = {};
  weight.codes = data_of(codes);
  weight.n = static_cast<int>(n), weight.k = static_cast<int>(k);
  weight.column_tiles = static_cast<int>(column_tiles);
  weight.groups = 1, weight.scale_rows = 1, weight.column_shift = 31;
  VLLM_CHECK(scales.has_value() || code == gemm::WeightCode::kFp8,
             "scales: given none; accepted: those of every group");
  if (scales.has_value()) {
    const TensorView& given = scales.value();
    const bool is_nvfp4 = code == gemm::WeightCode::kNvfp4;
    check_cuda(given, "scales", is_nvfp4 ? 4 + lead : 3 + lead, codes, "codes");
    check_lead(given, "scales");
    check_size(given, "scales", lead, tiles, "tiles of 16 rows");
    check_contiguous(given, "scales");
    weight.scales = data_of(given);
    if (is_nvfp4) {
      check_aligned(given, "scales", 16);
      check_type(given, "scales", kDLUInt, 8);
      check_size(given, "scales", lead + 1, column_tiles, "tiles of 64 columns");
      check_size(given, "scales", lead + 2, 32, "lanes");
      check_size(given, "scales", lead + 3, 2, "rows of a lane");
    } else {
      check_type(given, "scales", kDLFloat, 32);
      const int64_t groups = given.size(lead + 1);
      const auto columns = static_cast<uint64_t>(columns_per_scale);
      VLLM_CHECK(groups == 1 || (columns_per_scale >= 32 && std::has_single_bit(columns)),
                 "columns_per_scale: given " << columns_per_scale
                                             << "; accepted: a power of two from 32 on");
      VLLM_CHECK(groups == 1 || groups * columns_per_scale >= column_tiles * gemm::kTileColumns,
                 "scales: given " << groups << " groups of " << columns_per_scale
                                  << " columns; accepted: one, or enough for " << column_tiles
                                  << " tiles of 64 columns");
      const int64_t rows = given.size(lead + 2);
      VLLM_CHECK(rows == 1 || rows == gemm::kTileRows,
                 "scales: given " << rows << " rows of a tile; accepted: 1 for all, or 16");
      weight.groups = static_cast<int>(groups), weight.scale_rows = static_cast<int>(rows);
      if (groups > 1) weight.column_shift = std::countr_zero(columns);
    }
  }
  if (row_factors.has_value()) {
    const TensorView& given = row_factors.value();
    check_cuda(given, "row_factors", 1 + lead, codes, "codes");
    check_type(given, "row_factors", kDLFloat, 32);
    check_lead(given, "row_factors");
    check_size(given, "row_factors", lead, n, "rows of the weight");
    check_contiguous(given, "row_factors");
    weight.row_factors = static_cast<const float*>(data_of(given));
  }
  return weight;
}

// bf16 or fp16.
bool check_half(const TensorView& tensor, const char* name) {
  const bool is_bf16 = is_type(tensor, kDLBfloat, 16);
  VLLM_CHECK(is_bf16 || is_type(tensor, kDLFloat, 16),
             name << ": given " << type_name(tensor.dtype()) << "; accepted: bfloat16, float16");
  return is_bf16;
}

// Clusters of thread blocks came with 9.0.
bool has_clusters(const TensorView& tensor) {
  static std::atomic<int> majors[64] = {};
  const int device = tensor.device().device_id;
  int major = device < 64 ? majors[device].load(std::memory_order_relaxed) : 0;
  if (major == 0) {
    check_launch(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                 "has_clusters");
    if (device < 64) majors[device].store(major, std::memory_order_relaxed);
  }
  return major >= 9;
}

// The operands that products of one and of many experts share. Returns whether results are bf16.
bool set_operands(gemm::WeightOnlyArgs& args, const TensorView& x,
                  const Optional<TensorView>& x_scales, const TensorView& out,
                  gemm::WeightCode code) {
  const bool is_fp8 = code == gemm::WeightCode::kW4a8;
  const bool is_bf16 = check_half(is_fp8 ? out : x, is_fp8 ? "out" : "x");
  VLLM_CHECK(x_scales.has_value() == is_fp8,
             "x_scales: given " << (is_fp8 ? "none" : "some")
                                << "; accepted: of format w4a8 one for each row, else none");
  if (is_fp8) {
    check_type(x, "x", kDLFloat8_e4m3fn, 8);
    check_cuda(x_scales.value(), "x_scales", 1, x, "x");
    check_type(x_scales.value(), "x_scales", kDLFloat, 32);
    check_size(x_scales.value(), "x_scales", 0, x.size(0), "rows of x");
    check_contiguous(x_scales.value(), "x_scales");
    args.x_scales = static_cast<const float*>(data_of(x_scales.value()));
  }
  check_rows(x, "x", 16);
  const int64_t columns = is_fp8 ? 16 : 8;
  VLLM_CHECK(x.size(1) % columns == 0,
             "x: given " << x.size(1) << " columns; accepted: a multiple of " << columns);
  VLLM_CHECK(x.size(0) <= 1 || x.size(0) * x.stride(0) < int64_t{1} << 31,
             "x: given " << x.size(0) << " rows " << x.stride(0)
                         << " elements apart; accepted: less than 2^31 elements in all");
  check_cuda(out, "out", 2, x, "x");
  check_type(out, "out", is_bf16 ? kDLBfloat : kDLFloat, 16);
  check_last_contiguous(out, "out");
  args.x = data_of(x), args.out = data_of(out);
  args.m = static_cast<int>(x.size(0)), args.ldx = static_cast<int>(x.stride(0));
  args.ldo = out.stride(0);
  return is_bf16;
}

// Added to results: float32 [n], or [num_experts, n].
void set_bias(gemm::WeightOnlyArgs& args, const Optional<TensorView>& bias, const TensorView& x,
              int64_t num_experts) {
  if (!bias.has_value()) return;
  const TensorView& given = bias.value();
  const int lead = num_experts > 0;
  check_cuda(given, "bias", 1 + lead, x, "x");
  check_type(given, "bias", kDLFloat, 32);
  if (lead) check_size(given, "bias", 0, num_experts, "experts");
  check_size(given, "bias", lead, args.weight.n, "columns of out");
  check_contiguous(given, "bias");
  args.bias = static_cast<const float*>(data_of(given));
}

void launch(const gemm::WeightOnlyArgs& args, gemm::WeightCode code, bool is_bf16,
            const TensorView& x, int64_t row_tiles, int64_t splits, const char* name) {
  const bool clusters = has_clusters(x);
  const int tokens = args.blocks != nullptr ? args.block_rows : args.m;
  gemm::WeightOnlyShape shape =
      gemm::weight_only_shape(code, tokens, args.num_blocks, args.weight, num_sms(x), clusters);
  if (row_tiles > 0) shape.row_tiles = static_cast<int>(row_tiles);
  if (splits > 0) shape.splits = static_cast<int>(splits);
  const DeviceGuard guard(x);
  if (code != gemm::WeightCode::kW4a8) {
    check_launch(gemm::launch_weight_only(args, code, is_bf16, shape, clusters, stream_of(x)),
                 name);
    return;
  }
  if (gemm::launch_w4a8 == nullptr) {
    TVM_FFI_THROW(RuntimeError) << name << ": this build has no code for format w4a8";
  }
  check_launch(gemm::launch_w4a8(args, is_bf16, shape, clusters, stream_of(x)), name);
}

// out [m, n] = x [m, k] * W [n, k]^T (+ bias float32 [n]), W packed by weight_only_layout.py.
// x: of out's type, without x_scales; or, for format w4a8 on chips of 8.9 and later, E4M3 with
// x_scales float32 [m]. columns_per_scale: of float32 scales. row_tiles and splits: 0 for
// weight_only_shape.
void marlin_gemm(TensorView x, Optional<TensorView> x_scales, TensorView codes,
                 Optional<TensorView> scales, Optional<TensorView> row_factors,
                 Optional<TensorView> bias, TensorView out, String format,
                 int64_t columns_per_scale, int64_t row_tiles, int64_t splits) {
  check_cuda(x, "x", 2);
  gemm::WeightOnlyArgs args = {};
  const gemm::WeightCode code = code_of(format);
  const bool is_bf16 = set_operands(args, x, x_scales, out, code);
  check_size(out, "out", 0, x.size(0), "rows of x");
  const int64_t n = out.size(1);
  args.weight = weight_of(codes, scales, row_factors, code, columns_per_scale, 0, n, x.size(1));
  set_bias(args, bias, x, 0);
  launch(args, code, is_bf16, x, row_tiles, splits, "marlin_gemm");
}

// For every block of rows of one expert: out [rows, n] = x * W[expert]^T (+ bias[expert], float32
// [experts, n]), x as above. blocks int32 [3, num_blocks]: expert (negative for none), first row,
// end of the expert's rows; block_rows at most 64. order int32 [rows]: row r of out is of row
// order[r] / top_k of x; none for row r. has_blocks_before: the kernel before this one of the
// stream begins after blocks are complete, and lets this one start after that.
void marlin_gemm_grouped(TensorView x, Optional<TensorView> x_scales, TensorView codes,
                         Optional<TensorView> scales, Optional<TensorView> row_factors,
                         Optional<TensorView> bias, TensorView blocks, Optional<TensorView> order,
                         TensorView out, String format, int64_t columns_per_scale,
                         int64_t block_rows, int64_t top_k, bool has_blocks_before,
                         int64_t row_tiles, int64_t splits) {
  check_cuda(x, "x", 2);
  gemm::WeightOnlyArgs args = {};
  const gemm::WeightCode code = code_of(format);
  const bool is_bf16 = set_operands(args, x, x_scales, out, code);
  VLLM_CHECK(codes.ndim() == 6, "codes: given shape " << shape_name(codes)
                                                      << "; accepted: 6 dimensions, experts first");
  args.weight = weight_of(codes, scales, row_factors, code, columns_per_scale, codes.size(0),
                          out.size(1), x.size(1));
  set_bias(args, bias, x, codes.size(0));
  check_cuda(blocks, "blocks", 2, x, "x");
  check_type(blocks, "blocks", kDLInt, 32);
  check_size(blocks, "blocks", 0, 3, "expert, first row, end");
  check_contiguous(blocks, "blocks");
  VLLM_CHECK(block_rows >= 1 && block_rows <= 64,
             "block_rows: given " << block_rows << "; accepted: 1 to 64");
  VLLM_CHECK(top_k >= 1 && top_k <= 1024, "top_k: given " << top_k << "; accepted: 1 to 1024");
  args.blocks = static_cast<const int*>(data_of(blocks));
  args.num_blocks = static_cast<int>(blocks.size(1));
  VLLM_CHECK(args.num_blocks < 1 << 16,
             "blocks: given " << args.num_blocks << "; accepted: less than 65536");
  args.block_rows = static_cast<int>(block_rows);
  args.has_blocks_before = has_blocks_before;
  if (order.has_value()) {
    check_cuda(order.value(), "order", 1, x, "x");
    check_type(order.value(), "order", kDLInt, 32);
    check_size(order.value(), "order", 0, out.size(0), "rows of out");
    check_contiguous(order.value(), "order");
    args.order = static_cast<const int*>(data_of(order.value()));
    args.top_k_inverse = gemm::inverse_of(top_k);
  } else {
    check_size(out, "out", 0, x.size(0), "rows of x");
  }
  launch(args, code, is_bf16, x, row_tiles, splits, "marlin_gemm_grouped");
}

// out [rows, k] bf16 or fp16 = rows first_row and on of a packed weight [n, k], with its scales.
void marlin_widen(TensorView codes, Optional<TensorView> scales, Optional<TensorView> row_factors,
                  int64_t n, int64_t first_row, TensorView out, String format,
                  int64_t columns_per_scale) {
  check_cuda(out, "out", 2);
  const bool is_bf16 = check_half(out, "out");
  check_contiguous(out, "out");
  check_aligned(out, "out", 16);
  VLLM_CHECK(out.size(1) % 8 == 0,
             "out: given " << out.size(1) << " columns; accepted: a multiple of 8");
  VLLM_CHECK(first_row >= 0 && first_row % gemm::kTileRows == 0 && first_row + out.size(0) <= n,
             "first_row: given " << first_row << " with " << out.size(0) << " rows of " << n
                                 << "; accepted: a multiple of 16, and rows of the weight");
  const gemm::WeightCode code = code_of(format);
  VLLM_CHECK(code != gemm::WeightCode::kW4a8,
             "format: given \"w4a8\"; accepted: \"fp8\", \"nvfp4\", \"int4\"");
  const gemm::WeightOnlyWeight weight =
      weight_of(codes, scales, row_factors, code, columns_per_scale, 0, n, out.size(1));
  const DeviceGuard guard(out);
  check_launch(
      gemm::launch_weight_only_widen(weight, code, is_bf16, static_cast<int>(first_row),
                                     static_cast<int>(out.size(0)), data_of(out), stream_of(out)),
      "marlin_widen");
}

}  // namespace
}  // namespace vllm

TVM_FFI_DLL_EXPORT_TYPED_FUNC(marlin_gemm, vllm::marlin_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(marlin_gemm_grouped, vllm::marlin_gemm_grouped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(marlin_widen, vllm::marlin_widen);
