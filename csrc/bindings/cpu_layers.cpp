#include <tvm/ffi/optional.h>

#include <cmath>

#include "../cpu/dispatch.h"
#include "check.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;

// [rows, dim] as one head per row, or [tokens, heads, dim].
cpu::Heads rows_or_heads(const TensorView& tensor, const char* name) {
  if (tensor.ndim() == 3) return heads_of(tensor, name);
  VLLM_CHECK(tensor.ndim() == 2, name << ": given shape " << shape_name(tensor)
                                      << "; accepted: [tokens, dim] or [tokens, heads, dim]");
  const cpu::Rows rows = rows_of(tensor, name);
  return {rows.data, rows.type, rows.stride, 0};
}

void check_same_shape(const TensorView& tensor, const char* name, const TensorView& other,
                      const char* other_name) {
  bool is_same = tensor.ndim() == other.ndim();
  for (int i = 0; is_same && i < tensor.ndim(); ++i) is_same = tensor.size(i) == other.size(i);
  VLLM_CHECK(is_same, name << ": given shape " << shape_name(tensor) << "; accepted: "
                           << shape_name(other) << " (the shape of " << other_name << ")");
}

float checked_eps(double eps) {
  VLLM_CHECK(std::isfinite(eps) && eps >= 0, "eps: given " << eps << "; accepted: 0 or more");
  return static_cast<float>(eps);
}

cpu::NormArgs norm_args(const TensorView& x, const TensorView& weight, double eps) {
  cpu::NormArgs args;
  args.x = rows_or_heads(x, "x");
  args.residual = args.gate = {};
  args.is_gated_before = false;
  args.weight_stride = 0;
  args.num_tokens = x.size(0);
  args.num_heads = x.ndim() == 3 ? x.size(1) : 1;
  args.dim = x.size(x.ndim() - 1);
  check_vector(weight, "weight", kDLFloat, 32, args.dim, "last dimension of x");
  args.weight = static_cast<const float*>(data_of(weight));
  args.eps = checked_eps(eps);
  return args;
}

// out = x / sqrt(mean(x^2) + eps) * weight over the last dimension; out may be x.
void rms_norm(TensorView x, TensorView weight, TensorView out, double eps) {
  cpu::NormArgs args = norm_args(x, weight, eps);
  args.out = rows_or_heads(out, "out");
  check_same_shape(out, "out", x, "x");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  cpu::kernels().rms_norm(args);
}

// out = rms_norm(x) * silu(gate).
void rms_norm_gated(TensorView x, TensorView gate, TensorView weight, TensorView out, double eps) {
  cpu::NormArgs args = norm_args(x, weight, eps);
  args.gate = rows_or_heads(gate, "gate");
  check_same_shape(gate, "gate", x, "x");
  check_same_type(args.gate.type, gate, "gate", args.x.type, "x");
  args.out = rows_or_heads(out, "out");
  check_same_shape(out, "out", x, "x");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  cpu::kernels().rms_norm(args);
}

// out = rms_norm(x * silu(gate)) over the columns of each group; weight [groups, columns].
void silu_mul_rms_norm(TensorView x, TensorView gate, TensorView weight, TensorView out,
                       double eps) {
  check_cpu(weight, "weight", 2);
  check_type(weight, "weight", kDLFloat, 32);
  check_contiguous(weight, "weight");
  cpu::NormArgs args;
  args.x = heads_of(x, "x");
  args.gate = heads_of(gate, "gate");
  args.out = heads_of(out, "out");
  args.residual = {};
  args.is_gated_before = true;
  args.num_tokens = x.size(0);
  args.num_heads = x.size(1);
  args.dim = args.weight_stride = x.size(2);
  check_same_shape(gate, "gate", x, "x");
  check_same_shape(out, "out", x, "x");
  check_same_type(args.gate.type, gate, "gate", args.x.type, "x");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  check_size(weight, "weight", 0, args.num_heads, "groups of x");
  check_size(weight, "weight", 1, args.dim, "columns of x");
  args.weight = static_cast<const float*>(data_of(weight));
  args.eps = checked_eps(eps);
  cpu::kernels().rms_norm(args);
}

// residual += x, then x = rms_norm(residual).
void fused_add_rms_norm(TensorView x, TensorView residual, TensorView weight, double eps) {
  cpu::NormArgs args = norm_args(x, weight, eps);
  args.out = args.x;
  args.residual = rows_or_heads(residual, "residual");
  check_same_shape(residual, "residual", x, "x");
  check_same_type(args.residual.type, residual, "residual", args.x.type, "x");
  cpu::kernels().rms_norm(args);
}

// Rotates the first rotary_dim columns of each head of query and key in place.
void rotary_embedding(TensorView positions, TensorView query, Optional<TensorView> key,
                      TensorView cos_sin_cache, bool is_neox) {
  cpu::RotaryArgs args;
  args.query = heads_of(query, "query");
  args.num_tokens = query.size(0);
  args.num_query_heads = query.size(1);
  args.key = {};
  args.num_key_heads = 0;
  check_cpu(cos_sin_cache, "cos_sin_cache", 2);
  check_type(cos_sin_cache, "cos_sin_cache", kDLFloat, 32);
  check_contiguous(cos_sin_cache, "cos_sin_cache");
  args.rotary_dim = cos_sin_cache.size(1);
  const int64_t head_dim = query.size(2);
  VLLM_CHECK(args.rotary_dim >= 2 && args.rotary_dim % 2 == 0 && args.rotary_dim <= head_dim,
             "cos_sin_cache: given " << args.rotary_dim
                                     << " columns; accepted: an even number up to the head size "
                                     << head_dim);
  if (key.has_value()) {
    args.key = heads_of(*key, "key");
    args.num_key_heads = (*key).size(1);
    check_size(*key, "key", 0, args.num_tokens, "tokens of query");
    check_size(*key, "key", 2, head_dim, "head size of query");
    check_same_type(args.key.type, *key, "key", args.query.type, "query");
  }
  check_vector(positions, "positions", kDLInt, 64, args.num_tokens, "tokens of query");
  args.positions = static_cast<const int64_t*>(data_of(positions));
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    VLLM_CHECK(args.positions[t] >= 0 && args.positions[t] < cos_sin_cache.size(0),
               "positions: given " << args.positions[t] << " for token " << t << "; accepted: 0 to "
                                   << cos_sin_cache.size(0) - 1 << " (rows of cos_sin_cache)");
  }
  args.cos_sin = static_cast<const float*>(data_of(cos_sin_cache));
  args.is_neox = is_neox;
  cpu::kernels().rotary(args);
}

void activate(TensorView x, TensorView out, float limit) {
  cpu::SiluArgs args;
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  args.m = out.size(0);
  args.n = out.size(1);
  check_size(x, "x", 0, args.m, "rows of out");
  check_size(x, "x", 1, 2 * args.n, "twice the columns of out");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  args.limit = limit;
  cpu::kernels().silu_and_mul(args);
}

// x [m, 2 n] -> out [m, n] = gelu(x[:, :n]) * x[:, n:]; is_tanh: by its approximation.
void gelu_and_mul(TensorView x, TensorView out, bool is_tanh) {
  cpu::GeluArgs args;
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  args.m = out.size(0);
  args.n = out.size(1);
  args.is_tanh = is_tanh;
  check_size(x, "x", 0, args.m, "rows of out");
  check_size(x, "x", 1, 2 * args.n, "twice the columns of out");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  cpu::kernels().gelu_and_mul(args);
}

// x [m, n] = softcap * tanh(x / softcap).
void soft_cap(TensorView x, double softcap) {
  VLLM_CHECK(std::isfinite(softcap) && softcap > 0,
             "softcap: given " << softcap << "; accepted: a positive number");
  cpu::SoftCapArgs args;
  args.x = rows_of(x, "x");
  args.m = x.size(0);
  args.n = x.size(1);
  args.softcap = static_cast<float>(softcap);
  cpu::kernels().soft_cap(args);
}

// x [m, 2 n] -> out [m, n] = silu(x[:, :n]) * x[:, n:].
void silu_and_mul(TensorView x, TensorView out) { activate(x, out, 0.0f); }

// The same with both halves clamped, as gpt-oss has it: see the kernel.
void swigluoai_and_mul(TensorView x, TensorView out, double limit) {
  VLLM_CHECK(std::isfinite(limit) && limit > 0,
             "limit: given " << limit << "; accepted: a positive number");
  activate(x, out, static_cast<float>(limit));
}

// x [tokens, heads, dim] *= sigmoid(gate), gate of the same shape or [tokens, heads, 1].
void mul_sigmoid(TensorView x, TensorView gate) {
  cpu::SigmoidArgs args;
  args.x = heads_of(x, "x");
  args.gate = heads_of(gate, "gate");
  args.num_tokens = x.size(0);
  args.num_heads = x.size(1);
  args.dim = x.size(2);
  check_size(gate, "gate", 0, args.num_tokens, "tokens of x");
  check_size(gate, "gate", 1, args.num_heads, "heads of x");
  VLLM_CHECK(gate.size(2) == args.dim || gate.size(2) == 1,
             "gate: given shape " << shape_name(gate) << "; dimension 2 must be 1 or " << args.dim
                                  << " (head size of x)");
  check_same_type(args.gate.type, gate, "gate", args.x.type, "x");
  args.is_per_head = gate.size(2) == 1;
  cpu::kernels().mul_sigmoid(args);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_add_rms_norm, fused_add_rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotary_embedding, rotary_embedding);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_gated, rms_norm_gated);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_mul_rms_norm, silu_mul_rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gelu_and_mul, gelu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(soft_cap, soft_cap);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swigluoai_and_mul, swigluoai_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mul_sigmoid, mul_sigmoid);

}  // namespace vllm
