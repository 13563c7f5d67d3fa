#include "blackwell_nvfp4_grouped.cuh"

namespace vllm::gemm {
namespace {

template <bool kIsSwapped>
using Gemm =
    BlackwellNvfp4Grouped<cutlass::arch::Sm120, cutlass::gemm::collective::KernelScheduleAuto,
                          cutlass::epilogue::collective::EpilogueScheduleAuto,
                          cute::Shape<cute::_128, cute::_128, cute::_128>, kIsSwapped,
                          cutlass::arch::sm120_smem_capacity_bytes>;

// One row: CUTLASS's tiles of this generation hold scales of whole tiles of 128 rows on both sides,
// so that none is narrower than 128 x 128, and swapping the sides saves nothing.
constexpr GroupedChoice<Nvfp4Args> kChoices[] = {
    Gemm<false>::choice(kAnyRows),
};

}  // namespace

size_t sm120_nvfp4_grouped_workspace(const Nvfp4Args& args, int num_sms) {
  return grouped_choice(kChoices, args).workspace_bytes(args, num_sms);
}

cudaError_t launch_sm120_nvfp4_grouped(const Nvfp4Args& args, void* workspace, int num_sms,
                                       cudaStream_t stream) {
  return grouped_choice(kChoices, args).launch(args, workspace, num_sms, stream);
}

}  // namespace vllm::gemm
