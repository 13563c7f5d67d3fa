#include "blackwell_nvfp4_grouped.cuh"

namespace vllm::gemm {
namespace {

template <int kTileN, bool kIsSwapped>
using Gemm = BlackwellNvfp4Grouped<cutlass::arch::Sm100,
                                   cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100,
                                   cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm,
                                   cute::Shape<cute::_128, cute::Int<kTileN>, cute::_256>,
                                   kIsSwapped, cutlass::arch::sm100_smem_capacity_bytes>;

// By the tiles' arithmetic, not measured: CUTLASS's narrowest tile, of 64 columns, holds few rows
// of x where one of 128 rows would be filled up with zeros.
constexpr GroupedChoice<Nvfp4Args> kChoices[] = {
    Gemm<64, true>::choice(64),
    Gemm<128, false>::choice(kAnyRows),
};

}  // namespace

size_t sm100_nvfp4_grouped_workspace(const Nvfp4Args& args, int num_sms) {
  return grouped_choice(kChoices, args).workspace_bytes(args, num_sms);
}

cudaError_t launch_sm100_nvfp4_grouped(const Nvfp4Args& args, void* workspace, int num_sms,
                                       cudaStream_t stream) {
  return grouped_choice(kChoices, args).launch(args, workspace, num_sms, stream);
}

}  // namespace vllm::gemm
