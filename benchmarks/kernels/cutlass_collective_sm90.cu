// What CUTLASS's own block-scaled collective for SM90 does with the same inputs: a peer of
// bench_fp8_block_gemm.py (--collective). With I, D, L from `python -m tvm_ffi.config` and C the
// include folder of nvidia-cutlass:
//   nvcc -std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr -Xcompiler -fPIC -shared
//        -gencode arch=compute_90a,code=sm_90a -isystem $I -isystem $D -isystem $C -Icsrc/bindings
//        benchmarks/kernels/cutlass_collective_sm90.cu -L$L -ltvm_ffi -o libcollective.so
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda_check.h"

namespace vllm {
namespace {
using namespace cute;
using E4M3 = cutlass::float_e4m3_t;
using Out = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;

template <class Tile, class Cluster, class Schedule, class EpilogueSchedule>
struct Collective {
  using Scales =
      cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128, GMMA::Major::MN, GMMA::Major::K>;
  using LayoutSFA = decltype(Scales::deduce_layoutSFA());
  using LayoutSFB = decltype(Scales::deduce_layoutSFB());
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, 8, Out, Row, 8,
      EpilogueSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, E4M3, cute::tuple<Row, LayoutSFA>, 16,
      E4M3, cute::tuple<Column, LayoutSFB>, 16, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static void run(TensorView a, TensorView sa, TensorView b, TensorView sb, TensorView out) {
    const int m = a.size(0), k = a.size(1), n = b.size(0);
    const typename Kernel::StrideA da = {k, {}, 0};
    const typename Kernel::StrideB db = {k, {}, 0};
    const typename Kernel::StrideD dd = {n, {}, 0};
    auto lsa = Scales::tile_atom_to_shape_SFA(make_shape(m, n, k, 1));
    auto lsb = Scales::tile_atom_to_shape_SFB(make_shape(m, n, k, 1));
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {static_cast<E4M3*>(data_of(a)), da, static_cast<E4M3*>(data_of(b)), db,
         static_cast<float*>(data_of(sa)), lsa, static_cast<float*>(data_of(sb)), lsb},
        {{1.0f, 0.0f}, nullptr, dd, static_cast<Out*>(data_of(out)), dd}};
    args.hw_info.sm_count = num_sms(a);
    Gemm gemm;
    VLLM_CHECK(gemm.can_implement(args) == cutlass::Status::kSuccess,
               "a: sizes that CUTLASS's collective refuses");
    VLLM_CHECK(gemm.get_workspace_size(args) == 0, "CUTLASS asks for a workspace");
    VLLM_CHECK(gemm.initialize(args, nullptr, stream_of(a)) == cutlass::Status::kSuccess,
               "CUTLASS failed to initialise");
    VLLM_CHECK(gemm.run(stream_of(a)) == cutlass::Status::kSuccess, "CUTLASS failed to launch");
  }
};

void collective(TensorView a, TensorView sa, TensorView b, TensorView sb, TensorView out,
                int64_t which) {
  using namespace cutlass::gemm;
  using namespace cutlass::epilogue;
  if (which == 0) {
    Collective<Shape<_128, _128, _128>, Shape<_2, _1, _1>,
               KernelTmaWarpSpecializedCooperativeFP8Blockwise,
               TmaWarpSpecializedCooperative>::run(a, sa, b, sb, out);
  } else {
    Collective<Shape<_64, _128, _128>, Shape<_1, _1, _1>,
               KernelTmaWarpSpecializedPingpongFP8Blockwise, TmaWarpSpecialized>::run(a, sa, b, sb,
                                                                                      out);
  }
}
}  // namespace
}  // namespace vllm
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cutlass_collective, vllm::collective);
