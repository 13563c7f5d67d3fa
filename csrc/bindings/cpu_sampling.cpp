#include "../cpu/dispatch.h"
#include "check.h"

namespace vllm {
namespace {

template <class T>
T* vector_of(const TensorView& tensor, const char* name, int code, int64_t num_rows) {
  check_vector(tensor, name, code, 8 * sizeof(T), num_rows, "rows of logits");
  return static_cast<T*>(data_of(tensor));
}

// tokens[r]: the largest of logits[r] where temperature[r] is 0, else drawn with uniforms[r].
void sample_tokens(TensorView logits, TensorView temperature, TensorView top_k, TensorView top_p,
                   TensorView min_p, TensorView uniforms, TensorView tokens) {
  const cpu::Rows rows = rows_of(logits, "logits");
  check_type(logits, "logits", kDLFloat, 32);
  cpu::SampleArgs args;
  args.logits = static_cast<const float*>(rows.data);
  args.stride = rows.stride;
  args.num_rows = logits.size(0);
  args.vocab = logits.size(1);
  VLLM_CHECK(args.vocab > 0,
             "logits: given shape " << shape_name(logits) << "; accepted: at least one column");
  args.temperature = vector_of<float>(temperature, "temperature", kDLFloat, args.num_rows);
  args.top_k = vector_of<int64_t>(top_k, "top_k", kDLInt, args.num_rows);
  args.top_p = vector_of<float>(top_p, "top_p", kDLFloat, args.num_rows);
  args.min_p = vector_of<float>(min_p, "min_p", kDLFloat, args.num_rows);
  args.uniforms = vector_of<double>(uniforms, "uniforms", kDLFloat, args.num_rows);
  args.tokens = vector_of<int64_t>(tokens, "tokens", kDLInt, args.num_rows);
  cpu::kernels().sample(args);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_tokens, sample_tokens);

}  // namespace vllm
