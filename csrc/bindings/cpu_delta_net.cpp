#include <tvm/ffi/optional.h>

#include <initializer_list>
#include <tuple>

#include "../cpu/dispatch.h"
#include "state_requests.h"

namespace vllm {
namespace {

// x, out [tokens, channels]; weight float32 [taps, channels]; bias float32 [channels]; state
// [slots, taps - 1, channels].
void causal_conv1d(TensorView x, TensorView weight, tvm::ffi::Optional<TensorView> bias,
                   TensorView state, TensorView state_slots, TensorView query_start_loc,
                   TensorView seq_lens, TensorView out) {
  cpu::ConvArgs args;
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  args.channels = x.size(1);
  check_size(out, "out", 0, x.size(0), "rows of x");
  check_size(out, "out", 1, args.channels, "columns of x");
  check_same_type(args.out.type, out, "out", args.x.type, "x");
  check_cpu(weight, "weight", 2);
  check_type(weight, "weight", kDLFloat, 32);
  check_size(weight, "weight", 1, args.channels, "columns of x");
  check_contiguous(weight, "weight");
  args.taps = weight.size(0);
  VLLM_CHECK(
      args.taps >= 1 && args.taps <= cpu::kMaxTaps,
      "weight: given " << args.taps << " taps (dimension 0); accepted: 1 to " << cpu::kMaxTaps);
  check_cpu(state, "state", 3);
  check_contiguous(state, "state");
  check_size(state, "state", 1, args.taps - 1, "taps of weight - 1");
  check_size(state, "state", 2, args.channels, "columns of x");
  check_same_type(float_type(state, "state"), state, "state", args.x.type, "x");
  args.weight = static_cast<const float*>(data_of(weight));
  args.bias = nullptr;
  if (bias.has_value()) {
    check_vector(bias.value(), "bias", kDLFloat, 32, args.channels, "columns of x");
    args.bias = static_cast<const float*>(data_of(bias.value()));
  }
  args.state = data_of(state);
  args.requests = requests_of(query_start_loc, seq_lens, state_slots, x.size(0), state.size(0));
  cpu::kernels().causal_conv1d(args);
}

void check_delta_heads(const cpu::DeltaRuleArgs& args, const TensorView& query,
                       const TensorView& value) {
  VLLM_CHECK(args.num_key_heads >= 1 && args.num_value_heads >= args.num_key_heads &&
                 args.num_value_heads % args.num_key_heads == 0,
             "value: given " << args.num_value_heads << " heads; accepted: a multiple of the "
                             << args.num_key_heads << " heads of query");
  check_head_size(query, "query");
  check_head_size(value, "value");
}

// query, key [tokens, key heads, key_dim]; value, out [tokens, value heads, value_dim]; a, b
// [tokens, value heads]; decay_rate, dt_bias float32 [value heads]; state float32 [slots, value
// heads, key_dim, value_dim].
void gated_delta_rule(TensorView query, TensorView key, TensorView value, TensorView a,
                      TensorView b, TensorView decay_rate, TensorView dt_bias, TensorView state,
                      TensorView state_slots, TensorView query_start_loc, TensorView seq_lens,
                      TensorView out) {
  cpu::DeltaRuleArgs args;
  args.query = heads_of(query, "query");
  args.key = heads_of(key, "key");
  args.value = heads_of(value, "value");
  args.out = heads_of(out, "out");
  args.a = rows_of(a, "a");
  args.b = rows_of(b, "b");
  const int64_t num_tokens = query.size(0);
  args.num_key_heads = query.size(1);
  args.num_value_heads = value.size(1);
  args.key_dim = query.size(2);
  args.value_dim = value.size(2);
  check_delta_heads(args, query, value);
  check_size(key, "key", 1, args.num_key_heads, "heads of query");
  check_size(key, "key", 2, args.key_dim, "head size of query");
  check_size(out, "out", 1, args.num_value_heads, "heads of value");
  check_size(out, "out", 2, args.value_dim, "head size of value");
  check_size(a, "a", 1, args.num_value_heads, "heads of value");
  check_size(b, "b", 1, args.num_value_heads, "heads of value");
  for (const auto& [tensor, name, type] :
       {std::tuple{key, "key", args.key.type}, std::tuple{value, "value", args.value.type},
        std::tuple{a, "a", args.a.type}, std::tuple{b, "b", args.b.type},
        std::tuple{out, "out", args.out.type}}) {
    check_size(tensor, name, 0, num_tokens, "tokens of query");
    check_same_type(type, tensor, name, args.query.type, "query");
  }
  check_vector(decay_rate, "decay_rate", kDLFloat, 32, args.num_value_heads, "heads of value");
  check_vector(dt_bias, "dt_bias", kDLFloat, 32, args.num_value_heads, "heads of value");
  check_cpu(state, "state", 4);
  check_type(state, "state", kDLFloat, 32);
  check_contiguous(state, "state");
  check_size(state, "state", 1, args.num_value_heads, "heads of value");
  check_size(state, "state", 2, args.key_dim, "head size of query");
  check_size(state, "state", 3, args.value_dim, "head size of value");
  args.decay_rate = static_cast<const float*>(data_of(decay_rate));
  args.dt_bias = static_cast<const float*>(data_of(dt_bias));
  args.state = static_cast<float*>(data_of(state));
  args.requests = requests_of(query_start_loc, seq_lens, state_slots, num_tokens, state.size(0));
  cpu::kernels().gated_delta_rule(args);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(causal_conv1d, causal_conv1d);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated_delta_rule, gated_delta_rule);

}  // namespace vllm
