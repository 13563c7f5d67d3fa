# cmake -DREQUEST=... -DKERNEL_ARCHS=... -DCUDA=... -P plan.cmake: prints what one kernel becomes,
# one `name=list` a line.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/../../cmake/utils.cmake")

if(REQUEST STREQUAL "default")
  vllm_default_archs(REQUEST ${CUDA})
endif()
vllm_expand_names(REQUEST "${REQUEST}" ${CUDA})
vllm_accept_archs(ACCEPTED REJECTED "${REQUEST}" ${CUDA})
vllm_drop_covered(REQUESTED COVERED "${ACCEPTED}")
vllm_plan_kernel(PLAN "${REQUESTED}" "${KERNEL_ARCHS}" ${CUDA} "${BLOCKED}")
vllm_manifest_archs(MANIFEST "${PLAN_BUILT}")
vllm_suffix_advice(ADVICE "${ACCEPTED}" ${CUDA})
if(MEMORY_MIB)
  vllm_cutlass_jobs(JOBS ${MEMORY_MIB} ${CORES})
endif()
set(LINES "")
foreach(name ACCEPTED COVERED REJECTED PLAN_BUILT PLAN_GENCODES PLAN_SKIPPED PLAN_ABSENT MANIFEST ADVICE
        JOBS)
  string(APPEND LINES "${name}=${${name}}\n")
endforeach()
# What `message` says goes to stderr.
execute_process(COMMAND "${CMAKE_COMMAND}" -E echo_append "${LINES}")
