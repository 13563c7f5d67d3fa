// What the grouped GEMMs of CUTLASS's collectives for Blackwell share: many products in one launch.
// Only the GPU knows how many rows a product has, so a kernel before it writes sizes and addresses
// of all products into the workspace. Compiled and inspected; not run on hardware.
#pragma once
#include <cutlass/gemm/group_array_problem_shape.hpp>

#include "blackwell_gemm.cuh"

namespace vllm::gemm {

// One way to compute the products of all experts. max_rows: the most rows of x per expert, in the
// mean, that it is taken for.
template <class Args>
struct GroupedChoice {
  int max_rows;
  size_t (*workspace_bytes)(const Args& args, int num_sms);
  cudaError_t (*launch)(const Args& args, void* workspace, int num_sms, cudaStream_t);
};

constexpr int kAnyRows = 1 << 30;

// The first row that fits; the last takes any number. num_experts > 0.
template <class Args, int kNumChoices>
const GroupedChoice<Args>& grouped_choice(const GroupedChoice<Args> (&table)[kNumChoices],
                                          const Args& args) {
  int i = 0;
  while (args.m > int64_t{table[i].max_rows} * args.num_experts) ++i;
  return table[i];
}

// Arrays of one entry per product, in the workspace.
template <class Kernel, class Value_, class Scale_>
struct GroupArrays {
  using Value = Value_;
  using Scale = Scale_;
  using Mainloop = typename Kernel::CollectiveMainloop;
  using Shape = typename Kernel::ProblemShape::UnderlyingProblemShape;
  using Out = typename Kernel::ElementD;

  Shape* shapes;
  const Value **a, **b;
  const Scale **sfa, **sfb;
  Out** d;
  typename Kernel::InternalStrideA* stride_a;
  typename Kernel::InternalStrideB* stride_b;
  typename Kernel::InternalStrideD* stride_d;
  typename Mainloop::InternalLayoutSFA* layout_sfa;
  typename Mainloop::InternalLayoutSFB* layout_sfb;

  // Returns the first byte after them, a multiple of 128: CUTLASS's workspace begins there.
  char* place(char* workspace, int num_groups) {
    char* end = workspace;
    const auto take = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(end);
      end += (sizeof(*array) * num_groups + 127) / 128 * 128;
    };
    take(shapes), take(a), take(b), take(sfa), take(sfb), take(d);
    take(stride_a), take(stride_b), take(stride_d), take(layout_sfa), take(layout_sfb);
    return end;
  }
};

template <class Mainloop, class Epilogue>
using GroupedKernel = cutlass::gemm::kernel::GemmUniversal<
    cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>, Mainloop, Epilogue, void>;

// Arguments of all products; the epilogue's scalars are the caller's to add.
template <class Gemm, class Groups>
typename Gemm::Arguments grouped_arguments(const Groups& groups, int num_groups, int num_sms) {
  typename Gemm::Arguments args{cutlass::gemm::GemmUniversalMode::kGrouped,
                                {num_groups, groups.shapes, nullptr},
                                {groups.a, groups.stride_a, groups.b, groups.stride_b, groups.sfa,
                                 groups.layout_sfa, groups.sfb, groups.layout_sfb},
                                {{}, nullptr, nullptr, groups.d, groups.stride_d}};
  args.hw_info.sm_count = num_sms;
  args.epilogue.thread.alpha = 1.0f;
  args.epilogue.thread.beta = 0.0f;
  return args;
}

// workspace: CUTLASS's own, after the arrays.
template <class Gemm>
cudaError_t run_grouped(const typename Gemm::Arguments& args, char* workspace,
                        cudaStream_t stream) {
  if (Gemm::can_implement(args) != cutlass::Status::kSuccess) return cudaErrorInvalidValue;
  Gemm gemm;
  const bool is_launched = gemm.initialize(args, workspace, stream) == cutlass::Status::kSuccess &&
                           gemm.run(stream) == cutlass::Status::kSuccess;
  return is_launched ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace vllm::gemm
