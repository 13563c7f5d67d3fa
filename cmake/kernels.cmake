# The table of kernels. A row names a kernel, its sources and what it is built for; targets and
# arch_manifest.json follow from it.

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(VLLM_CPU_ISAS avx512 avx2 portable)
  target_compile_definitions(vllm_options INTERFACE VLLM_BUILD_X86)
else()
  set(VLLM_CPU_ISAS portable)
endif()

vllm_cpu_kernel(NAME cpu_linear SOURCES csrc/cpu/kernels/linear.cpp ISAS avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_attention SOURCES csrc/cpu/kernels/attention.cpp
                ISAS avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_cache_write SOURCES csrc/cpu/kernels/cache_write.cpp
                ISAS avx512 avx2 portable)
vllm_cpu_kernel(NAME cpu_layers SOURCES csrc/cpu/kernels/layers.cpp ISAS avx512 avx2 portable)
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
  csrc/bindings/cpu_sampling.cpp)

vllm_write_manifest()
