# What this machine builds with: Python's packages, nvcc, CUTLASS, and the architectures asked for.
# Sets VLLM_CUDA_VERSION (empty: CPU kernels only), VLLM_CUDA_ARCHS (those this toolkit compiles
# for), VLLM_REFUSED_ARCHS (`text|reason`), VLLM_CUTLASS_VERSION and VLLM_CUTLASS_INCLUDE_DIR.

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

# The chips in this machine, each with the suffix that loses nothing on it.
function(vllm_installed_chips out)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE status
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0 OR NOT output MATCHES "^[0-9.\n]+$")
    message(FATAL_ERROR "The architecture `native` needs nvidia-smi and a GPU (${status} ${output} "
                        "${error}): name the architecture instead, such as 9.0a.")
  endif()
  string(REPLACE "\n" ";" chips "${output}")
  set(archs "")
  foreach(chip IN LISTS chips)
    if(NOT chip VERSION_LESS 9.0)
      string(APPEND chip "a")
    endif()
    list(APPEND archs ${chip})
  endforeach()
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# The request as it was given, and by what; both empty if nothing was asked for. Options of this
# configuration win over variables of the environment.
function(vllm_requested_archs out out_source)
  set(text "")
  set(source "")
  foreach(candidate "TORCH_CUDA_ARCH_LIST" "CMAKE_CUDA_ARCHITECTURES"
                    "ENV{TORCH_CUDA_ARCH_LIST}" "ENV{CUDAARCHS}")
    if(candidate MATCHES "^ENV{(.*)}$")
      set(value "$ENV{${CMAKE_MATCH_1}}")
    else()
      set(value "${${candidate}}")
    endif()
    if(value)
      set(text "${value}")
      string(REGEX REPLACE "^ENV{(.*)}$" "\\1 (environment)" source "${candidate}")
      break()
    endif()
  endforeach()
  set(${out} "${text}" PARENT_SCOPE)
  set(${out_source} "${source}" PARENT_SCOPE)
endfunction()

# Headers of the wheel nvidia-cutlass. It is looked up, not imported: its own imports are many.
function(vllm_find_cutlass out_version out_include_dir)
  set(lookup "import importlib.util as u; s = u.find_spec('cutlass_library'); \
print(s.submodule_search_locations[0] if s else '', end='')")
  execute_process(COMMAND "${Python_EXECUTABLE}" -c "${lookup}" OUTPUT_VARIABLE package)
  set(include_dir "${package}/source/include")
  set(version "")
  if(package AND EXISTS "${include_dir}/cutlass/version.h")
    file(READ "${include_dir}/cutlass/version.h" text)
    foreach(part MAJOR MINOR PATCH)
      string(REGEX MATCH "CUTLASS_${part} +([0-9]+)" matched "${text}")
      list(APPEND version "${CMAKE_MATCH_1}")
    endforeach()
    list(JOIN version "." version)
  endif()
  set(${out_version} "${version}" PARENT_SCOPE)
  set(${out_include_dir} "${include_dir}" PARENT_SCOPE)
endfunction()

if(NOT VLLM_TARGET_DEVICE MATCHES "^(auto|cpu|cuda)$")
  message(FATAL_ERROR "VLLM_TARGET_DEVICE: given '${VLLM_TARGET_DEVICE}'; "
                      "accepted: auto, cpu, cuda")
endif()

set(VLLM_CUDA_VERSION "")
set(VLLM_CUDA_ARCHS "")
set(VLLM_REFUSED_ARCHS "")
vllm_requested_archs(VLLM_REQUEST VLLM_REQUEST_SOURCE)
if(VLLM_TARGET_DEVICE STREQUAL "cpu")
  message(STATUS "Building the CPU kernels only, as VLLM_TARGET_DEVICE=cpu asks")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
               PATH_SUFFIXES bin)
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  if(VLLM_TARGET_DEVICE STREQUAL "cuda")
    message(FATAL_ERROR "VLLM_TARGET_DEVICE=cuda, but nvcc is neither on PATH nor under CUDA_HOME, "
                        "CUDA_PATH or /usr/local/cuda: set CUDACXX to it.")
  endif()
  # Whoever names architectures wants GPU kernels: pip hides that a wheel has none.
  if(VLLM_REQUEST)
    string(REPLACE ";" " " text "${VLLM_REQUEST}")
    message(FATAL_ERROR "${VLLM_REQUEST_SOURCE}: given '${text}', but nvcc was not found: set CUDACXX "
                        "to it, or VLLM_TARGET_DEVICE=cpu for the CPU kernels only.")
  endif()
  message(STATUS "nvcc not found: building the CPU kernels only")
  return()
endif()

# Each kernel names its own architectures: CMake's, which older versions refuse with an `f`, and
# whose default is the toolkit's oldest chip, must add none.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(VLLM_CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")

if(VLLM_REQUEST MATCHES "native")
  vllm_installed_chips(chips)
  string(REPLACE "native" "${chips}" VLLM_REQUEST "${VLLM_REQUEST}")
endif()
if(VLLM_REQUEST)
  vllm_expand_names(VLLM_REQUEST "${VLLM_REQUEST}" ${VLLM_CUDA_VERSION})
  # A misspelt word beside good ones would be a chip without kernels.
  vllm_parse_archs(unused malformed "${VLLM_REQUEST}")
  if(malformed)
    list(TRANSFORM malformed REPLACE "^([^|]*)[|](.*)$" "'\\1' is \\2")
    list(JOIN malformed "; " malformed)
    message(FATAL_ERROR "${VLLM_REQUEST_SOURCE}: ${malformed}.")
  endif()
  vllm_accept_archs(VLLM_CUDA_ARCHS VLLM_REFUSED_ARCHS "${VLLM_REQUEST}" ${VLLM_CUDA_VERSION})
else()
  vllm_default_archs(VLLM_CUDA_ARCHS ${VLLM_CUDA_VERSION})
  set(VLLM_REQUEST_SOURCE "the project's default for this toolkit")
endif()
vllm_drop_covered(VLLM_CUDA_ARCHS covered "${VLLM_CUDA_ARCHS}")
foreach(arch IN LISTS covered)
  message(STATUS "${arch} is served by ${arch}f: nvcc compiles for one of the two")
endforeach()
list(JOIN VLLM_CUDA_ARCHS " " archs)
message(STATUS "CUDA ${VLLM_CUDA_VERSION}, architectures: ${archs} (${VLLM_REQUEST_SOURCE})")
vllm_suffix_advice(advice "${VLLM_CUDA_ARCHS}" ${VLLM_CUDA_VERSION})
if(advice)
  message(NOTICE "${advice}")
endif()
vllm_find_cutlass(VLLM_CUTLASS_VERSION VLLM_CUTLASS_INCLUDE_DIR)
