// GEMMs of CUTLASS's collectives for Blackwell, as types: one for block-scaled FP8, one for NVFP4.
// Neither needs a workspace: tiles are handed out by the hardware, K is not divided.
#pragma once
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "blackwell_gemm.h"

namespace vllm::gemm {

using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

// kOperator: the class of instructions. The epilogue adds a bias per column where one is given.
template <class Arch, class kOperator, class Tile, class Cluster, class Out>
using BlackwellEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, kOperator, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    void, RowMajor, 8, Out, RowMajor, 8, cutlass::epilogue::collective::EpilogueScheduleAuto,
    cutlass::epilogue::fusion::LinCombPerColBias<Out, float, float, void>>::CollectiveOp;

template <class Epilogue>
using StagesBeside = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
    sizeof(typename Epilogue::SharedStorage))>;

template <class Mainloop, class Epilogue>
using BlackwellGemm =
    cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
        cute::Shape<int, int, int, int>, Mainloop, Epilogue, void>>;

template <class Gemm>
cudaError_t run(typename Gemm::Arguments& args, int num_sms, cudaStream_t stream) {
  args.hw_info.sm_count = num_sms;
  // The collective of SM120 refuses blocks cut by the end of N or K, and computes them all the
  // same: TMA fills them with zeros, and the grids of scales have one for each. Callers check
  // alignment.
  typename Gemm::Arguments whole = args;
  for (int* size : {&cute::get<1>(whole.problem_shape), &cute::get<2>(whole.problem_shape)}) {
    *size = (*size + 127) / 128 * 128;
  }
  if (Gemm::can_implement(whole) != cutlass::Status::kSuccess) return cudaErrorInvalidValue;
  if (Gemm::get_workspace_size(args) != 0) return cudaErrorNotSupported;
  Gemm gemm;
  const bool is_launched = gemm.initialize(args, nullptr, stream) == cutlass::Status::kSuccess &&
                           gemm.run(stream) == cutlass::Status::kSuccess;
  return is_launched ? cudaSuccess : cudaErrorLaunchFailure;
}

template <class Stride>
CUTE_HOST_DEVICE Stride row_stride(int64_t distance) {
  Stride stride = {};
  cute::get<0>(stride) = distance;
  return stride;
}

template <class Arch, class Schedule, class Tile, class Cluster, class Out>
struct BlackwellFp8Block {
  using E4M3 = cutlass::float_e4m3_t;
  using Scales = cutlass::detail::Sm1xxBlockwiseScaleConfig<1, 128, 128, cute::UMMA::Major::MN,
                                                            cute::UMMA::Major::K>;
  using LayoutSFA = decltype(Scales::deduce_layoutSFA());
  using LayoutSFB = decltype(Scales::deduce_layoutSFB());
  using Operator = cutlass::arch::OpClassTensorOp;
  using Epilogue = BlackwellEpilogue<Arch, Operator, Tile, Cluster, Out>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, Operator, E4M3, cute::tuple<RowMajor, LayoutSFA>, 16, E4M3,
      cute::tuple<ColumnMajor, LayoutSFB>, 16, float, Tile, Cluster, StagesBeside<Epilogue>,
      Schedule>::CollectiveOp;
  using Gemm = BlackwellGemm<Mainloop, Epilogue>;

  static cudaError_t launch(const Fp8BlockArgs& given, int num_sms, cudaStream_t stream) {
    const int m = given.m, n = given.n, k = given.k;
    using Kernel = typename Gemm::GemmKernel;
    // The rows of x_scales that fill up m to a multiple of 4 are read and not used.
    auto layout_sfa = Scales::tile_atom_to_shape_SFA(cute::make_shape((m + 3) / 4 * 4, n, k, 1));
    cute::get<1, 1>(layout_sfa.stride()) = static_cast<int>(given.x_scales_ldk);
    const auto layout_sfb = Scales::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1));
    const auto stride_d = row_stride<typename Kernel::StrideD>(given.ldo);
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {reinterpret_cast<const E4M3*>(given.x), row_stride<typename Kernel::StrideA>(given.ldx),
         reinterpret_cast<const E4M3*>(given.weight),
         row_stride<typename Kernel::StrideB>(given.ldw), given.x_scales, layout_sfa, given.scales,
         layout_sfb},
        {{}, nullptr, {}, static_cast<Out*>(given.out), stride_d}};
    args.epilogue.thread.alpha = 1.0f;
    args.epilogue.thread.beta = 0.0f;
    args.epilogue.thread.bias_ptr = given.bias;
    return run<Gemm>(args, num_sms, stream);
  }
};

template <class Arch, class Tile, class Cluster, class Out>
struct BlackwellNvfp4 {
  using Element = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  using Operator = cutlass::arch::OpClassBlockScaledTensorOp;
  using Epilogue = BlackwellEpilogue<Arch, Operator, Tile, Cluster, Out>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, Operator, Element, RowMajor, 32, Element, ColumnMajor, 32, float, Tile, Cluster,
      StagesBeside<Epilogue>, cutlass::gemm::collective::KernelScheduleAuto>::CollectiveOp;
  using Gemm = BlackwellGemm<Mainloop, Epilogue>;

  static cudaError_t launch(const Nvfp4Args& given, int num_sms, cudaStream_t stream) {
    const int m = given.m, n = given.n, k = given.k;
    using Kernel = typename Gemm::GemmKernel;
    using Scales = typename Mainloop::Sm1xxBlkScaledConfig;
    using Scale = typename Element::ScaleFactorType;
    using Value = typename Mainloop::ArrayElementA;
    const auto shape = cute::make_shape(m, n, k, 1);
    const auto stride_d = row_stride<typename Kernel::StrideD>(given.ldo);
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {reinterpret_cast<const Value*>(given.a), row_stride<typename Kernel::StrideA>(k),
         reinterpret_cast<const Value*>(given.b), row_stride<typename Kernel::StrideB>(k),
         reinterpret_cast<const Scale*>(given.a_scales), Scales::tile_atom_to_shape_SFA(shape),
         reinterpret_cast<const Scale*>(given.b_scales), Scales::tile_atom_to_shape_SFB(shape)},
        {{}, nullptr, {}, static_cast<Out*>(given.out), stride_d}};
    args.epilogue.thread.alpha_ptr = given.alpha;
    args.epilogue.thread.beta = 0.0f;
    args.epilogue.thread.bias_ptr = given.bias;
    return run<Gemm>(args, num_sms, stream);
  }
};

}  // namespace vllm::gemm
