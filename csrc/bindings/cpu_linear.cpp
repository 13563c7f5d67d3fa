#include "../cpu/dispatch.h"
#include "../cpu/linear_pack.h"
#include "check.h"

namespace vllm {
namespace {

// weight [n, k], packed [ceil(n / 32), k, 32] of the same type. Returns the number of E4M3 NaNs.
int64_t linear_pack(TensorView weight, TensorView packed) {
  check_cpu(weight, "weight", 2);
  check_last_contiguous(weight, "weight");
  const cpu::ElementType type = storage_type(weight, "weight");
  const int64_t n = weight.size(0), k = weight.size(1);
  check_cpu(packed, "packed", 3);
  check_same_type(storage_type(packed, "packed"), packed, "packed", type, "weight");
  check_size(packed, "packed", 0, (n + cpu::kPanelWidth - 1) / cpu::kPanelWidth, "panels");
  check_size(packed, "packed", 1, k, "columns of weight");
  check_size(packed, "packed", 2, cpu::kPanelWidth, "rows of weight in a panel");
  check_contiguous(packed, "packed");
  return cpu::pack_weight(data_of(weight), type, n, k, weight.stride(0), data_of(packed));
}

// x [m, k], weight [panels, k, 32] from linear_pack, scales [panels, num_k_blocks, 32] and bias
// [panels * 32] float32, out [m, n] of x's type, n in the last panel.
void linear(TensorView x, TensorView weight, TensorView scales, TensorView bias, TensorView out,
            int64_t block_k) {
  cpu::LinearArgs args;
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  args.m = x.size(0);
  args.k = x.size(1);
  args.n = out.size(1);
  check_size(out, "out", 0, args.m, "rows of x");
  check_cpu(weight, "weight", 3);
  args.weight_type = storage_type(weight, "weight");
  const int64_t num_panels = weight.size(0);
  check_size(weight, "weight", 1, args.k, "columns of x");
  check_size(weight, "weight", 2, cpu::kPanelWidth, "panel width");
  check_contiguous(weight, "weight");
  VLLM_CHECK(
      args.n > (num_panels - 1) * cpu::kPanelWidth && args.n <= num_panels * cpu::kPanelWidth,
      "out: given " << args.n << " columns; accepted: " << num_panels
                    << " panels of 32 in weight, the last one not empty");
  VLLM_CHECK(block_k >= 1, "block_k: given " << block_k << "; accepted: 1 or more");
  args.block_k = block_k;
  check_cpu(scales, "scales", 3);
  check_type(scales, "scales", kDLFloat, 32);
  check_size(scales, "scales", 0, num_panels, "panels of weight");
  check_size(scales, "scales", 1, (args.k + block_k - 1) / block_k, "blocks of block_k along k");
  check_size(scales, "scales", 2, cpu::kPanelWidth, "panel width");
  check_contiguous(scales, "scales");
  check_vector(bias, "bias", kDLFloat, 32, num_panels * cpu::kPanelWidth, "padded columns");
  args.weight = data_of(weight);
  args.scales = static_cast<const float*>(data_of(scales));
  args.bias = static_cast<const float*>(data_of(bias));
  cpu::kernels().linear(args);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_pack, linear_pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear);

}  // namespace vllm
