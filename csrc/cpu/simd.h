// Sixteen float32 lanes, whatever the instruction set: kernels written on F32x16 perform the same
// operations in the same order everywhere, which is what makes their results equal bit for bit.
#pragma once
#include "types.h"

#if defined(VLLM_CPU_AVX512)
#include "simd_avx512.h"
#elif defined(VLLM_CPU_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {

constexpr int kLanes = 16;

struct F32x16 {
  FloatReg r[kRegs];
};
struct I32x16 {
  IntReg r[kRegs];
};
struct Mask16 {
  MaskReg r[kRegs];
};

#define VLLM_LIFT(Out, expression)                       \
  Out out;                                               \
  for (int i = 0; i < kRegs; ++i) out.r[i] = expression; \
  return out

SIMD_INLINE F32x16 set1(float v) { VLLM_LIFT(F32x16, reg_set1(v)); }
SIMD_INLINE F32x16 zero() { return set1(0.0f); }
SIMD_INLINE F32x16 load(const float* p) { VLLM_LIFT(F32x16, reg_load(p + i * kRegLanes)); }
SIMD_INLINE void store(float* p, const F32x16& v) {
  for (int i = 0; i < kRegs; ++i) reg_store(p + i * kRegLanes, v.r[i]);
}
// Stops the compiler from reading v's memory again at each use.
SIMD_INLINE void keep_in_register(FloatReg& v) {
#if defined(VLLM_CPU_AVX512) || defined(VLLM_CPU_AVX2)
  asm("" : "+v"(v));
#else
  (void)v;
#endif
}
SIMD_INLINE F32x16 add(F32x16 a, F32x16 b) { VLLM_LIFT(F32x16, reg_add(a.r[i], b.r[i])); }
SIMD_INLINE F32x16 sub(F32x16 a, F32x16 b) { VLLM_LIFT(F32x16, reg_sub(a.r[i], b.r[i])); }
SIMD_INLINE F32x16 mul(F32x16 a, F32x16 b) { VLLM_LIFT(F32x16, reg_mul(a.r[i], b.r[i])); }
SIMD_INLINE F32x16 div(F32x16 a, F32x16 b) { VLLM_LIFT(F32x16, reg_div(a.r[i], b.r[i])); }
// The second operand where either is NaN.
SIMD_INLINE F32x16 max(F32x16 a, F32x16 b) { VLLM_LIFT(F32x16, reg_max(a.r[i], b.r[i])); }
SIMD_INLINE F32x16 min(F32x16 a, F32x16 b) { VLLM_LIFT(F32x16, reg_min(a.r[i], b.r[i])); }
// a * b + c
SIMD_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  VLLM_LIFT(F32x16, reg_fma(a.r[i], b.r[i], c.r[i]));
}

SIMD_INLINE I32x16 set1(int v) { VLLM_LIFT(I32x16, reg_set1(v)); }
SIMD_INLINE I32x16 add(I32x16 a, I32x16 b) { VLLM_LIFT(I32x16, reg_add(a.r[i], b.r[i])); }
SIMD_INLINE I32x16 sub(I32x16 a, I32x16 b) { VLLM_LIFT(I32x16, reg_sub(a.r[i], b.r[i])); }
SIMD_INLINE I32x16 bit_and(I32x16 a, I32x16 b) { VLLM_LIFT(I32x16, reg_and(a.r[i], b.r[i])); }
SIMD_INLINE I32x16 bit_or(I32x16 a, I32x16 b) { VLLM_LIFT(I32x16, reg_or(a.r[i], b.r[i])); }
template <int kBits>
SIMD_INLINE I32x16 shift_left(I32x16 a) {
  VLLM_LIFT(I32x16, reg_shift_left<kBits>(a.r[i]));
}
template <int kBits>
SIMD_INLINE I32x16 shift_right(I32x16 a) {
  VLLM_LIFT(I32x16, reg_shift_right<kBits>(a.r[i]));
}
SIMD_INLINE I32x16 bits(F32x16 a) { VLLM_LIFT(I32x16, reg_bits(a.r[i])); }
SIMD_INLINE F32x16 from_bits(I32x16 a) { VLLM_LIFT(F32x16, reg_from_bits(a.r[i])); }

SIMD_INLINE Mask16 greater(I32x16 a, I32x16 b) { VLLM_LIFT(Mask16, reg_greater(a.r[i], b.r[i])); }
SIMD_INLINE Mask16 less(F32x16 a, F32x16 b) { VLLM_LIFT(Mask16, reg_less(a.r[i], b.r[i])); }
SIMD_INLINE Mask16 is_nan(F32x16 a) { VLLM_LIFT(Mask16, reg_is_nan(a.r[i])); }
SIMD_INLINE F32x16 select(Mask16 m, F32x16 yes, F32x16 no) {
  VLLM_LIFT(F32x16, reg_select(m.r[i], yes.r[i], no.r[i]));
}
SIMD_INLINE I32x16 select(Mask16 m, I32x16 yes, I32x16 no) {
  VLLM_LIFT(I32x16, reg_select(m.r[i], yes.r[i], no.r[i]));
}
SIMD_INLINE I32x16 lane_index() {
  static const int kIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  VLLM_LIFT(I32x16, reg_load(kIndex + i * kRegLanes));
}
// Lanes [begin, end) of v, and `fill` in the others.
SIMD_INLINE F32x16 keep_lanes(F32x16 v, int begin, int end, float fill) {
  const F32x16 f = set1(fill);
  const F32x16 head = select(greater(set1(end), lane_index()), v, f);
  return select(greater(set1(begin), lane_index()), f, head);
}

// Sums and maxima over lanes, in one fixed order.
SIMD_INLINE float reduce_add(F32x16 v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
SIMD_INLINE float reduce_max(F32x16 v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
  }
  return lanes[0];
}

// e^v with relative error below 2^-23 (measured: 1.9 * 2^-24) for v in [-86, 88.72]; 0 below, the
// value at 88.72 above; NaN stays NaN.
// Cody-Waite reduction by ln 2 in two parts, then a degree-6 minimax polynomial.
SIMD_INLINE F32x16 exp(F32x16 v) {
  const F32x16 magic = set1(12582912.0f);  // 1.5 * 2^23: an addition rounds to an integer
  const F32x16 x = min(set1(88.72f), v);
  const F32x16 shifted = fma(x, set1(1.44269504f), magic);
  const F32x16 n = sub(shifted, magic);
  F32x16 r = fma(n, set1(-0x1.62e4p-1f), x);
  r = fma(n, set1(-0x1.7f7d1cp-20f), r);
  F32x16 p = set1(0x1.6a224ep-10f);
  p = fma(p, r, set1(0x1.123b04p-7f));
  p = fma(p, r, set1(0x1.5558f8p-5f));
  p = fma(p, r, set1(0x1.555490p-3f));
  p = fma(p, r, set1(0x1.fffffcp-2f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  // n reaches 128, one past the largest exponent: scale by 2^(n-1), then by 2.
  const F32x16 scaled = from_bits(add(bits(p), shift_left<23>(sub(bits(shifted), set1(1)))));
  return select(less(x, set1(-86.0f)), zero(), add(scaled, scaled));
}

// softcap * tanh(v / softcap), with tanh(x) = 1 - 2 / (1 + e^2x).
SIMD_INLINE F32x16 soft_cap(F32x16 v, float softcap) {
  const F32x16 cap = set1(softcap);
  const F32x16 grown = exp(mul(v, set1(2.0f / softcap)));
  return sub(cap, div(add(cap, cap), add(set1(1.0f), grown)));
}

template <ElementType kType>
struct Element;
template <>
struct Element<ElementType::kFloat32> {
  using Storage = float;
};
template <>
struct Element<ElementType::kBFloat16> {
  using Storage = unsigned short;
};
template <>
struct Element<ElementType::kFloat16> {
  using Storage = unsigned short;
};
template <>
struct Element<ElementType::kE4M3> {
  using Storage = unsigned char;
};
template <>
struct Element<ElementType::kInt8> {
  using Storage = signed char;
};
template <>
struct Element<ElementType::kInt4> {
  using Storage = unsigned char;  // of a code: two in a byte
};
template <>
struct Element<ElementType::kUint4> {
  using Storage = unsigned char;
};
template <>
struct Element<ElementType::kE2M1> {
  using Storage = unsigned char;
};
template <ElementType kType>
using StorageOf = typename Element<kType>::Storage;

// E4M3 codes are read as fp16 with the exponent eight too small; the factor goes into a scale.
inline constexpr float kE4M3Factor = 256.0f;
SIMD_INLINE constexpr float pending_factor(ElementType type) {
  return type == ElementType::kE4M3 ? kE4M3Factor : 1.0f;
}

// One register of consecutive elements as float32.
template <ElementType kType>
SIMD_INLINE FloatReg reg_load_as(const StorageOf<kType>* p) {
  if constexpr (kType == ElementType::kFloat32) {
    return reg_load(p);
  } else if constexpr (kType == ElementType::kBFloat16) {
    return reg_from_bf16(p);
  } else if constexpr (kType == ElementType::kFloat16) {
    return reg_from_f16(p);
  } else if constexpr (kType == ElementType::kInt8) {
    return reg_from_int8(p);
  } else {
    return reg_from_e4m3(p);
  }
}
template <ElementType kType>
SIMD_INLINE F32x16 load_as(const StorageOf<kType>* p) {
  VLLM_LIFT(F32x16, reg_load_as<kType>(p + i * kRegLanes));
}
// The first `count` elements, zero in the other lanes; reads nothing past them.
template <ElementType kType>
SIMD_INLINE F32x16 load_first(const StorageOf<kType>* p, int count) {
  if (count >= kLanes) return load_as<kType>(p);
  StorageOf<kType> padded[kLanes] = {};
  __builtin_memcpy(padded, p, count * sizeof(padded[0]));
  return load_as<kType>(padded);
}

// One packed weight row: columns 0..15 and 16..31 of its panel.
template <ElementType kType>
SIMD_INLINE void load_panel_row(const StorageOf<kType>* p, F32x16& low, F32x16& high) {
  if constexpr (kType == ElementType::kBFloat16) {
    convert_pair_bf16(p, low.r, high.r);
  } else if constexpr (kType == ElementType::kE4M3) {
    convert_pair_e4m3(p, low.r, high.r);
  } else {
    low = load_as<kType>(p);
    high = load_as<kType>(p + kLanes);
  }
}

// Round to nearest even; NaN stays a NaN.
SIMD_INLINE void store_bf16(unsigned short* p, const F32x16& v) {
  const I32x16 b = bits(v);
  const I32x16 odd = bit_and(shift_right<16>(b), set1(1));
  const I32x16 rounded = shift_right<16>(add(b, add(odd, set1(0x7FFF))));
  const I32x16 quiet = bit_or(shift_right<16>(b), set1(0x40));
  narrow_to_u16(p, select(is_nan(v), quiet, rounded).r);
}
// Round to nearest even, saturating at 448; NaN becomes 0x7F.
SIMD_INLINE void store_e4m3(unsigned char* p, const F32x16& v) {
  const I32x16 sign = bit_and(shift_right<24>(bits(v)), set1(0x80));
  const F32x16 magnitude = min(from_bits(bit_and(bits(v), set1(0x7FFFFFFF))), set1(448.0f));
  const I32x16 b = bits(magnitude);
  const I32x16 odd = bit_and(shift_right<20>(b), set1(1));
  const I32x16 normal = sub(shift_right<20>(add(b, add(odd, set1(0x7FFFF)))), set1(120 << 3));
  // Below 2^-6 codes are multiples of 2^-9, the spacing of float32 values at 2^14.
  const F32x16 aligned = add(magnitude, set1(16384.0f));
  const I32x16 subnormal = sub(bits(aligned), bits(set1(16384.0f)));
  const I32x16 code = select(less(magnitude, set1(0.015625f)), subnormal, normal);
  narrow_to_u8(p, select(is_nan(v), set1(0x7F), bit_or(code, sign)).r);
}

template <ElementType kType>
SIMD_INLINE void store_as(StorageOf<kType>* p, const F32x16& v) {
  if constexpr (kType == ElementType::kFloat32) {
    store(p, v);
  } else if constexpr (kType == ElementType::kBFloat16) {
    store_bf16(p, v);
  } else if constexpr (kType == ElementType::kFloat16) {
    store_f16(p, v.r);
  } else {
    store_e4m3(p, v);
  }
}
template <ElementType kType>
SIMD_INLINE void store_first(StorageOf<kType>* p, const F32x16& v, int count) {
  if (count >= kLanes) return store_as<kType>(p, v);
  StorageOf<kType> padded[kLanes];
  store_as<kType>(padded, v);
  __builtin_memcpy(p, padded, count * sizeof(padded[0]));
}

// A type as a value: with_float_type(type, [](auto tag) { ... decltype(tag)::value ... }).
template <ElementType kType>
struct TypeTag {
  static constexpr ElementType value = kType;
};
template <class F>
SIMD_INLINE void with_float_type(ElementType type, F&& f) {
  switch (type) {
    case ElementType::kFloat32:
      return f(TypeTag<ElementType::kFloat32>{});
    case ElementType::kBFloat16:
      return f(TypeTag<ElementType::kBFloat16>{});
    default:
      return f(TypeTag<ElementType::kFloat16>{});
  }
}
template <class F>
SIMD_INLINE void with_any_type(ElementType type, F&& f) {
  if (type == ElementType::kE4M3) return f(TypeTag<ElementType::kE4M3>{});
  with_float_type(type, static_cast<F&&>(f));
}
template <class F>
SIMD_INLINE void with_weight_type(ElementType type, F&& f) {
  switch (type) {
    case ElementType::kInt8:
      return f(TypeTag<ElementType::kInt8>{});
    case ElementType::kInt4:
      return f(TypeTag<ElementType::kInt4>{});
    case ElementType::kUint4:
      return f(TypeTag<ElementType::kUint4>{});
    case ElementType::kE2M1:
      return f(TypeTag<ElementType::kE2M1>{});
    default:
      return with_any_type(type, static_cast<F&&>(f));
  }
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
