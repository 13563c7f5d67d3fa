# Toolchain checks, libraries, and the function that turns one row of the kernel table into
# objects of the library and an entry of arch_manifest.json.

find_package(Python REQUIRED COMPONENTS Interpreter)
find_package(Threads REQUIRED)

function(vllm_tvm_ffi_config option result)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config "${option}"
                  OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE status
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no apache-tvm-ffi: "
                        "run `${Python_EXECUTABLE} -m pip install apache-tvm-ffi`.\n${error}")
  endif()
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

vllm_tvm_ffi_config(--includedir TVM_FFI_INCLUDE_DIR)
vllm_tvm_ffi_config(--dlpack-includedir DLPACK_INCLUDE_DIR)
vllm_tvm_ffi_config(--libdir TVM_FFI_LIBRARY_DIR)

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "nvcc not found: building the CPU kernels only")
endif()

add_library(vllm_kernels SHARED)
set_target_properties(vllm_kernels PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${VLLM_OUTPUT_DIR}")

# What every object is compiled with. Contraction is off because each fused multiply-add is
# written out: results must not depend on where a compiler finds one more.
add_library(vllm_options INTERFACE)
target_compile_features(vllm_options INTERFACE cxx_std_20)
target_include_directories(vllm_options SYSTEM INTERFACE "${TVM_FFI_INCLUDE_DIR}"
                                                         "${DLPACK_INCLUDE_DIR}")
target_compile_options(vllm_options INTERFACE -O3 -fPIC -fvisibility=hidden -ffp-contract=off
                                              -fno-math-errno -Wall -Wextra -Wno-psabi)
target_link_libraries(vllm_options INTERFACE Threads::Threads)
# libtvm_ffi is found by name at load: the process has it from the Python package.
target_link_directories(vllm_kernels PRIVATE "${TVM_FFI_LIBRARY_DIR}")
target_link_libraries(vllm_kernels PRIVATE vllm_options tvm_ffi)

# GCC 12 warns about its own AVX-512 headers' deliberately undefined operands.
set(VLLM_ISA_FLAGS_avx512 -DVLLM_CPU_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2
                          -mfma -mf16c -mprefer-vector-width=512 -Wno-maybe-uninitialized)
set(VLLM_ISA_FLAGS_avx2 -DVLLM_CPU_AVX2 -mavx2 -mfma -mf16c)
set(VLLM_ISA_FLAGS_portable)

set(VLLM_MANIFEST_ENTRIES "")

# vllm_cpu_kernel(NAME name SOURCES file... ISAS isa...): each source is compiled once per
# instruction set of this processor family, in that set's namespace.
function(vllm_cpu_kernel)
  cmake_parse_arguments(PARSE_ARGV 0 KERNEL "" "NAME" "SOURCES;ISAS")
  set(built "")
  foreach(isa IN LISTS KERNEL_ISAS)
    if(NOT isa IN_LIST VLLM_CPU_ISAS)
      continue()
    endif()
    set(target "${KERNEL_NAME}_${isa}")
    add_library(${target} OBJECT ${KERNEL_SOURCES})
    target_compile_options(${target} PRIVATE ${VLLM_ISA_FLAGS_${isa}})
    target_link_libraries(${target} PRIVATE vllm_options)
    target_sources(vllm_kernels PRIVATE $<TARGET_OBJECTS:${target}>)
    list(APPEND built "\"${isa}\"")
  endforeach()
  list(JOIN built ", " built)
  list(APPEND VLLM_MANIFEST_ENTRIES "    \"${KERNEL_NAME}\": [${built}]")
  set(VLLM_MANIFEST_ENTRIES "${VLLM_MANIFEST_ENTRIES}" PARENT_SCOPE)
endfunction()

function(vllm_write_manifest)
  list(JOIN VLLM_MANIFEST_ENTRIES ",\n" entries)
  file(GENERATE OUTPUT "${VLLM_OUTPUT_DIR}/arch_manifest.json" CONTENT
"{
  \"version\": \"${VLLM_VERSION}\",
  \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
  \"cuda\": null,
  \"processor\": \"${CMAKE_SYSTEM_PROCESSOR}\",
  \"kernels\": {
${entries}
  }
}
")
endfunction()
