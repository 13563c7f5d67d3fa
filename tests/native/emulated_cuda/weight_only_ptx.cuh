// What csrc/gemm/weight_only_ptx.cuh does, from the description of PTX.
#pragma once
#include "warp.h"

namespace vllm::gemm {

inline thread_local char weight_only_memory[99 << 10] alignas(16);  // most of every chip

inline uint4 load_once(const uint4* address) { return *address; }
inline int load_fresh(const int* address) { return *address; }
template <typename V>
V kept(V v) {
  return v;
}
// Copies are made when a thread waits for them: as late as a device may make them.
struct Copy {
  void* target;
  const void* source;
  int num_bytes, all_bytes;
};
struct Copies {
  std::vector<Copy> begun;
  std::vector<std::vector<Copy>> groups;
};
inline Copies& copies_of_thread() {
  static thread_local std::vector<Copies> of_threads(1024);
  return of_threads[threadIdx.x];
}
template <int kBytes>
void copy_async(void* target, const void* source, int num_bytes) {
  copies_of_thread().begun.push_back({target, source, num_bytes, kBytes});
}
inline void commit_copies() {
  Copies& own = copies_of_thread();
  own.groups.push_back(std::move(own.begun));
  own.begun.clear();
}
template <int kLast>
void wait_for_copies() {
  auto& groups = copies_of_thread().groups;
  while (groups.size() > kLast) {
    for (const Copy& copy : groups.front()) {
      std::memset(copy.target, 0, copy.all_bytes);
      std::memcpy(copy.target, copy.source, copy.num_bytes);
    }
    groups.erase(groups.begin());
  }
}

inline uint32_t masked_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }

inline uint32_t distances(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 8) {
    const int distance = static_cast<int>(a >> shift & 255u) - static_cast<int>(b >> shift & 255u);
    result |= static_cast<uint32_t>(std::abs(distance)) << shift;
  }
  return result;
}

struct E4m3 {
  uint8_t bits;
  explicit operator float() const { return __half2float(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)); }
};

// The lowest bits are the number's.
template <typename T>
double to_number(uint32_t bits) {
  T number;
  std::memcpy(&number, &bits, sizeof(T));
  return static_cast<float>(number);
}

// Rounded once: where a product does not fit into a float32, the test would have to fail.
template <typename T>
uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const double wanted = to_number<T>(a >> shift) * to_number<T>(b >> shift);
    const auto exact = static_cast<float>(wanted + to_number<T>(c >> shift));
    T rounded;
    if constexpr (std::is_same_v<T, __half>) {
      rounded = __float2half_rn(exact);
    } else {
      rounded = __float2bfloat16_rn(exact);
    }
    uint16_t bits;
    std::memcpy(&bits, &rounded, 2);
    result |= static_cast<uint32_t>(bits) << shift;
  }
  return result;
}

// For n numbers in a register: A is [16, 8 n], B [8 n, 8].
template <typename T>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::Warp& warp = emulated::block->warps[threadIdx.x / 32];
  constexpr int n = 4 / sizeof(T);
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  std::copy(a, a + 4, warp.a[lane]);
  warp.b[lane][0] = b0, warp.b[lane][1] = b1;
  emulated::meet(warp.meeting);
  for (int i = 0; i < 4; ++i) {
    const int row = group + i / 2 * 8, column = quad * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 8 * n; ++k) {
      const int place = k / (4 * n), other = k % (4 * n) / n, shift = k % n * (32 / n);
      const uint32_t own = warp.a[row % 8 * 4 + other][place * 2 + row / 8];
      sum += to_number<T>(own >> shift) * to_number<T>(warp.b[column * 4 + other][place] >> shift);
    }
    d[i] = static_cast<float>(sum);
  }
  emulated::meet(warp.meeting);
}

}  // namespace vllm::gemm
