// The instructions of sm90_fp8_block.cuh, by CuTe's wrappers or of their own. tests/native emulates
// the rest of its code on a CPU with other definitions of these.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>

namespace vllm::gemm {

__device__ __forceinline__ void launch_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void copy_float(float* target, const float* source) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
      "l"(source));
}

// Of a thread block of the cluster, from where `own` is in this one.
__device__ __forceinline__ float4 load_cluster(const float* own, uint32_t rank) {
  float4 v;
  const uint32_t address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(own), rank);
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

}  // namespace vllm::gemm
