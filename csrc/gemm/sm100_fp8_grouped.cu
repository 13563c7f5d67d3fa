#include "blackwell_fp8_grouped.cuh"

namespace vllm::gemm {
namespace {

template <int kTileN, bool kIsSwapped>
using Gemm = BlackwellFp8Grouped<
    cutlass::arch::Sm100, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedBlockwise1SmSm100,
    cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm,
    cute::Shape<cute::_128, cute::Int<kTileN>, cute::_128>, kIsSwapped, cutlass::bfloat16_t>;

// By the tiles' arithmetic, not measured: an expert's tile of 128 x 32 holds few rows of x where
// one of 128 x 128 would be filled up with zeros.
constexpr GroupedChoice<Fp8BlockArgs> kChoices[] = {
    Gemm<32, true>::choice(32),
    Gemm<128, false>::choice(kAnyRows),
};

}  // namespace

size_t sm100_fp8_grouped_workspace(const Fp8BlockArgs& args, int num_sms) {
  return grouped_choice(kChoices, args).workspace_bytes(args, num_sms);
}

cudaError_t launch_sm100_fp8_grouped(const Fp8BlockArgs& args, void* workspace, int num_sms,
                                     cudaStream_t stream) {
  return grouped_choice(kChoices, args).launch(args, workspace, num_sms, stream);
}

}  // namespace vllm::gemm
