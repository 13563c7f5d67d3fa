# Functions that turn rows of the kernel table into objects of one library, messages, and
# entries of arch_manifest.json.

set(VLLM_MIN_CUTLASS 4.2.0)

# Memory that this build may use, in MiB: the machine's, or its container's limit.
function(vllm_memory_mib out)
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
  foreach(file /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes)
    if(EXISTS ${file})
      file(STRINGS ${file} limit LIMIT_COUNT 1)
      if(limit MATCHES "^[0-9]+$")
        math(EXPR limit "${limit} / 1048576")
        if(limit GREATER 0 AND limit LESS memory)
          set(memory ${limit})
        endif()
      endif()
    endif()
  endforeach()
  set(${out} ${memory} PARENT_SCOPE)
endfunction()

add_library(vllm_kernels SHARED)
set_target_properties(vllm_kernels PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${VLLM_OUTPUT_DIR}"
                                              SKIP_BUILD_RPATH ON)

# What every C++ object is compiled with. Contraction is off because each fused multiply-add is
# written out: results must not depend on where a compiler finds one more.
add_library(vllm_options INTERFACE)
target_compile_features(vllm_options INTERFACE cxx_std_20)
target_include_directories(vllm_options SYSTEM INTERFACE "${TVM_FFI_INCLUDE_DIR}"
                                                         "${DLPACK_INCLUDE_DIR}")
target_compile_options(vllm_options INTERFACE -O3 -fPIC -fvisibility=hidden -ffp-contract=off
                                              -fno-math-errno -Wall -Wextra -Wno-psabi)
target_link_libraries(vllm_options INTERFACE Threads::Threads)
# libtvm_ffi is found by name at load: the process has it from the Python package. So the library
# needs no RUNPATH, and must have none: it would be a folder of the machine that built it.
target_link_directories(vllm_kernels PRIVATE "${TVM_FFI_LIBRARY_DIR}")
target_link_libraries(vllm_kernels PRIVATE vllm_options tvm_ffi)

# GCC 12 warns about its own AVX-512 headers' deliberately undefined operands.
set(VLLM_ISA_FLAGS_avx512 -DVLLM_CPU_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2
                          -mfma -mf16c -mprefer-vector-width=512 -Wno-uninitialized
                          -Wno-maybe-uninitialized)
set(VLLM_ISA_FLAGS_avx512_bf16 ${VLLM_ISA_FLAGS_avx512} -DVLLM_CPU_AVX512_BF16 -mavx512bf16
                               -mavx512vbmi)
set(VLLM_ISA_FLAGS_avx2 -DVLLM_CPU_AVX2 -mavx2 -mfma -mf16c)
set(VLLM_ISA_FLAGS_portable)

if(VLLM_CUDA_VERSION)
  add_library(vllm_cuda_options INTERFACE)
  target_include_directories(vllm_cuda_options SYSTEM INTERFACE
                             "${TVM_FFI_INCLUDE_DIR}" "${DLPACK_INCLUDE_DIR}")
  # As a flag: CMake 3.25 does not know that nvcc 13 has C++20.
  target_compile_options(vllm_cuda_options INTERFACE
                         -std=c++20 -O3 --expt-relaxed-constexpr -Xfatbin=-compress-all
                         -Xcompiler=-fPIC,-fvisibility=hidden,-Wall)
  # The runtime is linked in, so that the library loads where there is neither toolkit nor driver;
  # its symbols stay inside, because torch brings a runtime of its own into the process. Anything
  # else undefined, such as the driver's functions, has to fail here and not at load.
  target_link_libraries(vllm_kernels PRIVATE CUDA::cudart_static)
  target_link_options(vllm_kernels PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined)

  vllm_memory_mib(VLLM_MEMORY_MIB)
  cmake_host_system_information(RESULT VLLM_NUM_CORES QUERY NUMBER_OF_LOGICAL_CORES)
  vllm_cutlass_jobs(VLLM_CUTLASS_JOBS ${VLLM_MEMORY_MIB} ${VLLM_NUM_CORES})
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS cutlass=${VLLM_CUTLASS_JOBS})
endif()

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
    list(APPEND built ${isa})
  endforeach()
  vllm_record_kernel(${KERNEL_NAME} "${built}")
  set(flags "")
  foreach(isa IN LISTS built)
    list(APPEND flags ${VLLM_ISA_FLAGS_${isa}})
  endforeach()
  vllm_record_sources(${KERNEL_NAME} vllm_options "${CMAKE_CXX_FLAGS};${flags}" "${KERNEL_SOURCES}")
endfunction()

# vllm_cuda_kernel(NAME name SOURCES file... ARCHS arch... [MIN_CUDA version] [USES_CUTLASS]
#                  [FLAGS flag...]): each source is compiled for those of ARCHS that were asked for.
# ARCHS say what the code needs (see utils.cmake): 12.0 compiles for every chip of generation 12
# with any suffix, 12.0f needs the family's instructions, 12.0a is for 12.0 alone.
function(vllm_cuda_kernel)
  cmake_parse_arguments(PARSE_ARGV 0 KERNEL "USES_CUTLASS" "NAME;MIN_CUDA" "SOURCES;ARCHS;FLAGS")
  if(NOT VLLM_CUDA_VERSION)
    return()
  endif()
  set(blocked "")
  if(KERNEL_MIN_CUDA AND VLLM_CUDA_VERSION VERSION_LESS KERNEL_MIN_CUDA)
    set(blocked "needs CUDA ${KERNEL_MIN_CUDA}, this is ${VLLM_CUDA_VERSION}")
  elseif(KERNEL_USES_CUTLASS AND NOT VLLM_CUTLASS_VERSION)
    set(blocked "needs CUTLASS: ${Python_EXECUTABLE} -m pip install --no-deps nvidia-cutlass")
  elseif(KERNEL_USES_CUTLASS AND VLLM_CUTLASS_VERSION VERSION_LESS VLLM_MIN_CUTLASS)
    set(blocked "needs CUTLASS ${VLLM_MIN_CUTLASS}, nvidia-cutlass is ${VLLM_CUTLASS_VERSION}")
  endif()
  vllm_plan_kernel(PLAN "${VLLM_CUDA_ARCHS}" "${KERNEL_ARCHS}" ${VLLM_CUDA_VERSION} "${blocked}")
  vllm_report_plan(${KERNEL_NAME} "${PLAN_BUILT}" "${PLAN_ABSENT}" "${PLAN_SKIPPED}")
  if(NOT PLAN_BUILT)
    return()
  endif()
  add_library(${KERNEL_NAME} OBJECT ${KERNEL_SOURCES})
  target_compile_options(${KERNEL_NAME} PRIVATE ${PLAN_GENCODES} ${KERNEL_FLAGS})
  target_link_libraries(${KERNEL_NAME} PRIVATE vllm_cuda_options)
  if(KERNEL_USES_CUTLASS)
    target_include_directories(${KERNEL_NAME} SYSTEM PRIVATE "${VLLM_CUTLASS_INCLUDE_DIR}")
    set_target_properties(${KERNEL_NAME} PROPERTIES JOB_POOL_COMPILE cutlass)
  endif()
  target_sources(vllm_kernels PRIVATE $<TARGET_OBJECTS:${KERNEL_NAME}>)
  set_property(GLOBAL APPEND PROPERTY VLLM_CUDA_KERNELS ${KERNEL_NAME})
  vllm_manifest_archs(archs "${PLAN_BUILT}")
  vllm_record_kernel(${KERNEL_NAME} "${archs}")
  set(flags ${CMAKE_CUDA_FLAGS} ${KERNEL_FLAGS})
  if(KERNEL_USES_CUTLASS)
    list(APPEND flags "CUTLASS ${VLLM_CUTLASS_VERSION}")
  endif()
  vllm_record_sources(${KERNEL_NAME} vllm_cuda_options "${flags}" "${KERNEL_SOURCES}")
endfunction()

# vllm_cuda_host(SOURCES file...): host code that several rows need, compiled once where there are
# GPU kernels at all. VLLM_BUILT_<NAME> is defined for each row that is built.
function(vllm_cuda_host)
  cmake_parse_arguments(PARSE_ARGV 0 HOST "" "" "SOURCES")
  get_property(built GLOBAL PROPERTY VLLM_CUDA_KERNELS)
  if(NOT built)
    return()
  endif()
  list(TRANSFORM built TOUPPER)
  list(TRANSFORM built PREPEND VLLM_BUILT_)
  list(GET VLLM_CUDA_ARCHS 0 arch)
  vllm_gencodes(gencode ${arch})
  add_library(vllm_cuda_host OBJECT ${HOST_SOURCES})
  target_compile_options(vllm_cuda_host PRIVATE ${gencode})
  target_compile_definitions(vllm_cuda_host PRIVATE ${built})
  target_link_libraries(vllm_cuda_host PRIVATE vllm_cuda_options)
  target_sources(vllm_kernels PRIVATE $<TARGET_OBJECTS:vllm_cuda_host>)
endfunction()

# Notes an entry `name: what it was built for` of the manifest.
function(vllm_record_kernel name built)
  list(TRANSFORM built REPLACE "(.+)" "\"\\1\"")
  list(JOIN built ", " built)
  set_property(GLOBAL APPEND PROPERTY VLLM_KERNELS "    \"${name}\": [${built}]")
endfunction()

# Notes what a kernel's build id is made of (build_ids.py): a line `name|flags|source|source...`.
function(vllm_record_sources name options flags sources)
  get_target_property(common ${options} INTERFACE_COMPILE_OPTIONS)
  list(JOIN common " " common)
  list(JOIN flags " " flags)
  list(TRANSFORM sources PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  list(JOIN sources "|" sources)
  set_property(GLOBAL APPEND_STRING PROPERTY VLLM_SOURCES
               "${name}|${CMAKE_BUILD_TYPE} ${common} ${flags}|${sources}\n")
endfunction()

# Says what a CUDA kernel is built for, and notes what it is not: `kernel|arch|reason`.
function(vllm_report_plan name built absent skipped)
  set(served ${VLLM_CUDA_ARCHS})
  set(text "")
  if(absent)
    list(REMOVE_ITEM served ${absent})
    list(JOIN absent " " absent)
    set(text ", has no code for ${absent}")
  endif()
  list(JOIN built " " built)
  if(NOT built)
    set(built "not built")
  endif()
  message(STATUS "  ${name}: ${built}${text}")
  list(TRANSFORM skipped PREPEND "${name}|")
  set_property(GLOBAL APPEND PROPERTY VLLM_SKIPPED ${skipped})
  set_property(GLOBAL APPEND PROPERTY VLLM_SERVED ${served})
endfunction()

# Sets `out` to all that was asked for and is not built, `kernel|arch|reason`; the kernel `*` stands
# for every one.
function(vllm_all_skipped out)
  get_property(skipped GLOBAL PROPERTY VLLM_SKIPPED)
  get_property(served GLOBAL PROPERTY VLLM_SERVED)
  set(refused ${VLLM_REFUSED_ARCHS})
  foreach(arch IN LISTS VLLM_CUDA_ARCHS)
    if(NOT arch IN_LIST served)
      list(APPEND refused "${arch}|no kernel has code for it")
    endif()
  endforeach()
  list(TRANSFORM refused PREPEND "*|")
  set(${out} ${refused} ${skipped} PARENT_SCOPE)
endfunction()

# Writes the manifest, and lists what was asked for and is not built.
function(vllm_finish)
  vllm_all_skipped(skipped)
  set(lines "")
  set(entries "")
  foreach(entry IN LISTS skipped)
    string(REGEX MATCH "^([^|]*)[|]([^|]*)[|](.*)$" matched "${entry}")
    list(APPEND lines "  ${CMAKE_MATCH_1} ${CMAKE_MATCH_2}: ${CMAKE_MATCH_3}")
    set(item "")
    foreach(pair "kernel=${CMAKE_MATCH_1}" "arch=${CMAKE_MATCH_2}" "reason=${CMAKE_MATCH_3}")
      string(REGEX REPLACE "([\"\\])" "\\\\\\1" pair "${pair}")
      string(REGEX REPLACE "^([a-z]+)=(.*)$" "\"\\1\": \"\\2\"" pair "${pair}")
      list(APPEND item "${pair}")
    endforeach()
    list(JOIN item ", " item)
    list(APPEND entries "    {${item}}")
  endforeach()
  vllm_write_manifest("${entries}")
  list(JOIN lines "\n" lines)
  get_property(built GLOBAL PROPERTY VLLM_CUDA_KERNELS)
  if(VLLM_CUDA_VERSION AND NOT built)
    message(FATAL_ERROR "No GPU kernel can be built with CUDA ${VLLM_CUDA_VERSION}: name other "
                        "architectures, or set VLLM_TARGET_DEVICE=cpu.\n${lines}")
  endif()
  if(NOT lines)
    return()
  endif()
  if(VLLM_STRICT_ARCHS)
    message(FATAL_ERROR "Asked for and impossible to build, with VLLM_STRICT_ARCHS=ON:\n${lines}")
  endif()
  message(NOTICE "Asked for and not built (-DVLLM_STRICT_ARCHS=ON makes this an error):\n${lines}")
endfunction()

# The manifest follows the library into the output folder, with what its kernels were built from:
# it must not describe a failed build.
function(vllm_write_manifest skipped)
  get_property(kernels GLOBAL PROPERTY VLLM_KERNELS)
  list(JOIN kernels ",\n" kernels)
  list(JOIN skipped ",\n" skipped)
  set(cuda null)
  if(VLLM_CUDA_VERSION)
    set(cuda "\"${VLLM_CUDA_VERSION}\"")
  endif()
  set(written "${CMAKE_CURRENT_BINARY_DIR}/arch_manifest.json")
  file(CONFIGURE OUTPUT "${written}" @ONLY CONTENT
"{
  \"version\": \"@VLLM_VERSION@\",
  \"compiler\": \"@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@\",
  \"cuda\": @cuda@,
  \"processor\": \"@CMAKE_SYSTEM_PROCESSOR@\",
  \"kernels\": {
@kernels@
  },
  \"skipped\": [
@skipped@
  ]
}
")
  get_property(sources GLOBAL PROPERTY VLLM_SOURCES)
  set(listed "${CMAKE_CURRENT_BINARY_DIR}/kernel_sources.txt")
  file(CONFIGURE OUTPUT "${listed}" @ONLY CONTENT "@sources@")
  add_custom_target(vllm_manifest ALL DEPENDS vllm_kernels
                    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/build_ids.py"
                            "${written}" "${listed}" "${VLLM_OUTPUT_DIR}")
endfunction()
