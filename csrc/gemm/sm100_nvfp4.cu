#include "blackwell_gemm.cuh"

namespace vllm::gemm {
namespace {

template <class Out>
using Gemm = BlackwellNvfp4<cutlass::arch::Sm100,
                            cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<256>>,
                            cute::Shape<cute::Int<1>, cute::Int<1>, cute::Int<1>>, Out>;

}  // namespace

cudaError_t launch_sm100_nvfp4(const Nvfp4Args& args, int num_sms, cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return cudaSuccess;
  const auto launch =
      args.is_bf16 ? Gemm<cutlass::bfloat16_t>::launch : Gemm<cutlass::half_t>::launch;
  return launch(args, num_sms, stream);
}

}  // namespace vllm::gemm
