# The table of kernels. A row names a kernel, its sources and what it is built for; targets,
# messages and arch_manifest.json follow from it.

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(VLLM_CPU_ISAS avx512_bf16 avx512 avx2 portable)
  target_compile_definitions(vllm_options INTERFACE VLLM_BUILD_X86)
else()
  set(VLLM_CPU_ISAS portable)
endif()

vllm_cpu_kernel(NAME cpu_linear SOURCES csrc/cpu/kernels/linear.cpp
                ISAS avx512_bf16 avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_attention SOURCES csrc/cpu/kernels/attention.cpp
                ISAS avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_cache_write SOURCES csrc/cpu/kernels/cache_write.cpp
                ISAS avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_layers SOURCES csrc/cpu/kernels/layers.cpp ISAS avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_delta_net SOURCES csrc/cpu/kernels/delta_net.cpp
                ISAS avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_sampling SOURCES csrc/cpu/kernels/sampling.cpp ISAS avx512 avx2 portable)

# Processor-neutral: the choice of instruction set, threads, plans and exported functions.
target_sources(vllm_kernels PRIVATE
  csrc/cpu/dispatch.cpp
  csrc/cpu/thread_pool.cpp
  csrc/cpu/linear_pack.cpp
  csrc/cpu/attention_plan.cpp
  csrc/bindings/cpu_runtime.cpp
  csrc/bindings/cpu_linear.cpp
  csrc/bindings/cpu_attention.cpp
  csrc/bindings/cpu_layers.cpp
  csrc/bindings/cpu_delta_net.cpp
  csrc/bindings/cpu_sampling.cpp)

# A row of the GPU names the file of csrc/bindings that exports it too: where the row is not built,
# nothing of it is exported or left undefined.
vllm_cuda_kernel(NAME fp8_quant
                 SOURCES csrc/quantization/w8a8/tensor_quant.cu
                         csrc/quantization/w8a8/row_quant.cu
                         csrc/quantization/w8a8/group_quant.cu
                         csrc/quantization/w8a8/peer_norm_quant.cu
                         csrc/bindings/cuda_fp8_quant.cu
                 ARCHS 8.0 9.0 10.0 12.0)
# Portable, and native where the target has the conversion to E2M1: 10.0a, 12.0f and the like.
vllm_cuda_kernel(NAME nvfp4_quant
                 SOURCES csrc/quantization/fp4/nvfp4_quant.cu csrc/bindings/cuda_fp4.cu
                 ARCHS 8.0 9.0 10.0 12.0)
# Norms, rotation, activation, sampling: what stands between the GEMMs.
vllm_cuda_kernel(NAME cuda_layers
                 SOURCES csrc/layers/elementwise.cu csrc/layers/norm.cu csrc/layers/rotary.cu
                         csrc/layers/sampling.cu csrc/bindings/cuda_layers.cu
                 ARCHS 8.0 9.0 10.0 12.0)
# Short sums over the GPUs of a machine, over memory that all of them map.
vllm_cuda_kernel(NAME peer_sum
                 SOURCES csrc/layers/peer_sum.cu csrc/bindings/cuda_peers.cu
                 ARCHS 8.0 9.0 10.0 12.0)
# Its conversion from E4M3 is an instruction from 8.9 on.
vllm_cuda_kernel(NAME skinny_fp8_block_gemm
                 SOURCES csrc/gemm/skinny_fp8_block.cu csrc/bindings/cuda_gemm.cu
                 ARCHS 8.9 9.0 10.0 12.0)
# Weights of 4 and 8 bits widened in registers, by activations as they are.
vllm_cuda_kernel(NAME marlin_gemm
                 SOURCES csrc/gemm/weight_only_fp8.cu csrc/gemm/weight_only_nvfp4.cu
                         csrc/gemm/weight_only_int4.cu csrc/gemm/weight_only.cu
                         csrc/bindings/cuda_weight_only.cu
                 ARCHS 8.0 9.0 10.0 11.0 12.0)
# int4 by FP8 activations, exported with the row above. 9.0, which no backend asks for, is for tests
# of its numbers.
vllm_cuda_kernel(NAME marlin_w4a8_gemm
                 SOURCES csrc/gemm/weight_only_w4a8.cu
                 ARCHS 8.9 9.0 12.0 MIN_CUDA 12.4)
# FP8 block and NVFP4 GEMMs, one row per generation of tensor cores.
vllm_cuda_kernel(NAME sm90_fp8_block_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm90_fp8_block.cu
                 ARCHS 9.0a)
vllm_cuda_kernel(NAME sm100_fp8_block_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm100_fp8_block.cu
                 ARCHS 10.0f MIN_CUDA 12.8)
vllm_cuda_kernel(NAME sm120_fp8_block_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm120_fp8_block.cu
                 ARCHS 12.0f MIN_CUDA 12.8)
vllm_cuda_kernel(NAME sm100_fp8_grouped_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm100_fp8_grouped.cu
                 ARCHS 10.0f MIN_CUDA 12.8)
vllm_cuda_kernel(NAME sm120_fp8_grouped_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm120_fp8_grouped.cu
                 ARCHS 12.0f MIN_CUDA 12.8)
vllm_cuda_kernel(NAME sm100_nvfp4_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm100_nvfp4.cu
                 ARCHS 10.0f MIN_CUDA 12.8)
vllm_cuda_kernel(NAME sm120_nvfp4_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm120_nvfp4.cu
                 ARCHS 12.0f MIN_CUDA 12.8)
vllm_cuda_kernel(NAME sm100_nvfp4_grouped_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm100_nvfp4_grouped.cu
                 ARCHS 10.0f MIN_CUDA 12.8)
vllm_cuda_kernel(NAME sm120_nvfp4_grouped_gemm USES_CUTLASS
                 SOURCES csrc/gemm/sm120_nvfp4_grouped.cu
                 ARCHS 12.0f MIN_CUDA 12.8)

# Shared by rows; the exports of the GEMMs say which rows are missing when one is called.
vllm_cuda_host(SOURCES csrc/gemm/tensor_map.cu csrc/bindings/cuda_cutlass.cu)
