// Row-wise layers: RMS norm, rotary embedding, SiLU, GELU and sigmoid gates. Each row is computed
// alone, its sums in one fixed order of sixteen-lane vectors.
#include "parallel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr int64_t kSerialElements = 1 << 14;  // elements that waking other threads must be worth

// Calls f(row) for every row of `row_size` elements, on several threads if there is enough to do.
template <class F>
void share_rows(int64_t num_rows, int64_t row_size, F&& f) {
  const int64_t rows_per_item = kSerialElements / 4 / (row_size + 1) + 1;
  const int64_t num_items = (num_rows + rows_per_item - 1) / rows_per_item;
  share_items(num_items, num_rows * row_size > kSerialElements, [&](int64_t item) {
    const int64_t begin = item * rows_per_item;
    const int64_t end = begin + rows_per_item < num_rows ? begin + rows_per_item : num_rows;
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

int lanes_left(int64_t size, int64_t at) {
  return size - at < kLanes ? static_cast<int>(size - at) : kLanes;
}

SIMD_INLINE F32x16 exp_of_minus_plus_1(F32x16 x) { return add(set1(1.0f), exp(sub(zero(), x))); }
SIMD_INLINE F32x16 silu(F32x16 x) { return div(x, exp_of_minus_plus_1(x)); }
SIMD_INLINE F32x16 sigmoid(F32x16 x) { return div(set1(1.0f), exp_of_minus_plus_1(x)); }

// x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / 2 * (1 + tanh(u)).
SIMD_INLINE F32x16 gelu_tanh(F32x16 x) {
  const F32x16 cubic = fma(mul(x, x), set1(0.044715f), set1(1.0f));
  return div(x, exp_of_minus_plus_1(mul(mul(x, cubic), set1(1.5957691216f))));
}

// x * Phi(x); the normal distribution's tail by Abramowitz and Stegun 7.1.26, to 1.5e-7.
SIMD_INLINE F32x16 gelu(F32x16 x) {
  const F32x16 z = mul(max(x, sub(zero(), x)), set1(0.70710678f));
  const F32x16 t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
  F32x16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F32x16 tail = mul(mul(mul(p, t), exp(sub(zero(), mul(z, z)))), set1(0.5f));
  return mul(x, select(less(x, zero()), tail, sub(set1(1.0f), tail)));
}

template <ElementType kType>
void norm_row(const NormArgs& args, int64_t token, int64_t head) {
  using T = StorageOf<kType>;
  const auto at = [&](const Heads& heads) {
    return static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
  };
  const T* x = at(args.x);
  T* residual = args.residual.data ? at(args.residual) : nullptr;
  const T* gate = args.gate.data ? at(args.gate) : nullptr;
  T* out = at(args.out);
  constexpr int kChains = 4;
  F32x16 squares[kChains];
  for (int c = 0; c < kChains; ++c) squares[c] = zero();
  for (int64_t base = 0; base < args.dim; base += kChains * kLanes) {
    for (int c = 0; c < kChains && base + c * kLanes < args.dim; ++c) {
      const int64_t i = base + c * kLanes;
      const int count = lanes_left(args.dim, i);
      F32x16 value = load_first<kType>(x + i, count);
      if (residual) {
        // The sum is rounded to the residual's type before it is squared, as it is later read.
        store_first<kType>(residual + i, add(value, load_first<kType>(residual + i, count)), count);
        value = load_first<kType>(residual + i, count);
      }
      if (args.is_gated_before) value = mul(value, silu(load_first<kType>(gate + i, count)));
      squares[c] = fma(value, value, squares[c]);
    }
  }
  const float total = reduce_add(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const F32x16 factor =
      set1(1.0f / __builtin_sqrtf(total / static_cast<float>(args.dim) + args.eps));
  const T* source = residual ? residual : x;
  const float* weights = args.weight + head * args.weight_stride;
  for (int64_t i = 0; i < args.dim; i += kLanes) {
    const int count = lanes_left(args.dim, i);
    const F32x16 weight = load_first<ElementType::kFloat32>(weights + i, count);
    const F32x16 gated = gate ? silu(load_first<kType>(gate + i, count)) : zero();
    F32x16 value = load_first<kType>(source + i, count);
    if (args.is_gated_before) value = mul(value, gated);
    value = mul(mul(value, factor), weight);
    if (gate && !args.is_gated_before) value = mul(value, gated);
    store_first<kType>(out + i, value, count);
  }
}

struct Pair {
  F32x16 first, second;
};
SIMD_INLINE Pair rotate(Pair x, F32x16 cos, F32x16 sin) {
  return {sub(mul(x.first, cos), mul(x.second, sin)), add(mul(x.second, cos), mul(x.first, sin))};
}

template <ElementType kType>
void rotate_neox(StorageOf<kType>* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int count = lanes_left(half, i);
    const Pair in{load_first<kType>(x + i, count), load_first<kType>(x + half + i, count)};
    const Pair out = rotate(in, load_first<ElementType::kFloat32>(cos + i, count),
                            load_first<ElementType::kFloat32>(sin + i, count));
    store_first<kType>(x + i, out.first, count);
    store_first<kType>(x + half + i, out.second, count);
  }
}

template <ElementType kType>
void rotate_interleaved(StorageOf<kType>* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int count = lanes_left(half, i);
    float pairs[2 * kLanes] = {}, first[kLanes], second[kLanes];
    for (int j = 0; j < 2 * count; j += kLanes) {
      store(pairs + j, load_first<kType>(x + 2 * i + j, lanes_left(2 * count, j)));
    }
    for (int j = 0; j < kLanes; ++j) {
      first[j] = pairs[2 * j];
      second[j] = pairs[2 * j + 1];
    }
    const Pair out =
        rotate({load(first), load(second)}, load_first<ElementType::kFloat32>(cos + i, count),
               load_first<ElementType::kFloat32>(sin + i, count));
    store(first, out.first);
    store(second, out.second);
    for (int j = 0; j < kLanes; ++j) {
      pairs[2 * j] = first[j];
      pairs[2 * j + 1] = second[j];
    }
    for (int j = 0; j < 2 * count; j += kLanes) {
      store_first<kType>(x + 2 * i + j, load(pairs + j), lanes_left(2 * count, j));
    }
  }
}

void rotate_heads(const RotaryArgs& args, const Heads& heads, int64_t num_heads, int64_t token) {
  const int64_t half = args.rotary_dim / 2;
  const float* cos = args.cos_sin + args.positions[token] * args.rotary_dim;
  with_float_type(heads.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    for (int64_t h = 0; h < num_heads; ++h) {
      auto* x = static_cast<StorageOf<kType>*>(heads.data) + token * heads.token_stride +
                h * heads.head_stride;
      if (args.is_neox) {
        rotate_neox<kType>(x, cos, cos + half, half);
      } else {
        rotate_interleaved<kType>(x, cos, cos + half, half);
      }
    }
  });
}

}  // namespace

void rms_norm(const NormArgs& args) {
  const int64_t num_rows = args.num_tokens * args.num_heads;
  share_rows(num_rows, args.dim, [&](int64_t row) {
    with_float_type(args.x.type, [&](auto tag) {
      norm_row<decltype(tag)::value>(args, row / args.num_heads, row % args.num_heads);
    });
  });
}

void rotary(const RotaryArgs& args) {
  const int64_t num_heads = args.num_query_heads + args.num_key_heads;
  share_rows(args.num_tokens, num_heads * args.rotary_dim, [&](int64_t token) {
    rotate_heads(args, args.query, args.num_query_heads, token);
    if (args.key.data) rotate_heads(args, args.key, args.num_key_heads, token);
  });
}

// min(x, limit) * sigmoid(1.702 min(x, limit)) * (y clamped to +-limit + 1).
SIMD_INLINE F32x16 clamped_swiglu(F32x16 x, F32x16 y, F32x16 limit) {
  const F32x16 gate = min(x, limit);
  const F32x16 up = max(min(y, limit), sub(zero(), limit));
  const F32x16 glu = div(gate, exp_of_minus_plus_1(mul(gate, set1(1.702f))));
  return mul(glu, add(up, set1(1.0f)));
}

// silu(x) * y with silu(x) = x / (1 + e^-x).
void silu_and_mul(const SiluArgs& args) {
  share_rows(args.m, args.n, [&](int64_t row) {
    with_float_type(args.x.type, [&](auto tag) {
      constexpr ElementType kType = decltype(tag)::value;
      const auto* x = static_cast<const StorageOf<kType>*>(args.x.data) + row * args.x.stride;
      auto* out = static_cast<StorageOf<kType>*>(args.out.data) + row * args.out.stride;
      for (int64_t i = 0; i < args.n; i += kLanes) {
        const int count = lanes_left(args.n, i);
        const F32x16 gate = load_first<kType>(x + i, count);
        const F32x16 up = load_first<kType>(x + args.n + i, count);
        const F32x16 value =
            args.limit > 0 ? clamped_swiglu(gate, up, set1(args.limit)) : mul(silu(gate), up);
        store_first<kType>(out + i, value, count);
      }
    });
  });
}

void gelu_and_mul(const GeluArgs& args) {
  share_rows(args.m, args.n, [&](int64_t row) {
    with_float_type(args.x.type, [&](auto tag) {
      constexpr ElementType kType = decltype(tag)::value;
      const auto* x = static_cast<const StorageOf<kType>*>(args.x.data) + row * args.x.stride;
      auto* out = static_cast<StorageOf<kType>*>(args.out.data) + row * args.out.stride;
      for (int64_t i = 0; i < args.n; i += kLanes) {
        const int count = lanes_left(args.n, i);
        const F32x16 gate = load_first<kType>(x + i, count);
        const F32x16 up = load_first<kType>(x + args.n + i, count);
        store_first<kType>(out + i, mul(args.is_tanh ? gelu_tanh(gate) : gelu(gate), up), count);
      }
    });
  });
}

void soft_cap(const SoftCapArgs& args) {
  share_rows(args.m, args.n, [&](int64_t row) {
    with_float_type(args.x.type, [&](auto tag) {
      constexpr ElementType kType = decltype(tag)::value;
      auto* x = static_cast<StorageOf<kType>*>(args.x.data) + row * args.x.stride;
      for (int64_t i = 0; i < args.n; i += kLanes) {
        const int count = lanes_left(args.n, i);
        store_first<kType>(x + i, soft_cap(load_first<kType>(x + i, count), args.softcap), count);
      }
    });
  });
}

void mul_sigmoid(const SigmoidArgs& args) {
  share_rows(args.num_tokens * args.num_heads, args.dim, [&](int64_t row) {
    with_float_type(args.x.type, [&](auto tag) {
      constexpr ElementType kType = decltype(tag)::value;
      const auto at = [&](const Heads& heads) {
        return static_cast<StorageOf<kType>*>(heads.data) +
               row / args.num_heads * heads.token_stride + row % args.num_heads * heads.head_stride;
      };
      auto* x = at(args.x);
      const auto* gate = at(args.gate);
      float lanes[kLanes];
      store(lanes, load_first<kType>(gate, 1));
      const F32x16 of_head = sigmoid(set1(lanes[0]));
      for (int64_t i = 0; i < args.dim; i += kLanes) {
        const int count = lanes_left(args.dim, i);
        const F32x16 factor =
            args.is_per_head ? of_head : sigmoid(load_first<kType>(gate + i, count));
        store_first<kType>(x + i, mul(load_first<kType>(x + i, count), factor), count);
      }
    });
  });
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
