#include <initializer_list>
#include <tuple>
#include <utility>

#include "../cpu/dispatch.h"
#include "check.h"

namespace vllm {
namespace {

// query_start_loc, seq_lens and state_slots, int32, with what they say checked.
cpu::StateRequests requests_of(const TensorView& query_start_loc, const TensorView& seq_lens,
                               const TensorView& state_slots, int64_t num_tokens,
                               int64_t num_slots) {
  cpu::StateRequests requests;
  check_cpu(state_slots, "state_slots", 1);
  requests.num_requests = state_slots.size(0);
  check_vector(state_slots, "state_slots", kDLInt, 32, requests.num_requests, "requests");
  check_vector(seq_lens, "seq_lens", kDLInt, 32, requests.num_requests, "size of state_slots");
  check_vector(query_start_loc, "query_start_loc", kDLInt, 32, requests.num_requests + 1,
               "size of state_slots + 1");
  requests.query_start = static_cast<const int32_t*>(data_of(query_start_loc));
  requests.seq_lens = static_cast<const int32_t*>(data_of(seq_lens));
  requests.slots = static_cast<const int32_t*>(data_of(state_slots));
  VLLM_CHECK(requests.query_start[0] == 0,
             "query_start_loc: given first element " << requests.query_start[0] << "; accepted: 0");
  for (int64_t r = 0; r < requests.num_requests; ++r) {
    const int64_t query_len = int64_t{requests.query_start[r + 1]} - requests.query_start[r];
    VLLM_CHECK(query_len >= 0,
               "query_start_loc: decreases after request " << r << "; accepted: ascending offsets");
    const int64_t seq_len = requests.seq_lens[r];
    VLLM_CHECK(seq_len >= query_len || seq_len == 0,
               "seq_lens: given " << seq_len << " for request " << r << " of " << query_len
                                  << " query tokens; accepted: at least as many, or 0 to fill up");
    VLLM_CHECK(requests.slots[r] >= 0 && requests.slots[r] < num_slots,
               "state_slots: given " << requests.slots[r] << " for request " << r
                                     << "; accepted: 0 to " << num_slots - 1
                                     << " (slots of state)");
  }
  VLLM_CHECK(requests.query_start[requests.num_requests] == num_tokens,
             "query_start_loc: given last element " << requests.query_start[requests.num_requests]
                                                    << "; accepted: " << num_tokens << " (tokens)");
  return requests;
}

// x, out [tokens, channels]; weight float32 [taps, channels]; state [slots, taps - 1, channels].
void causal_conv1d(TensorView x, TensorView weight, TensorView state, TensorView state_slots,
                   TensorView query_start_loc, TensorView seq_lens, TensorView out) {
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
  for (const auto& [tensor, name] : {std::pair{query, "query"}, std::pair{value, "value"}}) {
    VLLM_CHECK(
        tensor.size(2) >= 1 && tensor.size(2) <= cpu::kMaxHeadDim,
        name << ": given heads of " << tensor.size(2) << "; accepted: 1 to " << cpu::kMaxHeadDim);
  }
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
