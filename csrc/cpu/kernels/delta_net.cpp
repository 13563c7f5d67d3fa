// Gated delta-net: a short causal convolution, and a recurrence over a state per request and head.
//
// Both walk the tokens of a request in order, from the state that its last step left behind, and
// do the same operations for a token wherever a step begins or ends: its bits do not depend on how
// the prompt was chunked. Channels, and columns of the recurrent state, are independent.
#include "recurrence.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr int64_t kChannels = 256;  // of the convolution that one thread takes at a time
constexpr float kNormEps = 1e-6f;

// ---------------------------------------------------------------- convolution

// The inputs of one request in channels [begin, end): of this step, before it of the state.
template <ElementType kType>
struct Inputs {
  using T = StorageOf<kType>;
  const T* x;      // of the first token
  int64_t stride;  // between tokens
  T* state;        // [taps - 1, channels]; the last row is the token before the first
  int64_t num_kept, channels;
  bool is_fresh;

  // Of token `at` of this step, negative for the tokens before it; null where there was none.
  const T* row(int64_t at) const {
    if (at >= 0) return x + at * stride;
    return is_fresh ? nullptr : state + (num_kept + at) * channels;
  }
};

template <ElementType kType>
void keep_last(const Inputs<kType>& inputs, int64_t num_tokens, int64_t begin, int64_t end) {
  using T = StorageOf<kType>;
  // A row moves towards the front, so none is overwritten before it is read.
  for (int64_t i = 0; i < inputs.num_kept; ++i) {
    const T* from = inputs.row(num_tokens - inputs.num_kept + i);
    T* to = inputs.state + i * inputs.channels;
    if (from == to) continue;
    const size_t num_bytes = static_cast<size_t>(end - begin) * sizeof(T);
    if (from) {
      __builtin_memcpy(to + begin, from + begin, num_bytes);
    } else {
      __builtin_memset(to + begin, 0, num_bytes);
    }
  }
}

template <ElementType kType>
void convolve(const ConvArgs& args, int64_t request, int64_t begin, int64_t end) {
  using T = StorageOf<kType>;
  const int64_t first = args.requests.query_start[request];
  const int64_t num_tokens = args.requests.query_start[request + 1] - first;
  if (num_tokens == 0) return;
  const int64_t num_kept = args.taps - 1;
  const Inputs<kType> inputs{
      static_cast<const T*>(args.x.data) + first * args.x.stride,
      args.x.stride,
      static_cast<T*>(args.state) + args.requests.slots[request] * num_kept * args.channels,
      num_kept,
      args.channels,
      is_fresh(args.requests, request)};
  for (int64_t t = 0; t < num_tokens; ++t) {
    const T* rows[kMaxTaps];
    for (int64_t tap = 0; tap < args.taps; ++tap) rows[tap] = inputs.row(t - num_kept + tap);
    T* out = static_cast<T*>(args.out.data) + (first + t) * args.out.stride;
    for (int64_t i = begin; i < end; i += kLanes) {
      const int count = lanes_left(end, i);
      F32x16 sum = args.bias ? load_first<ElementType::kFloat32>(args.bias + i, count) : zero();
      for (int64_t tap = 0; tap < args.taps; ++tap) {
        if (!rows[tap]) continue;
        const float* weight = args.weight + tap * args.channels + i;
        sum = fma(load_first<kType>(rows[tap] + i, count),
                  load_first<ElementType::kFloat32>(weight, count), sum);
      }
      const F32x16 silu = div(sum, add(set1(1.0f), exp(sub(zero(), sum))));
      store_first<kType>(out + i, silu, count);
    }
  }
  keep_last(inputs, num_tokens, begin, end);
}

// ---------------------------------------------------------------- delta rule

// Up to kTileTokens tokens of one head: keys of length 1, queries of length key_dim^-1/2.
struct Tile {
  float key[kTileTokens][kMaxHeadDim], query[kTileTokens][kMaxHeadDim];
  float decay[kTileTokens], beta[kTileTokens];
  float overlap[kTileTokens];  // key . query
};

float dot(const float* a, const float* b, int64_t size) {
  F32x16 sum = zero();
  for (int64_t i = 0; i < size; i += kLanes) sum = fma(load(a + i), load(b + i), sum);
  return reduce_add(sum);
}

// Widened, its padding zero, and divided by sqrt(its squared length + kNormEps).
template <ElementType kType>
void load_unit(const Heads& heads, int64_t token, int64_t head, int64_t dim, float factor,
               float* out) {
  const auto* x = static_cast<const StorageOf<kType>*>(heads.data) + token * heads.token_stride +
                  head * heads.head_stride;
  for (int64_t i = 0; i < dim; i += kLanes)
    store(out + i, load_first<kType>(x + i, lanes_left(dim, i)));
  const F32x16 scale = set1(factor / __builtin_sqrtf(dot(out, out, dim) + kNormEps));
  for (int64_t i = 0; i < dim; i += kLanes) store(out + i, mul(load(out + i), scale));
}

template <ElementType kType>
void load_tile(const DeltaRuleArgs& args, int64_t head, int64_t first, int64_t num_tokens,
               Tile& tile) {
  const int64_t key_head = head / (args.num_value_heads / args.num_key_heads);
  const float query_length = 1.0f / __builtin_sqrtf(static_cast<float>(args.key_dim));
  for (int64_t t = 0; t < num_tokens; ++t) {
    load_unit<kType>(args.key, first + t, key_head, args.key_dim, 1.0f, tile.key[t]);
    load_unit<kType>(args.query, first + t, key_head, args.key_dim, query_length, tile.query[t]);
    tile.overlap[t] = dot(tile.key[t], tile.query[t], args.key_dim);
    const float dt = softplus(element<kType>(args.a, first + t, head) + args.dt_bias[head]);
    tile.decay[t] = __builtin_expf(-args.decay_rate[head] * dt);
    tile.beta[t] = 1.0f / (1.0f + __builtin_expf(-element<kType>(args.b, first + t, head)));
  }
}

// What the state holds for a key and for a query: its transpose times each.
struct Reading {
  Columns key, query;
};

// Reads rows `stride` apart, and leaves them in `block` [dim, kColumns], which may be their place.
SIMD_INLINE Reading read(const float* rows, int64_t stride, float* block, const float* key,
                         const float* query, int64_t dim) {
  Reading sum{{zero(), zero()}, {zero(), zero()}};
  for (int64_t i = 0; i < dim; ++i) {
    const float* next = rows + i * stride + kColumns;  // what the next block of columns begins with
    __builtin_prefetch(next);
    __builtin_prefetch(next + kLanes);
    const Columns row = load_columns(rows + i * stride);
    store_columns(block + i * kColumns, row);
    sum.key = fma(set1(key[i]), row, sum.key);
    sum.query = fma(set1(query[i]), row, sum.query);
  }
  return sum;
}

// state = decay * state + key (outer product) delta.
SIMD_INLINE Columns updated(const float* row, F32x16 decay, float key, const Columns& delta) {
  return fma(set1(key), delta, mul(decay, load_columns(row)));
}

// A block of columns of the state: rows `stride` apart in memory, and a copy that stays in the
// cache.
struct Block {
  float* rows;
  int64_t stride, column;
  float* copy;  // [key_dim, kColumns]
};

// Tokens of a tile over one block of columns. Each pass over the state writes what one token
// changes and reads, of the same values, what the next one asks for.
template <ElementType kType>
void run_block(const DeltaRuleArgs& args, int64_t head, int64_t first, int64_t num_tokens,
               const Tile& tile, const Block& block) {
  using T = StorageOf<kType>;
  const int64_t dim = args.key_dim;
  const int low = lanes_left(args.value_dim, block.column);
  const int high = args.value_dim - block.column > kLanes
                       ? lanes_left(args.value_dim, block.column + kLanes)
                       : 0;
  Reading reading = read(block.rows, block.stride, block.copy, tile.key[0], tile.query[0], dim);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const F32x16 decay = set1(tile.decay[t]), beta = set1(tile.beta[t]);
    const auto at = [&](const Heads& heads) {
      return static_cast<T*>(heads.data) + (first + t) * heads.token_stride +
             head * heads.head_stride + block.column;
    };
    const T* value = at(args.value);
    const Columns wanted{load_first<kType>(value, low), load_first<kType>(value + kLanes, high)};
    const Columns delta{mul(beta, sub(wanted.low, mul(decay, reading.key.low))),
                        mul(beta, sub(wanted.high, mul(decay, reading.key.high)))};
    const Columns result = fma(set1(tile.overlap[t]), delta, mul(decay, reading.query));
    T* out = at(args.out);
    store_first<kType>(out, result.low, low);
    store_first<kType>(out + kLanes, result.high, high);
    const float* key = tile.key[t];
    if (t + 1 == num_tokens) {
      for (int64_t i = 0; i < dim; ++i) {
        const Columns now = updated(block.copy + i * kColumns, decay, key[i], delta);
        store_columns(block.rows + i * block.stride, now);
      }
      return;
    }
    const float *next_key = tile.key[t + 1], *next_query = tile.query[t + 1];
    reading = {{zero(), zero()}, {zero(), zero()}};
    for (int64_t i = 0; i < dim; ++i) {
      float* row = block.copy + i * kColumns;
      const Columns now = updated(row, decay, key[i], delta);
      store_columns(row, now);
      reading.key = fma(set1(next_key[i]), now, reading.key);
      reading.query = fma(set1(next_query[i]), now, reading.query);
    }
  }
}

// Copies `dim` rows of `width` columns from one place to another.
void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t dim,
               int64_t width) {
  for (int64_t i = 0; i < dim; ++i) {
    __builtin_memcpy(to + i * to_stride, from + i * from_stride, width * sizeof(float));
  }
}

template <ElementType kType>
void run_head(const DeltaRuleArgs& args, int64_t request, int64_t head) {
  const int64_t begin = args.requests.query_start[request];
  const int64_t end = args.requests.query_start[request + 1];
  if (begin == end) return;
  const int64_t dim = args.key_dim, stride = args.value_dim;
  float* state =
      args.state + (args.requests.slots[request] * args.num_value_heads + head) * dim * stride;
  if (is_fresh(args.requests, request)) __builtin_memset(state, 0, dim * stride * sizeof(float));
  Tile tile;
  alignas(64) float copy[kMaxHeadDim * kColumns];
  for (int64_t first = begin; first < end; first += kTileTokens) {
    const int64_t num_tokens = end - first < kTileTokens ? end - first : kTileTokens;
    load_tile<kType>(args, head, first, num_tokens, tile);
    for (int64_t column = 0; column < stride; column += kColumns) {
      float* rows = state + column;
      if (const int64_t width = stride - column; width < kColumns) {
        __builtin_memset(copy, 0, sizeof(copy));
        copy_rows(rows, stride, copy, kColumns, dim, width);
        run_block<kType>(args, head, first, num_tokens, tile, {copy, kColumns, column, copy});
        copy_rows(copy, kColumns, rows, stride, dim, width);
      } else {
        run_block<kType>(args, head, first, num_tokens, tile, {rows, stride, column, copy});
      }
    }
  }
}

}  // namespace

void causal_conv1d(const ConvArgs& args) {
  const int64_t num_chunks = (args.channels + kChannels - 1) / kChannels;
  const int64_t num_tokens = args.requests.query_start[args.requests.num_requests];
  const bool is_large = num_tokens * args.channels > kSerialElements;
  share_items(args.requests.num_requests * num_chunks, is_large, [&](int64_t item) {
    const int64_t begin = item % num_chunks * kChannels;
    const int64_t end = begin + kChannels < args.channels ? begin + kChannels : args.channels;
    with_float_type(args.x.type, [&](auto tag) {
      convolve<decltype(tag)::value>(args, item / num_chunks, begin, end);
    });
  });
}

void gated_delta_rule(const DeltaRuleArgs& args) {
  const int64_t num_tokens = args.requests.query_start[args.requests.num_requests];
  const int64_t num_states = args.num_value_heads * args.key_dim * args.value_dim;
  const bool is_large = num_tokens * num_states > kSerialElements;
  share_items(args.requests.num_requests * args.num_value_heads, is_large, [&](int64_t item) {
    with_float_type(args.query.type, [&](auto tag) {
      run_head<decltype(tag)::value>(args, item / args.num_value_heads,
                                     item % args.num_value_heads);
    });
  });
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
