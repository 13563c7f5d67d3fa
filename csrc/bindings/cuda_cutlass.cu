// Exports of the GEMMs of CUTLASS and CuTe. Every one is asynchronous on the caller's stream, waits
// for nothing and can be captured in a graph.
#include "../gemm/blackwell_gemm.h"
#include "../gemm/sm90_fp8_block.h"
#include "../quantization/fp4/nvfp4_quant.h"
#include "cuda_check.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;

void check_fp8(const TensorView& tensor, const char* name) {
  VLLM_CHECK(is_type(tensor, kDLFloat8_e4m3fn, 8),
             name << ": given " << type_name(tensor.dtype()) << "; accepted: float8_e4m3fn");
}

// a, a_scales and out of every block-scaled GEMM; b is [n, k] or [num_experts, n, k].
gemm::Fp8BlockArgs check_block(const TensorView& a, const TensorView& a_scales, const TensorView& b,
                               const TensorView& b_scales, const TensorView& out) {
  check_cuda(a, "a", 2);
  check_fp8(a, "a");
  const int num_dims = b.ndim();
  const int64_t m = a.size(0), k = a.size(1), n = b.size(num_dims - 2);
  VLLM_CHECK(k % 16 == 0, "a: given " << k << " columns; accepted: a multiple of 16");
  check_rows(a, "a", 16);
  check_cuda(a_scales, "a_scales", 2, a, "a");
  check_type(a_scales, "a_scales", kDLFloat, 32);
  check_size(a_scales, "a_scales", 0, m, "rows of a");
  check_size(a_scales, "a_scales", 1, (k + 127) / 128, "blocks of 128 columns of a");
  check_cuda(b, "b", num_dims, a, "a");
  check_fp8(b, "b");
  check_size(b, "b", num_dims - 1, k, "columns of a");
  check_aligned(b, "b", 16);
  check_last_contiguous(b, "b");
  check_cuda(b_scales, "b_scales", num_dims, a, "a");
  check_type(b_scales, "b_scales", kDLFloat, 32);
  check_size(b_scales, "b_scales", num_dims - 2, (n + 127) / 128, "blocks of 128 rows of b");
  check_size(b_scales, "b_scales", num_dims - 1, (k + 127) / 128, "blocks of 128 columns of b");
  check_contiguous(b_scales, "b_scales");
  check_cuda(out, "out", 2, a, "a");
  check_size(out, "out", 0, m, "rows of a");
  check_size(out, "out", 1, n, "rows of b");
  check_own_rows(out, "out");
  check_apart(out, "out", a, "a");
  check_apart(out, "out", a_scales, "a_scales");
  check_apart(out, "out", b, "b");
  check_apart(out, "out", b_scales, "b_scales");
  const bool is_bf16 = is_type(out, kDLBfloat, 16);
  VLLM_CHECK(is_bf16 || is_type(out, kDLFloat, 16),
             "out: given " << type_name(out.dtype()) << "; accepted: bfloat16, float16");

  gemm::Fp8BlockArgs args = {};
  args.x = static_cast<const uint8_t*>(data_of(a));
  args.x_scales = static_cast<const float*>(data_of(a_scales));
  args.x_scales_ld = a_scales.stride(0), args.x_scales_ldk = a_scales.stride(1);
  args.weight = static_cast<const uint8_t*>(data_of(b));
  args.scales = static_cast<const float*>(data_of(b_scales));
  args.out = data_of(out);
  args.m = static_cast<int>(m), args.n = static_cast<int>(n), args.k = static_cast<int>(k);
  args.num_experts = 1;
  // The stride of a single row says nothing, and TMA wants one that is at least a row.
  args.ldx = m > 1 ? a.stride(0) : k, args.ldw = n > 1 ? b.stride(num_dims - 2) : k;
  VLLM_CHECK(args.ldw % 16 == 0,
             "b: given rows " << args.ldw << " bytes apart; accepted: a multiple of 16");
  args.ldo = out.stride(0);
  args.is_bf16 = is_bf16;
  args.is_vector = n % 8 == 0 && has_aligned_rows(out, 16);
  return args;
}

// Major version of the compute capability.
int generation_of(const TensorView& tensor) {
  int major = 0;
  check_launch(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, tensor.device().device_id),
      "generation_of");
  return major;
}

// Of the code for each generation, what this GPU runs.
template <class Function>
Function for_gpu(const TensorView& tensor, const char* name, Function sm100, Function sm120) {
  const int major = generation_of(tensor);
  const Function found = major == 10 ? sm100 : major == 12 ? sm120 : nullptr;
  if (found == nullptr) {
    TVM_FFI_THROW(RuntimeError) << name << ": this build has no code for GPUs of generation "
                                << major;
  }
  return found;
}

// tiling: null for the measured one.
void launch_sm90(const TensorView& a, const gemm::Fp8BlockArgs& args,
                 const gemm::Sm90Tiling* tiling, const char* name) {
  if (gemm::launch_sm90_fp8_block == nullptr) {
    TVM_FFI_THROW(RuntimeError) << name << ": this build has no code for sm_90a";
  }
  const int sms = num_sms(a);
  const gemm::Sm90Plan plan =
      tiling ? gemm::Sm90Plan{args.m, *tiling, *tiling} : gemm::sm90_plan(args, sms);
  check_launch(gemm::launch_sm90_fp8_block(args, plan, sms, stream_of(a)), name);
}

void launch_blackwell(const TensorView& a, const gemm::Fp8BlockArgs& args, const char* name) {
  const auto launch = for_gpu(a, name, gemm::launch_sm100_fp8_block, gemm::launch_sm120_fp8_block);
  if (args.m == 0 || args.n == 0) return;
  VLLM_CHECK(args.x_scales_ld == 1 && args.x_scales_ldk % 4 == 0 &&
                 args.x_scales_ldk >= (args.m + 3) / 4 * 4 &&
                 reinterpret_cast<uintptr_t>(args.x_scales) % 16 == 0,
             "a_scales: given strides [" << args.x_scales_ld << ", " << args.x_scales_ldk
                                         << "]; accepted on this GPU: column-major and TMA-aligned "
                                            "(tma_aligned_scales=True)");
  VLLM_CHECK(args.is_vector,
             "out: accepted on this GPU: a multiple of 8 columns, and rows that "
             "start at multiples of 16 bytes");
  check_launch(launch(args, num_sms(a), stream_of(a)), name);
}

// As many bytes of the caller's framework's GPU memory as the products of all experts need between
// them. It may be given back once they are launched: the framework reuses it in stream order.
tvm::ffi::Tensor workspace_of(const TensorView& tensor, size_t num_bytes) {
  const DLDataType byte{kDLUInt, 8, 1};
  return tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc,
                                        tvm::ffi::Shape{static_cast<int64_t>(num_bytes)}, byte,
                                        tensor.device());
}

void launch_blackwell_grouped(const TensorView& a, const gemm::Fp8BlockArgs& args,
                              const char* name) {
  const auto launch =
      for_gpu(a, name, gemm::launch_sm100_fp8_grouped, gemm::launch_sm120_fp8_grouped);
  const auto workspace_bytes =
      for_gpu(a, name, gemm::sm100_fp8_grouped_workspace, gemm::sm120_fp8_grouped_workspace);
  VLLM_CHECK(args.x_scales_ldk == 1 || args.k <= 128,
             "a_scales: given strides [" << args.x_scales_ld << ", " << args.x_scales_ldk
                                         << "]; accepted on this GPU: row-major");
  VLLM_CHECK(args.is_bf16 && args.is_vector,
             "out: accepted on this GPU: bfloat16, a multiple of 8 columns, and rows that start at "
             "multiples of 16 bytes");
  if (args.m == 0 || args.n == 0 || args.num_experts == 0) return;
  const int sms = num_sms(a);
  const tvm::ffi::Tensor workspace = workspace_of(a, workspace_bytes(args, sms));
  check_launch(launch(args, workspace.data_ptr(), sms, stream_of(a)), name);
}

// out [m, n] = (a * a_scales) [m, k] * (b * b_scales) [n, k]^T (+ bias [n], float32), in bfloat16
// or float16. a, b: E4M3; k and the distances between rows: multiples of 16. a_scales: float32 [m,
// ceil(k / 128)] of any strides, column-major ones are read fastest. b_scales: float32 [ceil(n /
// 128), ceil(k / 128)]. out shares no memory with them, and rows none with each other.
void cutlass_fp8_block_gemm(TensorView a, TensorView a_scales, TensorView b, TensorView b_scales,
                            Optional<TensorView> bias, TensorView out) {
  check_cuda(b, "b", 2);
  gemm::Fp8BlockArgs args = check_block(a, a_scales, b, b_scales, out);
  args.bias = check_columns(bias, "bias", out);
  const DeviceGuard guard(a);
  if (generation_of(a) == 9) {
    launch_sm90(a, args, nullptr, "cutlass_fp8_block_gemm");
  } else {
    launch_blackwell(a, args, "cutlass_fp8_block_gemm");
  }
}

// The same on Hopper with columns of the product multiplied by column_scales, float32 [n], before
// the bias: for weights with a scale for each row.
void sm90_fp8_channel_gemm(TensorView a, TensorView a_scales, TensorView b, TensorView b_scales,
                           TensorView column_scales, Optional<TensorView> bias, TensorView out) {
  check_cuda(b, "b", 2);
  gemm::Fp8BlockArgs args = check_block(a, a_scales, b, b_scales, out);
  args.column_scales = check_columns(column_scales, "column_scales", out);
  args.bias = check_columns(bias, "bias", out);
  const DeviceGuard guard(a);
  launch_sm90(a, args, nullptr, "sm90_fp8_channel_gemm");
}

// On Hopper with a tiling of the caller's choice: for measurements.
void sm90_fp8_block_gemm(TensorView a, TensorView a_scales, TensorView b, TensorView b_scales,
                         Optional<TensorView> bias, TensorView out, int64_t tile_m, int64_t tile_n,
                         int64_t cluster, bool is_split) {
  check_cuda(b, "b", 2);
  gemm::Fp8BlockArgs args = check_block(a, a_scales, b, b_scales, out);
  args.bias = check_columns(bias, "bias", out);
  const gemm::Sm90Tiling tiling = {static_cast<int>(tile_m), static_cast<int>(tile_n),
                                   static_cast<int>(cluster), is_split};
  const DeviceGuard guard(a);
  launch_sm90(a, args, &tiling, "sm90_fp8_block_gemm");
}

// Rows [offsets[e], offsets[e + 1]) of a meet b[e] [n, k]; rows of out outside of all are not
// written. b: [num_experts, n, k] contiguous. offsets: int32 [num_experts + 1] on the GPU,
// ascending, within [0, m]: nobody checks their values. On Blackwell (not run on hardware):
// bfloat16, n % 8 == 0, a_scales row-major; elsewhere, as cutlass_fp8_block_gemm takes them.
void cutlass_fp8_block_gemm_grouped(TensorView a, TensorView a_scales, TensorView b,
                                    TensorView b_scales, TensorView offsets, TensorView out) {
  check_cuda(b, "b", 3);
  check_contiguous(b, "b");
  gemm::Fp8BlockArgs args = check_block(a, a_scales, b, b_scales, out);
  args.num_experts = static_cast<int>(b.size(0));
  check_size(b_scales, "b_scales", 0, args.num_experts, "experts of b");
  check_cuda(offsets, "offsets", 1, a, "a");
  check_type(offsets, "offsets", kDLInt, 32);
  check_size(offsets, "offsets", 0, args.num_experts + 1, "experts of b, and one");
  check_contiguous(offsets, "offsets");
  check_apart(out, "out", offsets, "offsets");
  args.offsets = static_cast<const int32_t*>(data_of(offsets));
  const DeviceGuard guard(a);
  if (generation_of(a) == 9) {
    launch_sm90(a, args, nullptr, "cutlass_fp8_block_gemm_grouped");
  } else {
    launch_blackwell_grouped(a, args, "cutlass_fp8_block_gemm_grouped");
  }
}

// E4M3 scales of k columns in tiles of 128 x 4, all written.
void check_nvfp4_scale_type(const TensorView& scales, const char* name, int num_dims, int64_t k,
                            const TensorView& a) {
  check_cuda(scales, name, num_dims, a, "a");
  check_fp8(scales, name);
  check_size(scales, name, num_dims - 1, (k / 16 + 3) / 4 * 4,
             "groups of 16 columns rounded up to 4");
  check_contiguous(scales, name);
  check_aligned(scales, name, 16);
}

void check_nvfp4_scales(const TensorView& scales, const char* name, int64_t rows, int64_t k,
                        const TensorView& a) {
  check_nvfp4_scale_type(scales, name, 2, k, a);
  check_size(scales, name, 0, (rows + 127) / 128 * 128, "rows rounded up to 128");
}

// a, b, alpha and out of every NVFP4 GEMM, but for scales and for how rows of b and columns of out
// belong together; b is [n, k / 2] or [num_groups, n, k / 2].
gemm::Nvfp4Args check_nvfp4(const TensorView& a, const TensorView& b, const TensorView& alpha,
                            int64_t num_alphas, const TensorView& out) {
  check_cuda(a, "a", 2);
  check_type(a, "a", kDLUInt, 8);
  const int64_t m = a.size(0), k = 2 * a.size(1), n = b.size(b.ndim() - 2);
  VLLM_CHECK(k % 32 == 0, "a: given " << k / 2 << " bytes a row; accepted: a multiple of 16");
  check_contiguous(a, "a");
  check_aligned(a, "a", 16);
  check_cuda(b, "b", b.ndim(), a, "a");
  check_type(b, "b", kDLUInt, 8);
  check_size(b, "b", b.ndim() - 1, k / 2, "bytes of a row of a");
  check_contiguous(b, "b");
  check_aligned(b, "b", 16);
  VLLM_CHECK(n % 8 == 0, "b: given " << n << " rows; accepted: a multiple of 8");
  check_cuda(alpha, "alpha", 1, a, "a");
  check_type(alpha, "alpha", kDLFloat, 32);
  check_size(alpha, "alpha", 0, num_alphas, "one factor for each product");
  check_contiguous(alpha, "alpha");
  check_cuda(out, "out", 2, a, "a");
  check_size(out, "out", 0, m, "rows of a");
  const bool is_bf16 = is_type(out, kDLBfloat, 16);
  VLLM_CHECK(is_bf16 || is_type(out, kDLFloat, 16),
             "out: given " << type_name(out.dtype()) << "; accepted: bfloat16, float16");
  check_rows(out, "out", 16);
  gemm::Nvfp4Args args = {};
  args.a = static_cast<const uint8_t*>(data_of(a));
  args.b = static_cast<const uint8_t*>(data_of(b));
  args.alpha = static_cast<const float*>(data_of(alpha));
  args.out = data_of(out);
  args.m = static_cast<int>(m), args.n = static_cast<int>(n), args.k = static_cast<int>(k);
  args.ldo = out.stride(0);
  args.is_bf16 = is_bf16;
  return args;
}

// out [m, n] = alpha * (a * a_scales) [m, k] * (b * b_scales) [n, k]^T (+ bias [n], float32). a, b:
// uint8 [m, k / 2] and [n, k / 2], pairs of E2M1; k % 32 == 0, n % 8 == 0. Scales: as
// scaled_fp4_quant writes them with is_sf_swizzled_layout. alpha: float32 [1] on the GPU. Not run
// on hardware.
void cutlass_nvfp4_gemm(TensorView a, TensorView a_scales, TensorView b, TensorView b_scales,
                        TensorView alpha, Optional<TensorView> bias, TensorView out) {
  check_cuda(b, "b", 2);
  gemm::Nvfp4Args args = check_nvfp4(a, b, alpha, 1, out);
  check_nvfp4_scales(a_scales, "a_scales", args.m, args.k, a);
  check_nvfp4_scales(b_scales, "b_scales", args.n, args.k, a);
  check_size(out, "out", 1, args.n, "rows of b");
  if (bias.has_value()) {
    check_cuda(bias.value(), "bias", 1, a, "a");
    check_type(bias.value(), "bias", kDLFloat, 32);
    check_size(bias.value(), "bias", 0, args.n, "rows of b");
    check_contiguous(bias.value(), "bias");
    args.bias = static_cast<const float*>(data_of(bias.value()));
  }
  args.a_scales = static_cast<const uint8_t*>(data_of(a_scales));
  args.b_scales = static_cast<const uint8_t*>(data_of(b_scales));
  const DeviceGuard guard(a);
  const auto launch =
      for_gpu(a, "cutlass_nvfp4_gemm", gemm::launch_sm100_nvfp4, gemm::launch_sm120_nvfp4);
  if (args.m == 0 || args.n == 0) return;
  check_launch(launch(args, num_sms(a), stream_of(a)), "cutlass_nvfp4_gemm");
}

// Sets num_experts, num_parts and what lies by expert.
void check_nvfp4_experts(const TensorView& a, const TensorView& a_scales, const TensorView& b,
                         const TensorView& b_scales, const TensorView& offsets,
                         const TensorView& out, gemm::Nvfp4Args& args) {
  check_cuda(offsets, "offsets", 1, a, "a");
  check_type(offsets, "offsets", kDLInt, 32);
  check_contiguous(offsets, "offsets");
  const int64_t num_experts = offsets.size(0) - 1, num_groups = b.size(0);
  VLLM_CHECK(num_experts >= 1 && num_experts <= fp4::kMaxExperts,
             "offsets: given " << offsets.size(0) << " offsets; accepted: 2 to "
                               << fp4::kMaxExperts + 1 << " (one more than experts)");
  VLLM_CHECK(num_groups > 0 && num_groups % num_experts == 0,
             "b: given " << num_groups << " weights; accepted: as many for each of " << num_experts
                         << " experts");
  args.num_experts = static_cast<int>(num_experts);
  args.num_parts = static_cast<int>(num_groups / num_experts);
  check_size(out, "out", 1, int64_t{args.num_parts} * args.n, "rows of all parts of an expert");

  check_nvfp4_scale_type(a_scales, "a_scales", 2, args.k, a);
  const int64_t padding = 127 * (num_experts < args.m ? num_experts : args.m);
  const int64_t needed = (args.m + padding) / 128 * 128;
  VLLM_CHECK(a_scales.size(0) >= needed,
             "a_scales: given shape " << shape_name(a_scales) << "; accepted: at least " << needed
                                      << " rows (each expert's rows rounded up to 128)");
  check_nvfp4_scale_type(b_scales, "b_scales", 3, args.k, a);
  check_size(b_scales, "b_scales", 0, num_groups, "weights of b");
  check_size(b_scales, "b_scales", 1, (args.n + 127) / 128 * 128, "rows of b rounded up to 128");
  args.offsets = static_cast<const int32_t*>(data_of(offsets));
  args.a_scales = static_cast<const uint8_t*>(data_of(a_scales));
  args.b_scales = static_cast<const uint8_t*>(data_of(b_scales));
}

// Rows [offsets[e], offsets[e + 1]) of a meet the num_parts weights of expert e: b uint8
// [num_experts
// * num_parts, n, k / 2], alpha float32 [num_experts * num_parts]; their products lie side by side
// in out bfloat16 [m, num_parts * n], of which rows outside of all experts are not written.
// a_scales: as scaled_fp4_quant_grouped writes them. b_scales: those of each weight swizzled,
// [num_experts * num_parts, n rounded up to 128, k / 16 rounded up to 4]. offsets: int32
// [num_experts + 1] on the GPU, ascending from 0: values that are not lead nowhere outside. Not run
// on hardware.
void cutlass_nvfp4_gemm_grouped(TensorView a, TensorView a_scales, TensorView b,
                                TensorView b_scales, TensorView alpha, TensorView offsets,
                                TensorView out) {
  constexpr const char* kName = "cutlass_nvfp4_gemm_grouped";
  check_cuda(b, "b", 3);
  gemm::Nvfp4Args args = check_nvfp4(a, b, alpha, b.size(0), out);
  VLLM_CHECK(args.is_bf16, "out: given " << type_name(out.dtype()) << "; accepted: bfloat16");
  check_nvfp4_experts(a, a_scales, b, b_scales, offsets, out, args);
  check_own_rows(out, "out");
  const DeviceGuard guard(a);
  const auto launch =
      for_gpu(a, kName, gemm::launch_sm100_nvfp4_grouped, gemm::launch_sm120_nvfp4_grouped);
  const auto workspace_bytes =
      for_gpu(a, kName, gemm::sm100_nvfp4_grouped_workspace, gemm::sm120_nvfp4_grouped_workspace);
  if (args.m == 0 || args.n == 0) return;
  const int sms = num_sms(a);
  const tvm::ffi::Tensor workspace = workspace_of(a, workspace_bytes(args, sms));
  check_launch(launch(args, workspace.data_ptr(), sms, stream_of(a)), kName);
}

}  // namespace
}  // namespace vllm

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cutlass_fp8_block_gemm, vllm::cutlass_fp8_block_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm90_fp8_channel_gemm, vllm::sm90_fp8_channel_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm90_fp8_block_gemm, vllm::sm90_fp8_block_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cutlass_fp8_block_gemm_grouped, vllm::cutlass_fp8_block_gemm_grouped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cutlass_nvfp4_gemm, vllm::cutlass_nvfp4_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cutlass_nvfp4_gemm_grouped, vllm::cutlass_nvfp4_gemm_grouped);
