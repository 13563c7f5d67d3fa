// The grouped block-scaled FP8 GEMM of CUTLASS's collectives for Blackwell: a product per expert.
// Compiled and inspected; not run on hardware.
#pragma once
#include "blackwell_grouped.cuh"

namespace vllm::gemm {

template <class Kernel>
using Fp8GroupArrays = GroupArrays<Kernel, cutlass::float_e4m3_t, float>;

// kIsSwapped: computes out^T = weight * x^T. The tile's many rows are of the weight then, and its
// few columns the rows of x.
template <class Kernel, class Scales, bool kIsSwapped>
CUTE_HOST_DEVICE void set_up_group(const Fp8BlockArgs& args, const Fp8GroupArrays<Kernel>& groups,
                                   int expert) {
  using Groups = Fp8GroupArrays<Kernel>;
  using E4M3 = cutlass::float_e4m3_t;
  const int64_t begin = args.offsets[expert];
  const int rows = static_cast<int>(args.offsets[expert + 1] - begin);
  const int64_t num_scales = int64_t{(args.n + 127) / 128} * ((args.k + 127) / 128);
  const auto* x = reinterpret_cast<const E4M3*>(args.x) + begin * args.ldx;
  const auto* weight = reinterpret_cast<const E4M3*>(args.weight) + expert * args.n * args.ldw;
  const float* x_scales = args.x_scales + begin * args.x_scales_ld;
  const float* scales = args.scales + expert * num_scales;

  const int m = kIsSwapped ? args.n : rows, n = kIsSwapped ? rows : args.n;
  const auto shape = cute::make_shape(m, n, args.k);
  auto layout_sfa = Scales::tile_atom_to_shape_SFA(shape);
  auto layout_sfb = Scales::tile_atom_to_shape_SFB(shape);
  typename Kernel::InternalStrideD stride_d = {};
  const int x_scales_ld = static_cast<int>(args.x_scales_ld);
  if constexpr (kIsSwapped) {
    cute::get<0, 1>(layout_sfb.stride()) = x_scales_ld;
    cute::get<1>(stride_d) = args.ldo;
  } else {
    cute::get<0, 1>(layout_sfa.stride()) = x_scales_ld;
    cute::get<0>(stride_d) = args.ldo;
  }
  groups.shapes[expert] = shape;
  groups.a[expert] = kIsSwapped ? weight : x;
  groups.b[expert] = kIsSwapped ? x : weight;
  groups.sfa[expert] = kIsSwapped ? scales : x_scales;
  groups.sfb[expert] = kIsSwapped ? x_scales : scales;
  groups.d[expert] = static_cast<typename Groups::Out*>(args.out) + begin * args.ldo;
  groups.stride_a[expert] =
      row_stride<typename Kernel::InternalStrideA>(kIsSwapped ? args.ldw : args.ldx);
  groups.stride_b[expert] =
      row_stride<typename Kernel::InternalStrideB>(kIsSwapped ? args.ldx : args.ldw);
  groups.stride_d[expert] = stride_d;
  groups.layout_sfa[expert] = layout_sfa;
  groups.layout_sfb[expert] = layout_sfb;
}

template <class Kernel, class Scales, bool kIsSwapped>
__global__ void set_up_groups(Fp8BlockArgs args, Fp8GroupArrays<Kernel> groups) {
  const int expert = blockIdx.x * blockDim.x + threadIdx.x;
  if (expert < args.num_experts) set_up_group<Kernel, Scales, kIsSwapped>(args, groups, expert);
}

// Scales of both sides are row-major: a group begins at any row, and the copies of column-major
// ones would want a multiple of 4.
template <class Arch, class Schedule, class EpilogueSchedule, class Tile, bool kIsSwapped,
          class Out>
struct BlackwellFp8Grouped {
  using E4M3 = cutlass::float_e4m3_t;
  using Operator = cutlass::arch::OpClassTensorOp;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Scales =
      cutlass::detail::Sm1xxBlockwiseScaleConfig<kIsSwapped ? 128 : 1, kIsSwapped ? 1 : 128, 128,
                                                 cute::UMMA::Major::K, cute::UMMA::Major::K>;
  using LayoutSFA = decltype(Scales::deduce_layoutSFA());
  using LayoutSFB = decltype(Scales::deduce_layoutSFB());
  using OutLayout = cute::conditional_t<kIsSwapped, ColumnMajor, RowMajor>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, Operator, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
      void, OutLayout*, 8, Out, OutLayout*, 8, EpilogueSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, Operator, E4M3, cute::tuple<RowMajor*, LayoutSFA*>, 16, E4M3,
      cute::tuple<ColumnMajor*, LayoutSFB*>, 16, float, Tile, Cluster, StagesBeside<Epilogue>,
      Schedule>::CollectiveOp;
  using Kernel = GroupedKernel<Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Groups = Fp8GroupArrays<Kernel>;

  static size_t workspace_bytes(const Fp8BlockArgs& given, int num_sms) {
    Groups groups;
    const char* arrays_end = groups.place(nullptr, given.num_experts);
    return reinterpret_cast<size_t>(arrays_end) +
           Gemm::get_workspace_size(grouped_arguments<Gemm>(groups, given.num_experts, num_sms));
  }

  static cudaError_t launch(const Fp8BlockArgs& given, void* workspace, int num_sms,
                            cudaStream_t stream) {
    Groups groups;
    char* own = groups.place(static_cast<char*>(workspace), given.num_experts);
    constexpr int kThreads = 128;
    const int num_blocks = (given.num_experts + kThreads - 1) / kThreads;
    set_up_groups<Kernel, Scales, kIsSwapped><<<num_blocks, kThreads, 0, stream>>>(given, groups);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    const auto args = grouped_arguments<Gemm>(groups, given.num_experts, num_sms);
    return run_grouped<Gemm>(args, own, stream);
  }

  static constexpr GroupedChoice<Fp8BlockArgs> choice(int max_rows) {
    return {max_rows, workspace_bytes, launch};
  }
};

}  // namespace vllm::gemm
