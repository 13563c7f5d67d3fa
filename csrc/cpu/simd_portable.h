// Portable registers: sixteen float32 lanes in four 16-byte compiler vectors (NEON, SSE2, ...).
// Results equal the x86 paths bit for bit only where the target has a fused multiply-add.
#pragma once
#ifdef __aarch64__
#include <arm_neon.h>
#endif

#define VLLM_CPU_ISA_NAMESPACE portable

namespace vllm::cpu::portable {

constexpr int kRegs = 4;
constexpr int kRegLanes = 4;
using FloatReg = float __attribute__((vector_size(16)));
using IntReg = int __attribute__((vector_size(16)));
using MaskReg = IntReg;

#define SIMD_INLINE static inline __attribute__((always_inline))

template <class T>
SIMD_INLINE T load_bytes(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof(T));
  return v;
}

SIMD_INLINE FloatReg reg_set1(float v) { return FloatReg{v, v, v, v}; }
SIMD_INLINE FloatReg reg_load(const float* p) { return load_bytes<FloatReg>(p); }
SIMD_INLINE void reg_store(float* p, FloatReg v) { __builtin_memcpy(p, &v, sizeof(v)); }
SIMD_INLINE FloatReg reg_add(FloatReg a, FloatReg b) { return a + b; }
SIMD_INLINE FloatReg reg_sub(FloatReg a, FloatReg b) { return a - b; }
SIMD_INLINE FloatReg reg_mul(FloatReg a, FloatReg b) { return a * b; }
SIMD_INLINE FloatReg reg_div(FloatReg a, FloatReg b) { return a / b; }
// The second operand where either is NaN, as x86 does.
SIMD_INLINE FloatReg reg_max(FloatReg a, FloatReg b) { return a > b ? a : b; }
SIMD_INLINE FloatReg reg_min(FloatReg a, FloatReg b) { return a < b ? a : b; }
SIMD_INLINE FloatReg reg_fma(FloatReg a, FloatReg b, FloatReg c) {
#if defined(__aarch64__)
  return FloatReg(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#elif defined(__FP_FAST_FMAF)
  FloatReg out;
  for (int i = 0; i < kRegLanes; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#else
  return a * b + c;
#endif
}

SIMD_INLINE IntReg reg_set1(int v) { return IntReg{v, v, v, v}; }
SIMD_INLINE IntReg reg_load(const int* p) { return load_bytes<IntReg>(p); }
SIMD_INLINE void reg_store(int* p, IntReg v) { __builtin_memcpy(p, &v, sizeof(v)); }
SIMD_INLINE IntReg reg_add(IntReg a, IntReg b) { return a + b; }
SIMD_INLINE IntReg reg_sub(IntReg a, IntReg b) { return a - b; }
SIMD_INLINE IntReg reg_and(IntReg a, IntReg b) { return a & b; }
SIMD_INLINE IntReg reg_or(IntReg a, IntReg b) { return a | b; }
using UintReg = unsigned __attribute__((vector_size(16)));
template <int kBits>
SIMD_INLINE IntReg reg_shift_left(IntReg a) {
  return IntReg(UintReg(a) << kBits);
}
template <int kBits>
SIMD_INLINE IntReg reg_shift_right(IntReg a) {  // logical
  return IntReg(UintReg(a) >> kBits);
}
SIMD_INLINE IntReg reg_bits(FloatReg a) { return IntReg(a); }
SIMD_INLINE FloatReg reg_from_bits(IntReg a) { return FloatReg(a); }

SIMD_INLINE MaskReg reg_greater(IntReg a, IntReg b) { return a > b; }
SIMD_INLINE MaskReg reg_less(FloatReg a, FloatReg b) { return a < b; }
SIMD_INLINE MaskReg reg_is_nan(FloatReg a) { return a != a; }
SIMD_INLINE FloatReg reg_select(MaskReg m, FloatReg yes, FloatReg no) {
  return FloatReg((m & IntReg(yes)) | (~m & IntReg(no)));
}
SIMD_INLINE IntReg reg_select(MaskReg m, IntReg yes, IntReg no) { return (m & yes) | (~m & no); }

SIMD_INLINE FloatReg widen_bf16(IntReg words) { return FloatReg(UintReg(words) << 16); }
// Moving the fp16 exponent and mantissa into place and multiplying by 2^112 rebiases normals and
// subnormals alike; only infinities and NaNs need their exponent set by hand.
SIMD_INLINE FloatReg widen_f16(IntReg words) {
  const IntReg magnitude = (words & 0x7FFF) << 13;
  const FloatReg finite = FloatReg(magnitude) * reg_set1(0x1p112f);
  const IntReg special = magnitude | 0x7F800000;
  const IntReg value = (words & 0x7C00) == 0x7C00 ? special : IntReg(finite);
  return FloatReg(value | IntReg(UintReg(words & 0x8000) << 16));
}
// The same with four exponent bits, as fp16 with the value scaled by 2^-8 (E4M3 has no infinity).
SIMD_INLINE FloatReg widen_e4m3(IntReg bytes) {
  const IntReg magnitude = (bytes & 0x7F) << 20;
  const FloatReg finite = FloatReg(magnitude) * reg_set1(0x1p112f);
  return FloatReg(IntReg(finite) | IntReg(UintReg(bytes & 0x80) << 24));
}
template <class T>
SIMD_INLINE IntReg load_four(const T* p, int stride) {
  return IntReg{p[0], p[stride], p[2 * stride], p[3 * stride]};
}

// A register's worth of consecutive elements.
SIMD_INLINE FloatReg reg_from_bf16(const unsigned short* p) { return widen_bf16(load_four(p, 1)); }
SIMD_INLINE FloatReg reg_from_f16(const unsigned short* p) { return widen_f16(load_four(p, 1)); }
SIMD_INLINE FloatReg reg_from_e4m3(const unsigned char* p) { return widen_e4m3(load_four(p, 1)); }
SIMD_INLINE FloatReg reg_from_int8(const signed char* p) {
  return __builtin_convertvector(load_four(p, 1), FloatReg);
}
SIMD_INLINE unsigned short round_to_f16(float v) {
  const unsigned bits = load_bytes<unsigned>(&v);
  const unsigned sign = (bits >> 16) & 0x8000u;
  const unsigned magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // rounds past 65504
  if (magnitude < 0x38800000u) {                        // subnormal: the addition rounds at 2^-24
    const float shifted = load_bytes<float>(&magnitude) + 0.5f;
    return sign | (load_bytes<unsigned>(&shifted) - 0x3F000000u);
  }
  const unsigned rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return sign | ((rounded - 0x38000000u) >> 13);
}
SIMD_INLINE void store_f16(unsigned short* p, const FloatReg (&v)[kRegs]) {
  for (int i = 0; i < 16; ++i) p[i] = round_to_f16(v[i / kRegLanes][i % kRegLanes]);
}
SIMD_INLINE void narrow_to_u16(unsigned short* p, const IntReg (&v)[kRegs]) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<unsigned short>(v[i / kRegLanes][i % kRegLanes]);
}
SIMD_INLINE void narrow_to_u8(unsigned char* p, const IntReg (&v)[kRegs]) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<unsigned char>(v[i / kRegLanes][i % kRegLanes]);
}

// Interleaved rows of 32: lanes 0..15 are the even elements, 16..31 the odd ones.
SIMD_INLINE void convert_pair_bf16(const unsigned short* p, FloatReg (&even)[kRegs],
                                   FloatReg (&odd)[kRegs]) {
  for (int i = 0; i < kRegs; ++i) {
    even[i] = widen_bf16(load_four(p + 8 * i, 2));
    odd[i] = widen_bf16(load_four(p + 8 * i + 1, 2));
  }
}
SIMD_INLINE void convert_pair_e4m3(const unsigned char* p, FloatReg (&even)[kRegs],
                                   FloatReg (&odd)[kRegs]) {
  for (int i = 0; i < kRegs; ++i) {
    even[i] = widen_e4m3(load_four(p + 8 * i, 2));
    odd[i] = widen_e4m3(load_four(p + 8 * i + 1, 2));
  }
}

// Values of codes in the lowest four bits of each lane, by arithmetic: compilers make no vector
// lookup of a table.
template <ElementType kType>
SIMD_INLINE FloatReg code_value(IntReg codes) {
  if constexpr (kType == ElementType::kE2M1) {
    // Twice the magnitudes, 0 1 2 3 4 6 8 12, lie on three lines.
    const FloatReg m = __builtin_convertvector(codes & 7, FloatReg);
    const FloatReg twice = reg_max(reg_max(m, m + m - 4.0f), 4.0f * m - 16.0f);
    return FloatReg(IntReg(twice * 0.5f) | IntReg(UintReg(codes & 8) << 28));
  } else {
    const float shift = kCodeValues<kType>.values[0];
    return __builtin_convertvector(codes, FloatReg) + shift;
  }
}
// Rows 2 kPair and 2 kPair + 1 of four packed ones: of each row register i of columns 0..15 and of
// columns 16..31.
template <ElementType kType, int kPair>
SIMD_INLINE void convert_codes(const unsigned char* quad, int i, FloatReg (&rows)[2][2]) {
  const IntReg packed = load_bytes<IntReg>(quad + 16 * i);
  rows[0][0] = code_value<kType>(reg_shift_right<4 * kPair>(packed) & 0xF);
  rows[1][0] = code_value<kType>(reg_shift_right<4 * kPair + 8>(packed) & 0xF);
  rows[0][1] = code_value<kType>(reg_shift_right<4 * kPair + 16>(packed) & 0xF);
  rows[1][1] = code_value<kType>(reg_shift_right<4 * kPair + 24>(packed) & 0xF);
}

}  // namespace vllm::cpu::portable
