#include "weight_only_launch.cuh"

namespace vllm::gemm {

VLLM_WEIGHT_ONLY_FORMAT(Int4);

}  // namespace vllm::gemm
