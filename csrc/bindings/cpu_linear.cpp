#include <tvm/ffi/optional.h>

#include "../cpu/dispatch.h"
#include "../cpu/linear_pack.h"
#include "check.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;

void check_block_k(int64_t block_k) {
  VLLM_CHECK(block_k >= 1, "block_k: given " << block_k << "; accepted: 1 or more");
}

cpu::ElementType whole_weight_type(const TensorView& weight, const char* name) {
  if (is_type(weight, kDLInt, 8)) return cpu::ElementType::kInt8;
  return storage_type(weight, name);
}

// weight [n, k], packed [ceil(n / 32), k, 32] of the same type. Returns the number of E4M3 NaNs.
int64_t linear_pack(TensorView weight, TensorView packed) {
  check_cpu(weight, "weight", 2);
  check_last_contiguous(weight, "weight");
  const cpu::ElementType type = whole_weight_type(weight, "weight");
  const int64_t n = weight.size(0), k = weight.size(1);
  check_cpu(packed, "packed", 3);
  check_same_type(whole_weight_type(packed, "packed"), packed, "packed", type, "weight");
  check_size(packed, "packed", 0, (n + cpu::kPanelWidth - 1) / cpu::kPanelWidth, "panels");
  check_size(packed, "packed", 1, k, "columns of weight");
  check_size(packed, "packed", 2, cpu::kPanelWidth, "rows of weight in a panel");
  check_contiguous(packed, "packed");
  return cpu::pack_weight(data_of(weight), type, n, k, weight.stride(0), data_of(packed));
}

// codes uint8 [n, k / 2], packed uint8 [ceil(n / 32), quads, 64].
void linear_pack_codes(TensorView codes, TensorView packed, int64_t block_k) {
  check_cpu(codes, "codes", 2);
  check_type(codes, "codes", kDLUInt, 8);
  check_last_contiguous(codes, "codes");
  check_block_k(block_k);
  const int64_t n = codes.size(0), k = 2 * codes.size(1);
  check_cpu(packed, "packed", 3);
  check_type(packed, "packed", kDLUInt, 8);
  check_size(packed, "packed", 0, (n + cpu::kPanelWidth - 1) / cpu::kPanelWidth, "panels");
  check_size(packed, "packed", 1, cpu::num_quads(k, block_k), "quads of rows");
  check_size(packed, "packed", 2, cpu::kQuadBytes, "bytes of a quad");
  check_contiguous(packed, "packed");
  cpu::pack_codes(data_of(codes), n, k, block_k, codes.stride(0), data_of(packed));
}

// `code_type`: 0 for weights that are stored whole, else which codes they are.
cpu::ElementType weight_type(const TensorView& weight, int64_t code_type) {
  static constexpr cpu::ElementType kCodes[] = {cpu::ElementType::kInt4, cpu::ElementType::kUint4,
                                                cpu::ElementType::kE2M1};
  if (code_type == 0) return whole_weight_type(weight, "weight");
  VLLM_CHECK(code_type > 0 && code_type <= 3,
             "code_type: given " << code_type << "; accepted: 0 (none), 1 (int4), 2 (int4 with "
                                 << "zero points), 3 (E2M1)");
  check_type(weight, "weight", kDLUInt, 8);
  return kCodes[code_type - 1];
}

// [panels, num_k_blocks, 32], one number for each column and block.
void check_per_block(const TensorView& tensor, const char* name, const cpu::LinearArgs& args,
                     int64_t num_panels) {
  check_cpu(tensor, name, 3);
  check_size(tensor, name, 0, num_panels, "panels of weight");
  check_size(tensor, name, 1, (args.k + args.block_k - 1) / args.block_k,
             "blocks of block_k along k");
  check_size(tensor, name, 2, cpu::kPanelWidth, "panel width");
  check_contiguous(tensor, name);
}

// x [m, k], weight [panels, k, 32] from linear_pack, or [panels, quads, 64] from linear_pack_codes
// with a code_type, scales [panels, num_k_blocks, 32], scale_factors and bias float32 [panels *
// 32], zero_points uint8 of scales' shape, out [m, n] of x's type, n in the last panel.
void linear(TensorView x, TensorView weight, TensorView scales, TensorView bias, TensorView out,
            int64_t block_k, int64_t code_type, Optional<TensorView> scale_factors,
            Optional<TensorView> zero_points) {
  cpu::LinearArgs args;
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  args.m = x.size(0);
  args.k = x.size(1);
  args.n = out.size(1);
  check_size(out, "out", 0, args.m, "rows of x");
  check_cpu(weight, "weight", 3);
  args.weight_type = weight_type(weight, code_type);
  check_block_k(block_k);
  args.block_k = block_k;
  const int64_t num_panels = weight.size(0);
  const bool is_code = cpu::is_code(args.weight_type);
  check_size(weight, "weight", 1, is_code ? cpu::num_quads(args.k, block_k) : args.k,
             is_code ? "quads of the columns of x" : "columns of x");
  check_size(weight, "weight", 2, is_code ? cpu::kQuadBytes : cpu::kPanelWidth, "panel width");
  check_contiguous(weight, "weight");
  VLLM_CHECK(
      args.n > (num_panels - 1) * cpu::kPanelWidth && args.n <= num_panels * cpu::kPanelWidth,
      "out: given " << args.n << " columns; accepted: " << num_panels
                    << " panels of 32 in weight, the last one not empty");
  args.scale_type = storage_type(scales, "scales");
  check_per_block(scales, "scales", args, num_panels);
  const int64_t padded = num_panels * cpu::kPanelWidth;
  args.scale_factors = nullptr;
  if (scale_factors.has_value()) {
    check_vector(*scale_factors, "scale_factors", kDLFloat, 32, padded, "padded columns");
    args.scale_factors = static_cast<const float*>(data_of(*scale_factors));
  }
  const bool has_zeros = args.weight_type == cpu::ElementType::kUint4;
  VLLM_CHECK(zero_points.has_value() == has_zeros, "zero_points: given "
                                                       << (has_zeros ? "none" : "some")
                                                       << "; accepted: some for code_type 2"
                                                       << ", none for any other");
  args.zero_points = nullptr;
  if (has_zeros) {
    check_type(*zero_points, "zero_points", kDLUInt, 8);
    check_per_block(*zero_points, "zero_points", args, num_panels);
    args.zero_points = static_cast<const uint8_t*>(data_of(*zero_points));
  }
  check_vector(bias, "bias", kDLFloat, 32, padded, "padded columns");
  args.weight = data_of(weight);
  args.scales = data_of(scales);
  args.bias = static_cast<const float*>(data_of(bias));
  cpu::kernels().linear(args);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_pack, linear_pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_pack_codes, linear_pack_codes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear);

}  // namespace vllm
