// What recurrences share: which requests have a state, and columns of one that are updated
// together.
#pragma once
#include "parallel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr int64_t kSerialElements = 1 << 14;  // elements that waking other threads must be worth
constexpr int kColumns = 2 * kLanes;  // of the state that are updated together, out of the L1 cache
constexpr int64_t kTileTokens = 16;   // between two trips of a block of columns to memory

[[maybe_unused]] int lanes_left(int64_t size, int64_t at) {
  return size - at < kLanes ? static_cast<int>(size - at) : kLanes;
}

[[maybe_unused]] bool is_fresh(const StateRequests& requests, int64_t request) {
  return requests.seq_lens[request] ==
         requests.query_start[request + 1] - requests.query_start[request];
}

template <ElementType kType>
float element(const Rows& rows, int64_t row, int64_t column) {
  float lanes[kLanes];
  store(lanes,
        load_first<kType>(
            static_cast<const StorageOf<kType>*>(rows.data) + row * rows.stride + column, 1));
  return lanes[0];
}

[[maybe_unused]] float softplus(float x) {
  return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
}

struct Columns {
  F32x16 low, high;
};
SIMD_INLINE Columns load_columns(const float* p) { return {load(p), load(p + kLanes)}; }
SIMD_INLINE void store_columns(float* p, const Columns& c) {
  store(p, c.low);
  store(p + kLanes, c.high);
}
SIMD_INLINE Columns fma(F32x16 a, const Columns& b, const Columns& c) {
  return {fma(a, b.low, c.low), fma(a, b.high, c.high)};
}
SIMD_INLINE Columns mul(F32x16 a, const Columns& b) { return {mul(a, b.low), mul(a, b.high)}; }

}  // namespace
}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
