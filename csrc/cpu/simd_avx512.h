// AVX-512 (F, BW, VL, DQ) registers: sixteen float32 lanes in one register.
#pragma once
#include <immintrin.h>

#if defined(VLLM_CPU_AVX512_BF16)
#define VLLM_CPU_ISA_NAMESPACE avx512_bf16
#else
#define VLLM_CPU_ISA_NAMESPACE avx512
#endif

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {

constexpr int kRegs = 1;
constexpr int kRegLanes = 16;
using FloatReg = __m512;
using IntReg = __m512i;
using MaskReg = __mmask16;

#define SIMD_INLINE static inline __attribute__((always_inline))

SIMD_INLINE FloatReg reg_set1(float v) { return _mm512_set1_ps(v); }
SIMD_INLINE FloatReg reg_load(const float* p) { return _mm512_loadu_ps(p); }
SIMD_INLINE void reg_store(float* p, FloatReg v) { _mm512_storeu_ps(p, v); }
SIMD_INLINE FloatReg reg_add(FloatReg a, FloatReg b) { return _mm512_add_ps(a, b); }
SIMD_INLINE FloatReg reg_sub(FloatReg a, FloatReg b) { return _mm512_sub_ps(a, b); }
SIMD_INLINE FloatReg reg_mul(FloatReg a, FloatReg b) { return _mm512_mul_ps(a, b); }
SIMD_INLINE FloatReg reg_div(FloatReg a, FloatReg b) { return _mm512_div_ps(a, b); }
SIMD_INLINE FloatReg reg_max(FloatReg a, FloatReg b) { return _mm512_max_ps(a, b); }
SIMD_INLINE FloatReg reg_min(FloatReg a, FloatReg b) { return _mm512_min_ps(a, b); }
SIMD_INLINE FloatReg reg_fma(FloatReg a, FloatReg b, FloatReg c) {
  return _mm512_fmadd_ps(a, b, c);
}

SIMD_INLINE IntReg reg_set1(int v) { return _mm512_set1_epi32(v); }
SIMD_INLINE IntReg reg_load(const int* p) { return _mm512_loadu_si512(p); }
SIMD_INLINE void reg_store(int* p, IntReg v) { _mm512_storeu_si512(p, v); }
SIMD_INLINE IntReg reg_add(IntReg a, IntReg b) { return _mm512_add_epi32(a, b); }
SIMD_INLINE IntReg reg_sub(IntReg a, IntReg b) { return _mm512_sub_epi32(a, b); }
SIMD_INLINE IntReg reg_and(IntReg a, IntReg b) { return _mm512_and_si512(a, b); }
SIMD_INLINE IntReg reg_or(IntReg a, IntReg b) { return _mm512_or_si512(a, b); }
template <int kBits>
SIMD_INLINE IntReg reg_shift_left(IntReg a) {
  return _mm512_slli_epi32(a, kBits);
}
template <int kBits>
SIMD_INLINE IntReg reg_shift_right(IntReg a) {  // logical
  return _mm512_srli_epi32(a, kBits);
}
SIMD_INLINE IntReg reg_bits(FloatReg a) { return _mm512_castps_si512(a); }
SIMD_INLINE FloatReg reg_from_bits(IntReg a) { return _mm512_castsi512_ps(a); }

SIMD_INLINE MaskReg reg_greater(IntReg a, IntReg b) { return _mm512_cmpgt_epi32_mask(a, b); }
// True where a < b; false where either is NaN.
SIMD_INLINE MaskReg reg_less(FloatReg a, FloatReg b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
SIMD_INLINE MaskReg reg_is_nan(FloatReg a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
SIMD_INLINE FloatReg reg_select(MaskReg m, FloatReg yes, FloatReg no) {
  return _mm512_mask_blend_ps(m, no, yes);
}
SIMD_INLINE IntReg reg_select(MaskReg m, IntReg yes, IntReg no) {
  return _mm512_mask_blend_epi32(m, no, yes);
}

// A register's worth of consecutive elements.
SIMD_INLINE FloatReg reg_from_bf16(const unsigned short* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
SIMD_INLINE FloatReg reg_from_f16(const unsigned short* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
SIMD_INLINE FloatReg reg_from_e4m3(const unsigned char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(short(0xBF80))));
}
SIMD_INLINE FloatReg reg_from_int8(const signed char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
SIMD_INLINE void store_f16(unsigned short* p, const FloatReg (&v)[kRegs]) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SIMD_INLINE void narrow_to_u16(unsigned short* p, const IntReg (&v)[kRegs]) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v[0]));
}
SIMD_INLINE void narrow_to_u8(unsigned char* p, const IntReg (&v)[kRegs]) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v[0]));
}

// Interleaved rows of 32: lanes 0..15 are the even elements, 16..31 the odd ones.
SIMD_INLINE void convert_pair_bf16(const unsigned short* p, FloatReg (&even)[kRegs],
                                   FloatReg (&odd)[kRegs]) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd[0] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xFFFF0000))));
}
SIMD_INLINE void convert_pair_e4m3(const unsigned char* p, FloatReg (&even)[kRegs],
                                   FloatReg (&odd)[kRegs]) {
  const __m256i mask = _mm256_set1_epi16(short(0xBF80));
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1);
  const __m256i high = _mm256_srai_epi16(pairs, 1);
  even[0] = _mm512_cvtph_ps(_mm256_and_si256(low, mask));
  odd[0] = _mm512_cvtph_ps(_mm256_and_si256(high, mask));
}

// Rows 2 kPair and 2 kPair + 1 of four packed ones: of each row register i of columns 0..15 and of
// columns 16..31. A lookup reads the lowest four bits of a lane.
template <ElementType kType, int kPair>
SIMD_INLINE void convert_codes(const unsigned char* quad, int, FloatReg (&rows)[2][2]) {
  const __m512i codes = _mm512_loadu_si512(quad);
  const __m512 table = _mm512_load_ps(kCodeValues<kType>.values);
  rows[0][0] = _mm512_permutexvar_ps(reg_shift_right<4 * kPair>(codes), table);
  rows[1][0] = _mm512_permutexvar_ps(reg_shift_right<4 * kPair + 8>(codes), table);
  rows[0][1] = _mm512_permutexvar_ps(reg_shift_right<4 * kPair + 16>(codes), table);
  rows[1][1] = _mm512_permutexvar_ps(reg_shift_right<4 * kPair + 24>(codes), table);
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
