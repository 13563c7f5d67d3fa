// The register-blocked multiply that linear and attention share.
#pragma once
#include "../simd.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {

// Row tiles of kMaxRows x 32 columns fill the register file with accumulators and leave room for
// the operands: 12 of 16 registers on AVX2, 24 of 32 on AVX-512 and NEON.
#if defined(VLLM_CPU_AVX512)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 3;
#endif
constexpr int kVectors = 2;
constexpr int kTileColumns = kVectors * kLanes;

// acc[r][v] += a[r * row_stride] * (vector v of b), the vectors lying one after another in each of
// kPointers runs. For few rows: their broadcasts stay in registers while b streams by one register
// at a time, which is what lets 3 rows x 32 columns fit AVX2 without a spill (a spilled accumulator
// puts a store and a reload into its chain, and halves the speed).
template <ElementType kType, int kPointers, int kRows, int kNumVectors>
SIMD_INLINE void multiply_add_step(const float* a, int64_t row_stride,
                                   const StorageOf<kType>* const (&b)[kPointers],
                                   F32x16 (&acc)[kRows][kNumVectors]) {
  constexpr int kPerPointer = kNumVectors / kPointers * kRegs;
  FloatReg left[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) left[r] = reg_set1(a[r * row_stride]);
#pragma GCC unroll 8
  for (int i = 0; i < kNumVectors * kRegs; ++i) {
    FloatReg right = reg_load_as<kType>(b[i / kPerPointer] + i % kPerPointer * kRegLanes);
    keep_in_register(right);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      FloatReg& sum = acc[r][i / kRegs].r[i % kRegs];
      sum = reg_fma(left[r], right, sum);
    }
  }
}

// acc[r][v] += sum over k of a[r * row_stride + k * depth_stride] * b[k * b_stride + 16 v], one
// fused multiply-add per k in ascending order: the chain that makes a row's bits independent of
// the rows computed beside it.
template <ElementType kType, int kRows, int kNumVectors>
SIMD_INLINE void multiply_add(const float* a, int64_t row_stride, int64_t depth_stride,
                              const StorageOf<kType>* b, int64_t b_stride, int64_t depth,
                              F32x16 (&acc)[kRows][kNumVectors]) {
  for (int64_t k = 0; k < depth; ++k) {
    if constexpr (kRows <= 4) {
      const StorageOf<kType>* const right[] = {b};
      multiply_add_step<kType>(a, row_stride, right, acc);
    } else {
      F32x16 right[kNumVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kNumVectors; ++v) right[v] = load_as<kType>(b + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const F32x16 left = set1(a[r * row_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < kNumVectors; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
      }
    }
    a += depth_stride;
    b += b_stride;
  }
}

// Rows are cut into tiles of at most kMaxRows whose sizes differ by at most one (8 is 4 + 4).
struct RowTiles {
  int64_t num_rows, num_tiles, base, num_larger;

  explicit RowTiles(int64_t rows)
      : num_rows(rows),
        num_tiles((rows + kMaxRows - 1) / kMaxRows),
        base(num_tiles ? rows / num_tiles : 0),
        num_larger(num_tiles ? rows % num_tiles : 0) {}
  int64_t start(int64_t tile) const {
    return tile * base + (tile < num_larger ? tile : num_larger);
  }
  int size(int64_t tile) const { return static_cast<int>(base + (tile < num_larger ? 1 : 0)); }
};

// Calls f with rows as a compile-time constant; 1 <= rows <= kLimit.
template <int kValue>
struct RowCount {
  static constexpr int value = kValue;
};
template <int kLimit, class F>
SIMD_INLINE void with_row_count(int rows, F&& f) {
  if constexpr (kLimit > 1) {
    if (rows < kLimit) return with_row_count<kLimit - 1>(rows, static_cast<F&&>(f));
  }
  f(RowCount<kLimit>{});
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
