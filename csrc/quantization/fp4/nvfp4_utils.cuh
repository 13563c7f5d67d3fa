// float32 -> E2M1 (FP4), packed: the chip's instruction where the target has it, and a branch-free
// conversion where it has not. Needs CUDA's headers alone.
//
//   value  0  0.5  1  1.5  2  3  4  6          code = index; bit 3 is the sign
//
// Rounds to nearest, ties to the even code; saturates (infinity -> 7, -infinity -> 15); -0 -> 8;
// a NaN of either sign -> 7: what __nv_cvt_float_to_fp4 of cuda_fp4.h gives on the host, for every
// one of the 2^32 floats (tests/native/e2m1_exhaustive.cu). Even elements fill the low nibbles.
//
// SOFTWARE_E2M1_CONVERT is defined exactly where the target lacks
// `cvt.rn.satfinite.e2m1x2.f32` (the host does). The suffix decides, not the chip: sm_120a and
// sm_120f have the instruction and plain sm_120 has not. nvcc defines __CUDA_ARCH_FEAT_SM*_ALL for
// an `a` target, and from 12.9 on __CUDA_ARCH_FAMILY_SPECIFIC__ for `a` and `f` targets.
//
// SASS instructions per pair of values (benchmarks/kernels/e2m1_sass.py --arch ...):
//                      sm_90a   sm_120   sm_100a
//   this file            7.25     7.25      1.00 (native)
//   threshold ladder    38.75    39.38     38.75
//   cuda_fp4.h         116.50   115.50      2.75 (native, one byte at a time)
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#if !defined(__CUDA_ARCH__) ||                                                      \
    !(defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM101_ALL) || \
      defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM110_ALL) || \
      defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) || \
      (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000))
#define SOFTWARE_E2M1_CONVERT
#endif

namespace vllm {
namespace e2m1 {

#if defined(SOFTWARE_E2M1_CONVERT)

// One float16 rounding does the E2M1 rounding.
//
// E2M1 is uniform up to 2 (steps of 0.5) and halves its density at each power of two; float16 is
// uniform over its first 2048 steps (subnormals and the lowest binade) and halves its density at
// each power of two of steps. Scale x so that 1.0 becomes 2 n steps. Then each of the seven
// midpoints of E2M1 is a midpoint of float16 too, and float16's even neighbour lies on the side of
// E2M1's even code, whenever n = 1 (mod 4) and 3.5 n < 2048 <= 5 n:
//
//   x (rounds to)      0.25 (0)  0.75 (2)  1.25 (2)   1.75 (4)   2.5 (4)    3.5 (6)    5 (6)
//   steps, n = 513      256.5     769.5     1282.5     1795.5     2565       3591       5130
//   neighbours         256 257   769 770   1282 1283  1795 1796  2564 2566  3590 3592  5128 5132
//   even one           256       770       1282       1796       2564       3592       5128
//
// So rounding the product to float16 puts every float on its side of every midpoint, ties
// included: floats of different codes become different float16s. The product itself is rounded to
// float32, but it is exact at the midpoints (3 bits times 10), and that of a midpoint's neighbour
// is more than half a unit away from there and does not round onto it.
inline constexpr float kStepsPerOne = 2 * 513 * 0x1p-24f;  // a step of float16 is 2^-24

// Now each code is an interval of float16s, and the first of codes 1 to 7 has the bits 257, 770,
// 1283, 1796, 2307, 2820, 3331: nearly 512 apart. A product with 1 - 2^-9 - 2^-11 in float16 makes
// them 256, 768, 1280 ... 3328, and the last of codes 0 to 6 become 255, 767, 1279 ... 3327: the
// code is (bits + 256) >> 9, as float16's exponent and the first bit of its mantissa are E2M1's.
inline constexpr uint16_t kAlign = 0x3BFB;    // 1 - 2^-9 - 2^-11
inline constexpr uint16_t kLargest = 0x0E00;  // of code 7

// Two values in the 16-bit halves of two words.
struct RoundedPair {
  uint32_t codes;  // (upper byte + 1) >> 1 of each half is the magnitude's code
  uint32_t signs;  // bit 15 of each half; below it is noise
};

__host__ __device__ __forceinline__ uint32_t bits_of(__half2 pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// A NaN becomes float16's 0x7FFF, without its sign; min(NaN, largest) is the largest.
__host__ __device__ __forceinline__ RoundedPair round_pair(float low, float high) {
  const __half2 scaled = __floats2half2_rn(low * kStepsPerOne, high * kStepsPerOne);
  const __half2 aligned = __hmul2(__habs2(scaled), __half2(__half2_raw{kAlign, kAlign}));
  const __half2 codes = __hmin2(aligned, __half2(__half2_raw{kLargest, kLargest}));
  return {bits_of(codes), bits_of(scaled)};
}

// The upper bytes of the four halves.
__host__ __device__ __forceinline__ uint32_t upper_bytes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x7531);
#else
  return (a >> 8 & 0xFF) | (a >> 24) << 8 | (b >> 8 & 0xFF) << 16 | (b >> 24) << 24;
#endif
}

// 0xFF for each of the four halves with its highest bit set, else 0.
__host__ __device__ __forceinline__ uint32_t sign_bytes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t result;  // __byte_perm would drop the selector's sign bits
  asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return (upper_bytes(a, b) >> 7 & 0x01010101) * 0xFF;
#endif
}

// The bits of a under the mask, those of b elsewhere.
__host__ __device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t result;  // by name: the compiler would split the mask over three operations
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
  return result;
#else
  return (mask & a) | (~mask & b);
#endif
}

__host__ __device__ __forceinline__ uint32_t convert(float x0, float x1, float x2, float x3,
                                                     float x4, float x5, float x6, float x7) {
  const RoundedPair even0 = round_pair(x0, x2), even1 = round_pair(x4, x6);
  const RoundedPair odd0 = round_pair(x1, x3), odd1 = round_pair(x5, x7);
  // A byte of codes: 3 bits odd, noise, 3 bits even, noise. Adding one to each upper byte at once
  // overflows none: they are 14 at most.
  const uint32_t codes = upper_bytes(even0.codes, even1.codes) +
                         (upper_bytes(odd0.codes, odd1.codes) << 4) + 0x11111111;
  const uint32_t signs =
      choose(0x0F0F0F0F, sign_bytes(even0.signs, even1.signs), upper_bytes(odd0.signs, odd1.signs));
  return choose(0x77777777, codes >> 1, signs);
}

#else

__host__ __device__ __forceinline__ uint32_t convert(float x0, float x1, float x2, float x3,
                                                     float x4, float x5, float x6, float x7) {
  uint32_t result;
  asm("{\n"
      ".reg .b8 byte0, byte1, byte2, byte3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 byte0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 byte1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 byte2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 byte3, %8, %7;\n"
      "mov.b32 %0, {byte0, byte1, byte2, byte3};\n"
      "}"
      : "=r"(result)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3), "f"(x4), "f"(x5), "f"(x6), "f"(x7));
  return result;
}

#endif  // SOFTWARE_E2M1_CONVERT

}  // namespace e2m1

// Eight values -> eight nibbles, the first in the lowest.
__host__ __device__ __forceinline__ uint32_t fp32_vec8_to_e2m1(const float (&x)[8]) {
  return e2m1::convert(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
}

__host__ __device__ __forceinline__ uint32_t fp32_vec8_to_e2m1(const float2 (&x)[4]) {
  return e2m1::convert(x[0].x, x[0].y, x[1].x, x[1].y, x[2].x, x[2].y, x[3].x, x[3].y);
}

// Sixteen values -> sixteen nibbles, the first in the lowest.
__host__ __device__ __forceinline__ uint64_t fp32_vec16_to_e2m1(const float2 (&x)[8]) {
  const uint32_t low =
      e2m1::convert(x[0].x, x[0].y, x[1].x, x[1].y, x[2].x, x[2].y, x[3].x, x[3].y);
  const uint32_t high =
      e2m1::convert(x[4].x, x[4].y, x[5].x, x[5].y, x[6].x, x[6].y, x[7].x, x[7].y);
  return uint64_t{high} << 32 | low;
}

}  // namespace vllm
