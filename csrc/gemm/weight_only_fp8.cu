#include "weight_only_launch.cuh"

namespace vllm::gemm {

VLLM_WEIGHT_ONLY_FORMAT(Fp8);

}  // namespace vllm::gemm
