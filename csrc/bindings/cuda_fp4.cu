#include "../quantization/fp4/nvfp4_quant.h"
#include "cuda_check.h"

namespace vllm {
namespace {

using fp4::Nvfp4Quant;
using fp4::ScaleLayout;
using tvm::ffi::Optional;

constexpr int64_t kInputBytes = 16, kCodeBytes = 8, kScaleBytes = 4;

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

fp4::InputType input_type(const TensorView& x) {
  if (is_type(x, kDLBfloat, 16)) return fp4::InputType::kBFloat16;
  VLLM_CHECK(is_type(x, kDLFloat, 16),
             "x: given " << type_name(x.dtype()) << "; accepted: bfloat16, float16");
  return fp4::InputType::kFloat16;
}

// x [m, k] or, where it is gated, [m, 2 k]; q uint8 [m, k / 2]. pairs: null, or x has a row for
// each token and q one for each of them.
Nvfp4Quant quant_of(const TensorView& x, const TensorView& q, bool is_gated,
                    const TensorView* pairs = nullptr) {
  Nvfp4Quant quant = {};
  quant.is_gated = is_gated;
  check_cuda(x, "x", 2);
  quant.type = input_type(x);
  quant.num_tokens = x.size(0);
  quant.m = pairs == nullptr ? x.size(0) : pairs->size(0);
  const int64_t columns_per_group = fp4::kGroup * (is_gated ? 2 : 1);
  quant.num_groups = x.size(1) / columns_per_group;
  VLLM_CHECK(x.size(1) % columns_per_group == 0 && quant.num_groups > 0,
             "x: given shape " << shape_name(x) << "; accepted: a multiple of " << columns_per_group
                               << " columns (groups of 16" << (is_gated ? ", gate and up)" : ")"));
  check_contiguous(x, "x");
  check_aligned(x, "x", kInputBytes);
  VLLM_CHECK(quant.m <= fp4::kMaxGroups / quant.num_groups,
             "x: given shape " << shape_name(x) << " for " << quant.m << " rows; accepted: up to "
                               << fp4::kMaxGroups << " groups of 16 columns");
  check_cuda(q, "q", 2, x, "x");
  check_type(q, "q", kDLUInt, 8);
  check_size(q, "q", 0, quant.m, pairs == nullptr ? "rows of x" : "pairs");
  check_size(q, "q", 1, quant.num_groups * fp4::kGroup / 2, "two codes per byte");
  check_contiguous(q, "q");
  check_aligned(q, "q", kCodeBytes);
  quant.x = data_of(x), quant.q = static_cast<uint8_t*>(data_of(q));
  return quant;
}

const float* global_scales(const TensorView& scale, const char* name, const TensorView& x,
                           int64_t size, const char* meaning) {
  check_cuda(scale, name, 1, x, "x");
  check_type(scale, name, kDLFloat, 32);
  check_size(scale, name, 0, size, meaning);
  check_contiguous(scale, name);
  return static_cast<const float*>(data_of(scale));
}

// E4M3 scales, or their codes as uint8.
void set_scales(Nvfp4Quant& quant, const TensorView& scales, const TensorView& x) {
  check_cuda(scales, "scales", 2, x, "x");
  VLLM_CHECK(is_type(scales, kDLFloat8_e4m3fn, 8) || is_type(scales, kDLUInt, 8),
             "scales: given " << type_name(scales.dtype())
                              << "; accepted: float8_e4m3fn, uint8 (E4M3 codes)");
  check_contiguous(scales, "scales");
  const bool is_tiled = quant.layout != ScaleLayout::kLinear;
  if (is_tiled) check_aligned(scales, "scales", kScaleBytes);
  check_size(scales, "scales", 1,
             is_tiled ? round_up(quant.num_groups, fp4::kTileColumns) : quant.num_groups,
             is_tiled ? "groups of a row, rounded up to 4" : "groups of a row");
  if (quant.layout != ScaleLayout::kGrouped) {
    check_size(scales, "scales", 0, is_tiled ? round_up(quant.m, fp4::kTileRows) : quant.m,
               is_tiled ? "rows of x, rounded up to 128" : "rows of x");
  }
  quant.scales = static_cast<uint8_t*>(data_of(scales));
}

void run(const Nvfp4Quant& quant, const TensorView& x, const char* name) {
  const DeviceGuard guard(x);
  check_launch(fp4::launch_nvfp4_quant(quant, num_sms(x), stream_of(x)), name);
}

void quantise(const TensorView& x, const TensorView& global_scale, const TensorView& q,
              const TensorView& scales, bool is_swizzled, bool is_gated, const char* name) {
  Nvfp4Quant quant = quant_of(x, q, is_gated);
  quant.layout = is_swizzled ? ScaleLayout::kSwizzled : ScaleLayout::kLinear;
  quant.global_scale =
      global_scales(global_scale, "global_scale", x, 1, "one scale for the tensor");
  set_scales(quant, scales, x);
  run(quant, x, name);
}

// Scales of all experts one after another, each padded to whole tiles: room for the worst case.
void quantise_grouped(Nvfp4Quant quant, const TensorView& x,
                      const TensorView& global_scales_of_experts, const TensorView& expert_offsets,
                      const TensorView& scales, const char* name) {
  quant.layout = ScaleLayout::kGrouped;
  check_cuda(expert_offsets, "expert_offsets", 1, x, "x");
  check_type(expert_offsets, "expert_offsets", kDLInt, 32);
  check_contiguous(expert_offsets, "expert_offsets");
  const int64_t num_experts = expert_offsets.size(0) - 1;
  VLLM_CHECK(num_experts >= 1 && num_experts <= fp4::kMaxExperts,
             "expert_offsets: given " << expert_offsets.size(0) << " offsets; accepted: 2 to "
                                      << fp4::kMaxExperts + 1 << " (one more than experts)");
  quant.num_experts = static_cast<int>(num_experts);
  quant.expert_offsets = static_cast<const int32_t*>(data_of(expert_offsets));
  quant.global_scale = global_scales(global_scales_of_experts, "global_scales", x, num_experts,
                                     "one scale for each expert");
  set_scales(quant, scales, x);
  const int64_t most_padding =
      (fp4::kTileRows - 1) * (num_experts < quant.m ? num_experts : quant.m);
  const int64_t needed = (quant.m + most_padding) / fp4::kTileRows * fp4::kTileRows;
  quant.scale_rows = scales.size(0);
  VLLM_CHECK(quant.scale_rows >= needed && quant.scale_rows <= INT32_MAX,
             "scales: given shape " << shape_name(scales) << "; accepted: at least " << needed
                                    << " rows (each expert's rows rounded up to 128)");
  run(quant, x, name);
}

// x [m, k] -> q uint8 [m, k / 2] and scales [m, k / 16], or in tiles of 128 x 4. The formulas are
// in nvfp4_quant.h.
void nvfp4_quant(TensorView x, TensorView global_scale, TensorView q, TensorView scales,
                 bool is_swizzled) {
  quantise(x, global_scale, q, scales, is_swizzled, false, "nvfp4_quant");
}

// x [m, 2 k] -> the same of silu(x[:, :k]) * x[:, k:].
void silu_and_mul_nvfp4_quant(TensorView x, TensorView global_scale, TensorView q,
                              TensorView scales, bool is_swizzled) {
  quantise(x, global_scale, q, scales, is_swizzled, true, "silu_and_mul_nvfp4_quant");
}

// Rows of q sorted by expert: expert e has rows expert_offsets[e] to expert_offsets[e + 1]. pairs:
// int32 [m], row r of q is row pairs[r] / top_k of x; without them, row r.
void nvfp4_quant_grouped(TensorView x, TensorView global_scales, TensorView expert_offsets,
                         Optional<TensorView> pairs, int64_t top_k, TensorView q,
                         TensorView scales) {
  if (!pairs.has_value()) {
    const Nvfp4Quant quant = quant_of(x, q, false);
    return quantise_grouped(quant, x, global_scales, expert_offsets, scales, "nvfp4_quant_grouped");
  }
  const TensorView& of_rows = pairs.value();
  check_cuda(of_rows, "pairs", 1, x, "x");
  check_type(of_rows, "pairs", kDLInt, 32);
  check_contiguous(of_rows, "pairs");
  VLLM_CHECK(top_k >= 1 && top_k <= fp4::kMaxExperts,
             "top_k: given " << top_k << "; accepted: 1 to " << fp4::kMaxExperts);
  Nvfp4Quant quant = quant_of(x, q, false, &of_rows);
  quant.pairs = static_cast<const int32_t*>(data_of(of_rows));
  quant.top_k = static_cast<int>(top_k);
  quantise_grouped(quant, x, global_scales, expert_offsets, scales, "nvfp4_quant_grouped");
}

void silu_and_mul_nvfp4_quant_grouped(TensorView x, TensorView global_scales,
                                      TensorView expert_offsets, TensorView q, TensorView scales) {
  quantise_grouped(quant_of(x, q, true), x, global_scales, expert_offsets, scales,
                   "silu_and_mul_nvfp4_quant_grouped");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_quant, nvfp4_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul_nvfp4_quant, silu_and_mul_nvfp4_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_quant_grouped, nvfp4_quant_grouped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul_nvfp4_quant_grouped, silu_and_mul_nvfp4_quant_grouped);

}  // namespace vllm
