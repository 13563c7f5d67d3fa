#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>

#include "cuda_float.h"

namespace vllm {
namespace {

using layers::FloatType;
using layers::Heads;
using tvm::ffi::Optional;

void check_type_like(const TensorView& tensor, const char* name, const TensorView& other,
                     const char* other_name) {
  check_same_type(float_type(tensor, name), tensor, name, float_type(other, other_name),
                  other_name);
}

// [tokens, dim] as one head per token, or [tokens, heads, dim].
Heads heads_of_cuda(const TensorView& tensor, const char* name) {
  check_cuda(tensor, name, tensor.ndim() == 2 ? 2 : 3);
  check_last_contiguous(tensor, name);
  Heads heads;
  heads.data = data_of(tensor);
  heads.token_stride = tensor.stride(0);
  if (tensor.ndim() == 3) heads.num_heads = tensor.size(1), heads.head_stride = tensor.stride(1);
  return heads;
}

// Whether the data and every stride that is used are multiples of 16 bytes.
bool has_aligned_heads(const TensorView& tensor) {
  bool result = is_aligned(tensor, kVectorBytes);
  for (int i = 0; i + 1 < tensor.ndim(); ++i) {
    const bool is_used = tensor.size(i) > 1;
    result &= !is_used || tensor.stride(i) * element_bytes(tensor) % kVectorBytes == 0;
  }
  return result;
}

// A contiguous vector of `size` elements on the GPU of `other`.
template <typename T>
T* vector_of_cuda(const TensorView& tensor, const char* name, int code, int64_t size,
                  const char* meaning, const TensorView& other, const char* other_name) {
  check_cuda(tensor, name, 1, other, other_name);
  check_type(tensor, name, code, 8 * sizeof(T));
  check_size(tensor, name, 0, size, meaning);
  check_contiguous(tensor, name);
  return static_cast<T*>(data_of(tensor));
}

float checked_eps(double eps) {
  VLLM_CHECK(std::isfinite(eps) && eps >= 0, "eps: given " << eps << "; accepted: 0 or more");
  return static_cast<float>(eps);
}

void check_like(const TensorView& tensor, const char* name, const TensorView& x) {
  check_cuda(tensor, name, x.ndim(), x, "x");
  for (int i = 0; i < x.ndim(); ++i) check_size(tensor, name, i, x.size(i), "as in x");
  check_type_like(tensor, name, x, "x");
}

layers::NormArgs norm_args(const TensorView& x, const TensorView& weight, double eps) {
  layers::NormArgs args;
  args.x = heads_of_cuda(x, "x");
  args.type = type_of(x, "x");
  args.num_tokens = x.size(0), args.dim = x.size(x.ndim() - 1);
  VLLM_CHECK(args.dim <= layers::kMaxNormDim,
             "x: given rows of " << args.dim << "; accepted: up to " << layers::kMaxNormDim);
  args.weight =
      vector_of_cuda<float>(weight, "weight", kDLFloat, args.dim, "last dimension of x", x, "x");
  args.eps = checked_eps(eps);
  args.is_vector =
      args.dim % layers::kWidth == 0 && has_aligned_heads(x) && is_aligned(weight, kVectorBytes);
  return args;
}

// out = x / sqrt(mean(x^2) + eps) * weight over the last dimension; out may be x.
void cuda_rms_norm(TensorView x, TensorView weight, TensorView out, double eps) {
  layers::NormArgs args = norm_args(x, weight, eps);
  check_like(out, "out", x);
  args.out = heads_of_cuda(out, "out");
  args.is_vector = args.is_vector && has_aligned_heads(out);
  const DeviceGuard guard(x);
  check_launch(layers::launch_rms_norm(args, stream_of(x)), "cuda_rms_norm");
}

// residual += x, then x = rms_norm(residual).
void cuda_fused_add_rms_norm(TensorView x, TensorView residual, TensorView weight, double eps) {
  layers::NormArgs args = norm_args(x, weight, eps);
  args.out = args.x;
  check_like(residual, "residual", x);
  args.residual = heads_of_cuda(residual, "residual");
  args.is_vector = args.is_vector && has_aligned_heads(residual);
  const DeviceGuard guard(x);
  check_launch(layers::launch_rms_norm(args, stream_of(x)), "cuda_fused_add_rms_norm");
}

Heads checked_heads(const TensorView& tensor, const char* name) {
  check_cuda(tensor, name, 3);
  return heads_of_cuda(tensor, name);
}

layers::RotaryArgs rotary_args(const TensorView& positions, const TensorView& query,
                               const Optional<TensorView>& key, const TensorView& cos_sin_cache,
                               bool is_neox) {
  layers::RotaryArgs args;
  args.query = checked_heads(query, "query");
  args.key.num_heads = 0;
  args.type = type_of(query, "query");
  args.num_tokens = query.size(0), args.head_dim = query.size(2);
  args.is_neox = is_neox;
  check_cuda(cos_sin_cache, "cos_sin_cache", 2, query, "query");
  check_type(cos_sin_cache, "cos_sin_cache", kDLFloat, 32);
  check_contiguous(cos_sin_cache, "cos_sin_cache");
  args.max_position = cos_sin_cache.size(0), args.rotary_dim = cos_sin_cache.size(1);
  const int64_t most = std::min(args.head_dim, layers::kMaxHeadDim);
  VLLM_CHECK(args.rotary_dim >= 2 && args.rotary_dim % 2 == 0 && args.rotary_dim <= most,
             "cos_sin_cache: given " << args.rotary_dim
                                     << " columns; accepted: an even number up to " << most);
  VLLM_CHECK(args.max_position > 0, "cos_sin_cache: given no rows; accepted: one per position");
  args.cos_sin = static_cast<const float*>(data_of(cos_sin_cache));
  args.positions = vector_of_cuda<const int64_t>(positions, "positions", kDLInt, args.num_tokens,
                                                 "tokens of query", query, "query");
  args.is_vector = args.rotary_dim % (2 * layers::kWidth) == 0 && has_aligned_heads(query) &&
                   is_aligned(cos_sin_cache, kVectorBytes);
  if (key.has_value()) {
    const TensorView given = *key;
    args.key = checked_heads(given, "key");
    check_cuda(given, "key", 3, query, "query");
    check_size(given, "key", 0, args.num_tokens, "tokens of query");
    check_size(given, "key", 2, args.head_dim, "head size of query");
    check_type_like(given, "key", query, "query");
    args.is_vector = args.is_vector && has_aligned_heads(given);
  }
  return args;
}

// Rotates the first rotary_dim columns of each head of query and key in place.
void cuda_rotary_embedding(TensorView positions, TensorView query, Optional<TensorView> key,
                           TensorView cos_sin_cache, bool is_neox) {
  const layers::RotaryArgs args = rotary_args(positions, query, key, cos_sin_cache, is_neox);
  const DeviceGuard guard(query);
  check_launch(layers::launch_rotary(args, stream_of(query)), "cuda_rotary_embedding");
}

void check_head_dim(const layers::RotaryArgs& args) {
  VLLM_CHECK(args.head_dim <= layers::kMaxHeadDim, "query: given heads of " << args.head_dim
                                                                            << "; accepted: up to "
                                                                            << layers::kMaxHeadDim);
}

void add_norms(layers::RotaryArgs& args, const TensorView& query, const TensorView& query_weight,
               const TensorView& key_weight, double eps) {
  check_head_dim(args);
  args.query_norm = vector_of_cuda<float>(query_weight, "query_weight", kDLFloat, args.head_dim,
                                          "head size of query", query, "query");
  args.key_norm = vector_of_cuda<float>(key_weight, "key_weight", kDLFloat, args.head_dim,
                                        "head size of query", query, "query");
  args.eps = checked_eps(eps);
  args.is_vector = args.is_vector && args.head_dim % layers::kWidth == 0 &&
                   is_aligned(query_weight, kVectorBytes) && is_aligned(key_weight, kVectorBytes);
}

// The same after the RMSNorm of each head.
void cuda_qk_norm_rotary(TensorView positions, TensorView query, TensorView key,
                         TensorView query_weight, TensorView key_weight, TensorView cos_sin_cache,
                         double eps, bool is_neox) {
  layers::RotaryArgs args = rotary_args(positions, query, key, cos_sin_cache, is_neox);
  add_norms(args, query, query_weight, key_weight, eps);
  const DeviceGuard guard(query);
  check_launch(layers::launch_rotary(args, stream_of(query)), "cuda_qk_norm_rotary");
}

// [blocks, block_size, heads, head_dim], contiguous.
void* cache_of(const TensorView& cache, const char* name, const TensorView& key) {
  check_cuda(cache, name, 4, key, "key");
  check_size(cache, name, 2, key.size(1), "heads of key");
  check_size(cache, name, 3, key.size(2), "head size of key");
  check_contiguous(cache, name);
  if (!is_type(cache, kDLFloat8_e4m3fn, 8)) check_type_like(cache, name, key, "key");
  return data_of(cache);
}

float checked_scale(double scale, const char* name, bool is_used) {
  const bool is_valid = is_used ? std::isfinite(scale) && scale > 0 : scale == 1;
  VLLM_CHECK(is_valid, name << ": given " << scale << "; accepted: a positive number, and 1 for a "
                            << "cache that is not float8_e4m3fn");
  return static_cast<float>(scale);
}

// Rotates query, and puts key, rotated, and value into the cache; with weights, after the RMSNorm.
void cuda_rotary_into_cache(TensorView positions, TensorView query, TensorView key,
                            TensorView value, TensorView k_cache, TensorView v_cache,
                            TensorView slot_mapping, TensorView cos_sin_cache,
                            Optional<TensorView> query_weight, Optional<TensorView> key_weight,
                            double eps, double k_scale, double v_scale, bool is_neox) {
  layers::RotaryArgs args = rotary_args(positions, query, key, cos_sin_cache, is_neox);
  check_head_dim(args);
  VLLM_CHECK(query_weight.has_value() == key_weight.has_value(),
             "query_weight, key_weight: given one of them; accepted: both or none");
  if (query_weight.has_value()) add_norms(args, query, *query_weight, *key_weight, eps);
  layers::CacheWrite& cache = args.cache;
  cache.value = checked_heads(value, "value");
  check_cuda(value, "value", 3, query, "query");
  for (int i = 0; i < 3; ++i) check_size(value, "value", i, key.size(i), "as in key");
  check_type_like(value, "value", key, "key");
  cache.keys = cache_of(k_cache, "k_cache", key), cache.values = cache_of(v_cache, "v_cache", key);
  for (int i = 0; i < 2; ++i) check_size(v_cache, "v_cache", i, k_cache.size(i), "as in k_cache");
  cache.is_e4m3 = is_type(k_cache, kDLFloat8_e4m3fn, 8);
  VLLM_CHECK(is_type(v_cache, kDLFloat8_e4m3fn, 8) == cache.is_e4m3,
             "v_cache: given " << type_name(v_cache.dtype()) << "; accepted: the type of k_cache");
  cache.k_scale = checked_scale(k_scale, "k_scale", cache.is_e4m3);
  cache.v_scale = checked_scale(v_scale, "v_scale", cache.is_e4m3);
  cache.slots = vector_of_cuda<const int64_t>(slot_mapping, "slot_mapping", kDLInt, args.num_tokens,
                                              "tokens of query", query, "query");
  args.is_vector = args.is_vector && args.head_dim % layers::kWidth == 0 &&
                   has_aligned_heads(value) && is_aligned(k_cache, kVectorBytes) &&
                   is_aligned(v_cache, kVectorBytes);
  const DeviceGuard guard(query);
  check_launch(layers::launch_rotary(args, stream_of(query)), "cuda_rotary_into_cache");
}

// x [m, 2 n] -> out [m, n] = silu(x[:, :n]) * x[:, n:].
void cuda_silu_and_mul(TensorView x, TensorView out) {
  layers::SiluArgs args;
  check_cuda(x, "x", 2);
  check_last_contiguous(x, "x");
  args.type = type_of(x, "x");
  check_cuda(out, "out", 2, x, "x");
  check_last_contiguous(out, "out");
  check_type_like(out, "out", x, "x");
  args.m = out.size(0), args.n = out.size(1);
  check_size(x, "x", 0, args.m, "rows of out");
  check_size(x, "x", 1, 2 * args.n, "twice the columns of out");
  args.x = data_of(x), args.out = data_of(out);
  args.x_stride = x.stride(0), args.out_stride = out.stride(0);
  args.is_vector = args.n % layers::kWidth == 0 && has_aligned_heads(x) && has_aligned_heads(out);
  const DeviceGuard guard(x);
  check_launch(layers::launch_silu_and_mul(args, stream_of(x)), "cuda_silu_and_mul");
}

// out [t, n] = weight[ids]: weight [vocab, n], ids int64 [t].
void cuda_embedding(TensorView ids, TensorView weight, TensorView out) {
  check_cuda(weight, "weight", 2);
  check_last_contiguous(weight, "weight");
  check_cuda(out, "out", 2, weight, "weight");
  check_last_contiguous(out, "out");
  check_type_like(out, "out", weight, "weight");
  check_size(out, "out", 1, weight.size(1), "columns of weight");
  layers::EmbeddingArgs args;
  args.num_ids = out.size(0), args.num_rows = weight.size(0);
  args.ids = vector_of_cuda<const int64_t>(ids, "ids", kDLInt, args.num_ids, "rows of out", weight,
                                           "weight");
  const int64_t bytes = element_bytes(weight);
  args.weight = data_of(weight), args.out = data_of(out);
  args.row_bytes = weight.size(1) * bytes;
  args.weight_stride = weight.stride(0) * bytes, args.out_stride = out.stride(0) * bytes;
  args.is_vector =
      args.row_bytes % kVectorBytes == 0 && has_aligned_heads(weight) && has_aligned_heads(out);
  const DeviceGuard guard(weight);
  check_launch(layers::launch_embedding(args, stream_of(weight)), "cuda_embedding");
}

// tokens[r]: the largest of logits[r] where temperature[r] is 0, else drawn with uniforms[r].
void cuda_sample_tokens(TensorView logits, TensorView temperature, TensorView top_k,
                        TensorView top_p, TensorView min_p, TensorView uniforms,
                        TensorView tokens) {
  check_cuda(logits, "logits", 2);
  check_last_contiguous(logits, "logits");
  layers::SampleArgs args;
  args.type = type_of(logits, "logits");
  VLLM_CHECK(args.type != FloatType::kFloat16,
             "logits: given float16; accepted: float32, bfloat16");
  args.num_rows = logits.size(0), args.vocab = logits.size(1), args.row_stride = logits.stride(0);
  VLLM_CHECK(args.vocab > 0 && args.vocab < int64_t{1} << 30,
             "logits: given shape " << shape_name(logits) << "; accepted: 1 to 2^30 - 1 columns");
  const auto rows = [&]<typename T>(const TensorView& tensor, const char* name, int code) {
    return vector_of_cuda<T>(tensor, name, code, args.num_rows, "rows of logits", logits, "logits");
  };
  args.logits = data_of(logits);
  args.temperature = rows.template operator()<float>(temperature, "temperature", kDLFloat);
  args.top_k = rows.template operator()<int64_t>(top_k, "top_k", kDLInt);
  args.top_p = rows.template operator()<float>(top_p, "top_p", kDLFloat);
  args.min_p = rows.template operator()<float>(min_p, "min_p", kDLFloat);
  args.uniforms = rows.template operator()<double>(uniforms, "uniforms", kDLFloat);
  args.tokens = rows.template operator()<int64_t>(tokens, "tokens", kDLInt);
  args.is_vector = has_aligned_heads(logits);
  const DeviceGuard guard(logits);
  check_launch(layers::launch_sample(args, stream_of(logits)), "cuda_sample_tokens");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_rms_norm, cuda_rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_fused_add_rms_norm, cuda_fused_add_rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_rotary_embedding, cuda_rotary_embedding);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_qk_norm_rotary, cuda_qk_norm_rotary);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_rotary_into_cache, cuda_rotary_into_cache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_silu_and_mul, cuda_silu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_embedding, cuda_embedding);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_sample_tokens, cuda_sample_tokens);

}  // namespace vllm
