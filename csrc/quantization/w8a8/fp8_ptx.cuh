// The instructions of the FP8 quantisers that C++ does not name. tests/native emulates the rest of
// their code on a CPU with other definitions of these.
#pragma once
#include <cstdint>

namespace vllm::w8a8 {

// max(a, b), or NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What follows from the value is computed from here on, not kept from before.
template <typename Word>
__device__ __forceinline__ void forget(Word& value) {
  static_assert(sizeof(Word) == 4);
  asm volatile("" : "+r"(value));
}

// 16 bytes to shared memory, which wait_for_copies awaits. Blocks of a multiprocessor that want the
// same ones find them in its cache.
__device__ __forceinline__ void copy_async(uint4* target, const void* source) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}

// Of this thread.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace vllm::w8a8
