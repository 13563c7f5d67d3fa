// Apart from the other formats: compiled only for architectures with products of E4M3.
#include "weight_only_launch.cuh"

namespace vllm::gemm {

cudaError_t launch_w4a8(const WeightOnlyArgs& args, bool is_bf16, WeightOnlyShape shape,
                        bool has_clusters, cudaStream_t stream) {
  const int num_blocks = args.blocks != nullptr ? args.num_blocks : args.m;
  if (num_blocks == 0 || args.weight.n == 0) return cudaSuccess;
  return launch_format<Int4ByFp8>(args, is_bf16, shape, has_clusters, stream);
}

}  // namespace vllm::gemm
