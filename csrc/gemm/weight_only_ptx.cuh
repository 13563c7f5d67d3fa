// The instructions of the weight-only GEMM that C++ does not name. tests/native emulates the rest
// of its code on a CPU with other definitions of these.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vllm::gemm {

extern __shared__ __align__(16) char weight_only_memory[];  // as large as the launch says

__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;  // W is read once: it should not evict what is read again
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// What a kernel that has just ended may have written.
__device__ __forceinline__ int load_fresh(const int* address) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

// What is needed again and again, for a compiler that would compute it again and again.
__device__ __forceinline__ int kept(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
template <typename V>
__device__ __forceinline__ V* kept(V* v) {
  asm volatile("" : "+l"(v));
  return v;
}

// kBytes to shared memory, of which the first num_bytes come from `source`, the rest are zeros.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* target, const void* source, int num_bytes) {
  const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place), "l"(source),
                 "r"(num_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(source),
                 "n"(kBytes), "r"(num_bytes)
                 : "memory");
  }
}

// What was begun since the last time is a group.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// For this thread's groups but the kLast newest.
template <int kLast>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
}

// (a & b) | c in one instruction: of two constants, a compiler makes two.
__device__ __forceinline__ uint32_t masked_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// |a - b| of each byte.
__device__ __forceinline__ uint32_t distances(uint32_t a, uint32_t b) { return __vabsdiffu4(a, b); }

// a * b + c of both numbers in a register, rounded once, subnormal numbers kept.
template <typename T>
__device__ __forceinline__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c);

template <>
__device__ __forceinline__ uint32_t fma_pairs<__nv_bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

template <>
__device__ __forceinline__ uint32_t fma_pairs<__half>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// A number of activations that are quantised.
struct E4m3 {
  uint8_t bits;
};

// d += A[16, 8 n] * B[8 n, 8] by the lanes of a warp, for n numbers in a register: of lane (group,
// quad), `a` holds columns n * quad and on of rows group and group + 8, then those 4 n columns
// later of both; b0 and b1 the same rows of column group; d columns 2 * quad and on of rows group
// and group + 8.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// From 8.9 on; 9.0 has no such instruction, and takes both apart into fp16.
template <>
__device__ __forceinline__ void mma<E4m3>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace vllm::gemm
