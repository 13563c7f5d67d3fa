// Products of bfloat16 by pairs: 32-bit lanes that hold rows k (upper half) and k + 1 of a column.
// vdpbf16ps is two fused multiply-adds in a row, of the upper halves and then of the lower ones:
// the chain over ascending k, at twice the speed. But it takes and gives zeros for denormal
// numbers. So it is used where none can occur: where every product, and with that every sum of
// them, is a multiple of the smallest normal number.
#pragma once
#include "linear_panel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr int kSmallestNormal = -126;  // exponent of float32
constexpr int kExponentBias = 127;
constexpr int kMantissaBits = 7;  // of bfloat16

SIMD_INLINE __m512 upper_half(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xFFFF0000))));
}
SIMD_INLINE __m512 lower_half(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

// sum + a[k] * b[k] + a[k + 1] * b[k + 1], each product added with one rounding.
template <bool kHasDenormals>
SIMD_INLINE __m512 add_pair_product(__m512 sum, __m512i a, __m512i b) {
  if constexpr (kHasDenormals) {
    sum = _mm512_fmadd_ps(upper_half(a), upper_half(b), sum);
    return _mm512_fmadd_ps(lower_half(a), lower_half(b), sum);
  } else {
    return _mm512_dpbf16_ps(sum, __m512bh(a), __m512bh(b));
  }
}

// The smallest of many bfloat16 values other than zero.
struct SmallestValue {
  __m512i lanes = _mm512_set1_epi16(-1);  // magnitudes less 1: zeros become the largest
  void include(__m512i values) {
    const __m512i magnitudes = _mm512_and_si512(values, _mm512_set1_epi16(0x7FFF));
    lanes = _mm512_min_epu16(lanes, _mm512_sub_epi16(magnitudes, _mm512_set1_epi16(1)));
  }
  // All values are multiples of 2 to this power, or some are denormal and it is lower than that of
  // any normal value.
  int granularity() const {
    unsigned short all[32];
    _mm512_storeu_si512(all, lanes);
    int smallest = 0xFFFF;
    for (const int one : all) smallest = one < smallest ? one : smallest;
    const int exponent = (smallest + 1) >> kMantissaBits;
    return exponent == 0 ? 4 * kSmallestNormal : exponent - kExponentBias - kMantissaBits;
  }
};

// The bytes of bfloat16 values by index: of E4M3 its lowest seven bits, of 4-bit codes the code
// less its zero point in six bits.
template <int kSize>
struct PairTable {
  alignas(64) unsigned char low[kSize], high[kSize];
  template <class F>
  constexpr explicit PairTable(const F& value_of) : low(), high() {
    for (int i = 0; i < kSize; ++i) {
      const unsigned bits = __builtin_bit_cast(unsigned, value_of(i));
      low[i] = static_cast<unsigned char>(bits >> 16);
      high[i] = static_cast<unsigned char>(bits >> 24);
    }
  }
};
// As everywhere, 1/256 of what the code means.
inline constexpr PairTable<128> kE4M3Pairs{[](int code) {
  const int exponent = code >> 3, mantissa = code & 7;
  float value = static_cast<float>(exponent == 0 ? mantissa : mantissa + 8);
  for (int i = exponent == 0 ? 1 : exponent; i < 18; ++i) value /= 2;
  return value;
}};
template <ElementType kType>
inline constexpr PairTable<64> kCodePairs{[](int index) {
  if (kType == ElementType::kUint4) return static_cast<float>(index < 32 ? index : index - 64);
  return kCodeValues<kType>.values[index % 16];
}};

// The power of two that all values of a type are multiples of, as they are widened here.
template <ElementType kType>
inline constexpr int kGranularity = kType == ElementType::kE4M3 ? -17 : -1;

// Which of 128 bytes, low ones and then high ones, make up the lanes of sixteen columns. A pair of
// rows in storage has row k of column l at byte first + l * step, and row k + 1 `apart` later.
struct PairOrder {
  alignas(64) unsigned char bytes[64];
  constexpr PairOrder(int first, int step, int apart) : bytes() {
    for (int lane = 0; lane < 16; ++lane) {
      const int upper = first + lane * step, lower = upper + apart;
      const int order[] = {lower, 64 + lower, upper, 64 + upper};
      for (int i = 0; i < 4; ++i) bytes[4 * lane + i] = static_cast<unsigned char>(order[i]);
    }
  }
};
inline constexpr PairOrder kE4M3Orders[] = {{0, 2, 32}, {1, 2, 32}};
inline constexpr PairOrder kCodeOrders[] = {{0, 4, 1}, {2, 4, 1}};

SIMD_INLINE void store_ordered(unsigned* pairs, __m512i low, __m512i high,
                               const PairOrder (&orders)[2]) {
  for (int v = 0; v < 2; ++v) {
    const __m512i order = _mm512_load_si512(orders[v].bytes);
    _mm512_storeu_si512(pairs + v * kLanes, _mm512_permutex2var_epi8(low, order, high));
  }
}

// Weight rows as pairs [ceil(depth / 2), 32], a missing row as zeros. Returns their granularity.
template <ElementType kType>
int widen_pairs(const StorageOf<kType>* row, int64_t depth, const float*, unsigned* pairs)
  requires(kType == ElementType::kE4M3)
{
  const __m512i low[] = {_mm512_load_si512(kE4M3Pairs.low), _mm512_load_si512(kE4M3Pairs.low + 64)};
  const __m512i high[] = {_mm512_load_si512(kE4M3Pairs.high),
                          _mm512_load_si512(kE4M3Pairs.high + 64)};
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  for (int64_t k = 0; k < depth; k += 2) {
    __builtin_prefetch(row + kWidenPrefetch);
    const __mmask64 present = k + 1 < depth ? ~0ull : ~0ull >> kPanelWidth;
    const __m512i codes = _mm512_maskz_loadu_epi8(present, row);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    store_ordered(pairs, _mm512_permutex2var_epi8(low[0], codes, low[1]),
                  _mm512_or_si512(magnitude, _mm512_and_si512(codes, sign)), kE4M3Orders);
    row += 2 * kPanelWidth;
    pairs += kPanelWidth;
  }
  return kGranularity<kType>;
}

template <ElementType kType>
int widen_pairs(const StorageOf<kType>* row, int64_t depth, const float*, unsigned* pairs)
  requires(kType == ElementType::kInt8)
{
  for (int64_t k = 0; k < depth; k += 2) {
    __builtin_prefetch(row + kWidenPrefetch);
    for (int v = 0; v < 2; ++v) {
      const __m512i upper = _mm512_castps_si512(reg_from_int8(row + v * kLanes));
      const __m512i lower = k + 1 < depth
                                ? _mm512_castps_si512(reg_from_int8(row + kPanelWidth + v * kLanes))
                                : _mm512_setzero_si512();
      const __m512i both = _mm512_or_si512(upper, _mm512_srli_epi32(lower, 16));
      _mm512_storeu_si512(pairs + v * kLanes, both);
    }
    row += 2 * kPanelWidth;
    pairs += kPanelWidth;
  }
  return kGranularity<kType>;
}

template <ElementType kType>
int widen_pairs(const StorageOf<kType>* row, int64_t depth, const float*, unsigned* pairs)
  requires(kType == ElementType::kBFloat16)
{
  SmallestValue smallest;
  for (int64_t k = 0; k < depth; k += 2) {
    __builtin_prefetch(row + kWidenPrefetch / 2);
    const __m512i upper = _mm512_loadu_si512(row);
    const __m512i lower =
        k + 1 < depth ? _mm512_loadu_si512(row + kPanelWidth) : _mm512_setzero_si512();
    smallest.include(upper);
    smallest.include(lower);
    _mm512_storeu_si512(pairs,
                        _mm512_mask_blend_epi16(0x55555555, _mm512_slli_epi32(upper, 16), lower));
    _mm512_storeu_si512(pairs + kLanes,
                        _mm512_mask_blend_epi16(0x55555555, upper, _mm512_srli_epi32(lower, 16)));
    row += 2 * kPanelWidth;
    pairs += kPanelWidth;
  }
  return smallest.granularity();
}

// Of codes whole quads, so two pairs at a time. zeros: float32 [32], the zero points.
template <ElementType kType>
int widen_pairs(const unsigned char* quad, int64_t depth, const float* zeros, unsigned* pairs)
  requires(is_code(kType))
{
  const __m512i low = _mm512_load_si512(kCodePairs<kType>.low);
  const __m512i high = _mm512_load_si512(kCodePairs<kType>.high);
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i shift = _mm512_setzero_si512();
  if constexpr (kType == ElementType::kUint4) {
    const __m512i first = _mm512_cvtps_epi32(_mm512_loadu_ps(zeros));
    const __m512i second = _mm512_cvtps_epi32(_mm512_loadu_ps(zeros + kLanes));
    shift = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
    shift = _mm512_or_si512(shift, _mm512_slli_epi32(shift, 8));
  }
  for (int64_t k = 0; k < depth; k += kQuadRows) {
    __builtin_prefetch(quad + kWidenPrefetch);
    const __m512i packed = _mm512_loadu_si512(quad);
    for (int half = 0; half < 2; ++half) {
      __m512i codes = _mm512_and_si512(half == 0 ? packed : _mm512_srli_epi16(packed, 4), nibble);
      if constexpr (kType == ElementType::kUint4) codes = _mm512_sub_epi8(codes, shift);
      store_ordered(pairs, _mm512_permutexvar_epi8(codes, low),
                    _mm512_permutexvar_epi8(codes, high), kCodeOrders);
      pairs += kPanelWidth;
    }
    quad += kQuadBytes;
  }
  return kGranularity<kType>;
}

}  // namespace
}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
