// AVX2 + FMA + F16C registers: sixteen float32 lanes in two registers.
#pragma once
#include <immintrin.h>

#define VLLM_CPU_ISA_NAMESPACE avx2

namespace vllm::cpu::avx2 {

constexpr int kRegs = 2;
constexpr int kRegLanes = 8;
using FloatReg = __m256;
using IntReg = __m256i;
using MaskReg = __m256;

#define SIMD_INLINE static inline __attribute__((always_inline))

SIMD_INLINE FloatReg reg_set1(float v) { return _mm256_set1_ps(v); }
SIMD_INLINE FloatReg reg_load(const float* p) { return _mm256_loadu_ps(p); }
SIMD_INLINE void reg_store(float* p, FloatReg v) { _mm256_storeu_ps(p, v); }
SIMD_INLINE FloatReg reg_add(FloatReg a, FloatReg b) { return _mm256_add_ps(a, b); }
SIMD_INLINE FloatReg reg_sub(FloatReg a, FloatReg b) { return _mm256_sub_ps(a, b); }
SIMD_INLINE FloatReg reg_mul(FloatReg a, FloatReg b) { return _mm256_mul_ps(a, b); }
SIMD_INLINE FloatReg reg_div(FloatReg a, FloatReg b) { return _mm256_div_ps(a, b); }
SIMD_INLINE FloatReg reg_max(FloatReg a, FloatReg b) { return _mm256_max_ps(a, b); }
SIMD_INLINE FloatReg reg_min(FloatReg a, FloatReg b) { return _mm256_min_ps(a, b); }
SIMD_INLINE FloatReg reg_fma(FloatReg a, FloatReg b, FloatReg c) {
  return _mm256_fmadd_ps(a, b, c);
}

SIMD_INLINE IntReg reg_set1(int v) { return _mm256_set1_epi32(v); }
SIMD_INLINE IntReg reg_load(const int* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
SIMD_INLINE void reg_store(int* p, IntReg v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
SIMD_INLINE IntReg reg_add(IntReg a, IntReg b) { return _mm256_add_epi32(a, b); }
SIMD_INLINE IntReg reg_sub(IntReg a, IntReg b) { return _mm256_sub_epi32(a, b); }
SIMD_INLINE IntReg reg_and(IntReg a, IntReg b) { return _mm256_and_si256(a, b); }
SIMD_INLINE IntReg reg_or(IntReg a, IntReg b) { return _mm256_or_si256(a, b); }
template <int kBits>
SIMD_INLINE IntReg reg_shift_left(IntReg a) {
  return _mm256_slli_epi32(a, kBits);
}
template <int kBits>
SIMD_INLINE IntReg reg_shift_right(IntReg a) {  // logical
  return _mm256_srli_epi32(a, kBits);
}
SIMD_INLINE IntReg reg_bits(FloatReg a) { return _mm256_castps_si256(a); }
SIMD_INLINE FloatReg reg_from_bits(IntReg a) { return _mm256_castsi256_ps(a); }

SIMD_INLINE MaskReg reg_greater(IntReg a, IntReg b) {
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b));
}
// True where a < b; false where either is NaN.
SIMD_INLINE MaskReg reg_less(FloatReg a, FloatReg b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
SIMD_INLINE MaskReg reg_is_nan(FloatReg a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
SIMD_INLINE FloatReg reg_select(MaskReg m, FloatReg yes, FloatReg no) {
  return _mm256_blendv_ps(no, yes, m);
}
SIMD_INLINE IntReg reg_select(MaskReg m, IntReg yes, IntReg no) {
  return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(m));
}

// A register's worth of consecutive elements.
SIMD_INLINE FloatReg reg_from_bf16(const unsigned short* p) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
SIMD_INLINE FloatReg reg_from_f16(const unsigned short* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
SIMD_INLINE FloatReg reg_from_e4m3(const unsigned char* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(short(0xBF80))));
}
SIMD_INLINE FloatReg reg_from_int8(const signed char* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
SIMD_INLINE void store_f16(unsigned short* p, const FloatReg (&v)[kRegs]) {
  for (int i = 0; i < kRegs; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i),
                     _mm256_cvtps_ph(v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}
SIMD_INLINE __m256i pack_words(const IntReg (&v)[kRegs]) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(v[0], v[1]), 0xD8);
}
SIMD_INLINE void narrow_to_u16(unsigned short* p, const IntReg (&v)[kRegs]) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_words(v));
}
SIMD_INLINE void narrow_to_u8(unsigned char* p, const IntReg (&v)[kRegs]) {
  const __m256i words = pack_words(v);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

SIMD_INLINE void widen_f16(__m256i halves, FloatReg (&out)[kRegs]) {
  out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}
// Interleaved rows of 32: lanes 0..15 are the even elements, 16..31 the odd ones.
SIMD_INLINE void convert_pair_bf16(const unsigned short* p, FloatReg (&even)[kRegs],
                                   FloatReg (&odd)[kRegs]) {
  const __m256i high = _mm256_set1_epi32(int(0xFFFF0000));
  for (int i = 0; i < kRegs; ++i) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 * i));
    even[i] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd[i] = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
  }
}
SIMD_INLINE void convert_pair_e4m3(const unsigned char* p, FloatReg (&even)[kRegs],
                                   FloatReg (&odd)[kRegs]) {
  const __m256i mask = _mm256_set1_epi16(short(0xBF80));
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1);
  const __m256i high = _mm256_srai_epi16(pairs, 1);
  widen_f16(_mm256_and_si256(low, mask), even);
  widen_f16(_mm256_and_si256(high, mask), odd);
}

// Bytes 2 and 3 of the values of a 4-bit type, which hold all their bits, once for each half of a
// register.
struct CodeBytes {
  alignas(32) unsigned char low[32], high[32];
  constexpr explicit CodeBytes(const CodeValues& codes) : low(), high() {
    for (int i = 0; i < 32; ++i) {
      const unsigned bits = __builtin_bit_cast(unsigned, codes.values[i % 16]);
      low[i] = static_cast<unsigned char>(bits >> 16);
      high[i] = static_cast<unsigned char>(bits >> 24);
    }
  }
};
template <ElementType kType>
inline constexpr CodeBytes kCodeBytes{kCodeValues<kType>};

// Rows 2 kPair and 2 kPair + 1 of four packed ones: of each row register i of columns 0..15 and of
// columns 16..31. Two lookups give the halves of a bfloat16.
template <ElementType kType, int kPair>
SIMD_INLINE void convert_codes(const unsigned char* quad, int i, FloatReg (&rows)[2][2]) {
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quad + 32 * i));
  const __m256i codes =
      _mm256_and_si256(reg_shift_right<4 * kPair>(packed), _mm256_set1_epi8(0x0F));
  const auto look_up = [&](const unsigned char* table) {
    return _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)), codes);
  };
  const __m256i low = look_up(kCodeBytes<kType>.low), high = look_up(kCodeBytes<kType>.high);
  // 32-bit lanes of both rows: (column c, c + 16, c + 1, c + 17) in each half of a register.
  const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
  const __m256i mask = _mm256_set1_epi32(int(0xFFFF0000));
  const __m256 even[] = {reg_from_bits(reg_shift_left<16>(first)),
                         reg_from_bits(reg_shift_left<16>(second))};
  const __m256 odd[] = {reg_from_bits(reg_and(first, mask)), reg_from_bits(reg_and(second, mask))};
  rows[0][0] = _mm256_shuffle_ps(even[0], even[1], 0x88);
  rows[0][1] = _mm256_shuffle_ps(even[0], even[1], 0xDD);
  rows[1][0] = _mm256_shuffle_ps(odd[0], odd[1], 0x88);
  rows[1][1] = _mm256_shuffle_ps(odd[0], odd[1], 0xDD);
}

}  // namespace vllm::cpu::avx2
