#include "blackwell_gemm.cuh"

namespace vllm::gemm {
namespace {

template <class Out>
using Gemm = BlackwellFp8Block<cutlass::arch::Sm120, cutlass::gemm::KernelScheduleSm120Blockwise,
                               cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<128>>,
                               cute::Shape<cute::Int<1>, cute::Int<1>, cute::Int<1>>, Out>;

}  // namespace

cudaError_t launch_sm120_fp8_block(const Fp8BlockArgs& args, int num_sms, cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return cudaSuccess;
  const auto launch =
      args.is_bf16 ? Gemm<cutlass::bfloat16_t>::launch : Gemm<cutlass::half_t>::launch;
  return launch(args, num_sms, stream);
}

}  // namespace vllm::gemm
