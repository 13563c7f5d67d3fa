// Mamba2: a recurrence over a state per request and head.
//
// It walks the tokens of a request in order, as `delta_net.cpp` does: the bits of a token do not
// depend on how the prompt was chunked. Columns of the state are independent.
#include "recurrence.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

// Up to kTileTokens tokens of one head.
struct Tile {
  float b[kTileTokens][kMaxHeadDim], c[kTileTokens][kMaxHeadDim];
  float step[kTileTokens], decay[kTileTokens];
};

template <ElementType kType>
void load_row(const Heads& heads, int64_t token, int64_t head, int64_t dim, float* out) {
  const auto* x = static_cast<const StorageOf<kType>*>(heads.data) + token * heads.token_stride +
                  head * heads.head_stride;
  for (int64_t i = 0; i < dim; i += kLanes)
    store(out + i, load_first<kType>(x + i, lanes_left(dim, i)));
}

template <ElementType kType>
void load_tile(const Mamba2Args& args, int64_t head, int64_t first, int64_t num_tokens,
               Tile& tile) {
  const int64_t group = head / (args.num_heads / args.num_groups);
  for (int64_t t = 0; t < num_tokens; ++t) {
    load_row<kType>(args.b, first + t, group, args.state_size, tile.b[t]);
    load_row<kType>(args.c, first + t, group, args.state_size, tile.c[t]);
    float step = softplus(element<kType>(args.dt, first + t, head) + args.dt_bias[head]);
    if (step < args.dt_min) step = args.dt_min;
    if (step > args.dt_max) step = args.dt_max;
    tile.step[t] = step;
    tile.decay[t] = __builtin_expf(-args.decay_rate[head] * step);
  }
}

// Tokens of a tile over the columns from `column` on; `copy` [state_size, kColumns] stays in the
// cache meanwhile.
template <ElementType kType>
void run_block(const Mamba2Args& args, int64_t head, int64_t first, int64_t num_tokens,
               const Tile& tile, int64_t column, float* state, float* copy) {
  using T = StorageOf<kType>;
  constexpr ElementType kFloat = ElementType::kFloat32;
  const int64_t dim = args.state_size, stride = args.head_dim;
  const int low = lanes_left(stride, column);
  const int high = stride - column > kLanes ? lanes_left(stride, column + kLanes) : 0;
  const auto load_part = [&]<ElementType kFrom>(const StorageOf<kFrom>* p, TypeTag<kFrom>) {
    return Columns{load_first<kFrom>(p, low), high ? load_first<kFrom>(p + kLanes, high) : zero()};
  };
  const auto store_part = [&]<ElementType kTo>(StorageOf<kTo>* p, const Columns& v, TypeTag<kTo>) {
    store_first<kTo>(p, v.low, low);
    if (high) store_first<kTo>(p + kLanes, v.high, high);
  };
  const auto at = [&](const Heads& heads, int64_t t) {
    return static_cast<T*>(heads.data) + (first + t) * heads.token_stride +
           head * heads.head_stride + column;
  };
  for (int64_t i = 0; i < dim; ++i) {
    store_columns(copy + i * kColumns, load_part(state + i * stride + column, TypeTag<kFloat>{}));
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    const F32x16 decay = set1(tile.decay[t]);
    const Columns value = load_part(at(args.x, t), TypeTag<kType>{});
    const Columns added = mul(set1(tile.step[t]), value);
    Columns sum = mul(set1(args.skip[head]), value);
    for (int64_t i = 0; i < dim; ++i) {
      float* row = copy + i * kColumns;
      const Columns now = fma(set1(tile.b[t][i]), added, mul(decay, load_columns(row)));
      store_columns(row, now);
      sum = fma(set1(tile.c[t][i]), now, sum);
    }
    store_part(at(args.out, t), sum, TypeTag<kType>{});
  }
  for (int64_t i = 0; i < dim; ++i) {
    store_part(state + i * stride + column, load_columns(copy + i * kColumns), TypeTag<kFloat>{});
  }
}

template <ElementType kType>
void run_head(const Mamba2Args& args, int64_t request, int64_t head) {
  const int64_t begin = args.requests.query_start[request];
  const int64_t end = args.requests.query_start[request + 1];
  if (begin == end) return;
  const int64_t size = args.state_size * args.head_dim;
  float* state = args.state + (args.requests.slots[request] * args.num_heads + head) * size;
  if (is_fresh(args.requests, request)) __builtin_memset(state, 0, size * sizeof(float));
  Tile tile;
  alignas(64) float copy[kMaxHeadDim * kColumns];
  for (int64_t first = begin; first < end; first += kTileTokens) {
    const int64_t num_tokens = end - first < kTileTokens ? end - first : kTileTokens;
    load_tile<kType>(args, head, first, num_tokens, tile);
    for (int64_t column = 0; column < args.head_dim; column += kColumns) {
      run_block<kType>(args, head, first, num_tokens, tile, column, state, copy);
    }
  }
}

}  // namespace

void mamba2_scan(const Mamba2Args& args) {
  const int64_t num_tokens = args.requests.query_start[args.requests.num_requests];
  const int64_t num_states = args.num_heads * args.state_size * args.head_dim;
  const bool is_large = num_tokens * num_states > kSerialElements;
  share_items(args.requests.num_requests * args.num_heads, is_large, [&](int64_t item) {
    with_float_type(args.x.type, [&](auto tag) {
      run_head<decltype(tag)::value>(args, item / args.num_heads, item % args.num_heads);
    });
  });
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
