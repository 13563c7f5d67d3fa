#include <initializer_list>
#include <tuple>

#include "state_requests.h"

namespace vllm {
namespace {

void check_groups(const cpu::Mamba2Args& args, const TensorView& x, const TensorView& b) {
  VLLM_CHECK(args.num_groups >= 1 && args.num_heads >= args.num_groups &&
                 args.num_heads % args.num_groups == 0,
             "x: given " << args.num_heads << " heads; accepted: a multiple of the "
                         << args.num_groups << " groups of b");
  check_head_size(x, "x");
  check_head_size(b, "b");
}

// x, out [tokens, heads, head_dim]; dt [tokens, heads]; b, c [tokens, groups, state_size];
// decay_rate, dt_bias, skip float32 [heads]; state float32 [slots, heads, state_size, head_dim].
void mamba2_scan(TensorView x, TensorView dt, TensorView b, TensorView c, TensorView decay_rate,
                 TensorView dt_bias, TensorView skip, TensorView state, TensorView state_slots,
                 TensorView query_start_loc, TensorView seq_lens, double dt_min, double dt_max,
                 TensorView out) {
  cpu::Mamba2Args args;
  args.x = heads_of(x, "x");
  args.out = heads_of(out, "out");
  args.b = heads_of(b, "b");
  args.c = heads_of(c, "c");
  args.dt = rows_of(dt, "dt");
  const int64_t num_tokens = x.size(0);
  args.num_heads = x.size(1);
  args.head_dim = x.size(2);
  args.num_groups = b.size(1);
  args.state_size = b.size(2);
  args.dt_min = static_cast<float>(dt_min);
  args.dt_max = static_cast<float>(dt_max);
  check_groups(args, x, b);
  check_size(c, "c", 1, args.num_groups, "groups of b");
  check_size(c, "c", 2, args.state_size, "state size of b");
  check_size(out, "out", 1, args.num_heads, "heads of x");
  check_size(out, "out", 2, args.head_dim, "head size of x");
  check_size(dt, "dt", 1, args.num_heads, "heads of x");
  for (const auto& [tensor, name, type] :
       {std::tuple{dt, "dt", args.dt.type}, std::tuple{b, "b", args.b.type},
        std::tuple{c, "c", args.c.type}, std::tuple{out, "out", args.out.type}}) {
    check_size(tensor, name, 0, num_tokens, "tokens of x");
    check_same_type(type, tensor, name, args.x.type, "x");
  }
  for (const auto& [tensor, name, target] :
       {std::tuple{decay_rate, "decay_rate", &args.decay_rate},
        std::tuple{dt_bias, "dt_bias", &args.dt_bias}, std::tuple{skip, "skip", &args.skip}}) {
    check_vector(tensor, name, kDLFloat, 32, args.num_heads, "heads of x");
    *target = static_cast<const float*>(data_of(tensor));
  }
  check_cpu(state, "state", 4);
  check_type(state, "state", kDLFloat, 32);
  check_contiguous(state, "state");
  check_size(state, "state", 1, args.num_heads, "heads of x");
  check_size(state, "state", 2, args.state_size, "state size of b");
  check_size(state, "state", 3, args.head_dim, "head size of x");
  args.state = static_cast<float*>(data_of(state));
  args.requests = requests_of(query_start_loc, seq_lens, state_slots, num_tokens, state.size(0));
  cpu::kernels().mamba2_scan(args);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(mamba2_scan, mamba2_scan);

}  // namespace vllm
