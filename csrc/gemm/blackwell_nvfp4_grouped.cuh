// The grouped NVFP4 GEMM of CUTLASS's collectives for Blackwell: a product per expert, or one for
// each of its parts, where these (gate and up) have global scales of their own. Compiled and
// inspected; not run on hardware.
#pragma once
#include "../quantization/fp4/nvfp4_layout.cuh"
#include "blackwell_grouped.cuh"

namespace vllm::gemm {

// kIsSwapped: computes out^T = b * a^T. The tile's many rows are of the weight then, and its few
// columns the rows of a. Group: part group % num_parts of expert group / num_parts, which has
// `rows` rows of a from row `begin`, whose scales begin at row begin_scales.
template <class Kernel, class Groups, class Scales, bool kIsSwapped>
CUTE_HOST_DEVICE void set_up_group(const Nvfp4Args& args, const Groups& groups, int group, int rows,
                                   int64_t begin, int64_t begin_scales) {
  using Value = typename Groups::Value;
  using Scale = typename Groups::Scale;
  // Bytes of a row: of values, and of scales in whole tiles.
  const int64_t value_bytes = args.k / 2, scale_bytes = (args.k / 16 + 3) / 4 * 4;
  const int64_t scale_rows = (args.n + 127) / 128 * 128;
  const auto* x = reinterpret_cast<const Value*>(args.a + begin * value_bytes);
  const auto* x_scales = reinterpret_cast<const Scale*>(args.a_scales + begin_scales * scale_bytes);
  const auto* weight =
      reinterpret_cast<const Value*>(args.b + int64_t{group} * args.n * value_bytes);
  const auto* scales =
      reinterpret_cast<const Scale*>(args.b_scales + group * scale_rows * scale_bytes);
  const int64_t column = int64_t{group % args.num_parts} * args.n;

  const auto shape =
      cute::make_shape(kIsSwapped ? args.n : rows, kIsSwapped ? rows : args.n, args.k);
  typename Kernel::InternalStrideD stride_d = {};
  cute::get<kIsSwapped ? 1 : 0>(stride_d) = args.ldo;
  groups.shapes[group] = shape;
  groups.a[group] = kIsSwapped ? weight : x;
  groups.b[group] = kIsSwapped ? x : weight;
  groups.sfa[group] = kIsSwapped ? scales : x_scales;
  groups.sfb[group] = kIsSwapped ? x_scales : scales;
  groups.d[group] = static_cast<typename Groups::Out*>(args.out) + begin * args.ldo + column;
  groups.stride_a[group] = row_stride<typename Kernel::InternalStrideA>(args.k);
  groups.stride_b[group] = row_stride<typename Kernel::InternalStrideB>(args.k);
  groups.stride_d[group] = stride_d;
  groups.layout_sfa[group] = Scales::tile_atom_to_shape_SFA(shape);
  groups.layout_sfb[group] = Scales::tile_atom_to_shape_SFB(shape);
}

// One block: where an expert's scales begin depends on the rows of all before it.
template <class Kernel, class Groups, class Scales, bool kIsSwapped>
__global__ void set_up_nvfp4_groups(Nvfp4Args args, Groups groups) {
  __shared__ fp4::ExpertTable experts;
  experts.fill(args.offsets, args.num_experts, args.m);
  for (int group = threadIdx.x; group < args.num_experts * args.num_parts; group += blockDim.x) {
    const int expert = group / args.num_parts;
    const int begin = experts.first_row[expert];
    const int rows = max(experts.first_row[expert + 1] - begin, 0);
    set_up_group<Kernel, Groups, Scales, kIsSwapped>(args, groups, group, rows, begin,
                                                     experts.first_scale_row[expert]);
  }
}

// kSharedBytes: what a block of the architecture may have.
template <class Arch, class Schedule, class EpilogueSchedule, class Tile, bool kIsSwapped,
          int kSharedBytes>
struct BlackwellNvfp4Grouped {
  using Element = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  using Out = cutlass::bfloat16_t;
  using Operator = cutlass::arch::OpClassBlockScaledTensorOp;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using OutLayout = cute::conditional_t<kIsSwapped, ColumnMajor, RowMajor>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, Operator, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
      void, OutLayout*, 8, Out, OutLayout*, 8, EpilogueSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, Operator, Element, RowMajor*, 32, Element, ColumnMajor*, 32, float, Tile, Cluster,
      StagesBeside<Epilogue>, Schedule>::CollectiveOp;
  using Kernel = GroupedKernel<Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Scales = typename Mainloop::Sm1xxBlkScaledConfig;
  using Groups =
      GroupArrays<Kernel, typename Mainloop::ArrayElementA, typename Element::ScaleFactorType>;
  // Counting stages, CUTLASS leaves out what aligning the tiles takes: too many would fail to
  // launch.
  static_assert(Kernel::SharedStorageSize <= kSharedBytes);

  static typename Gemm::Arguments arguments(const Groups& groups, const Nvfp4Args& given,
                                            int num_sms) {
    auto args = grouped_arguments<Gemm>(groups, given.num_experts * given.num_parts, num_sms);
    args.epilogue.thread.alpha_ptr = given.alpha;
    cute::get<2>(args.epilogue.thread.dAlpha) = 1;  // one for each product
    return args;
  }

  static size_t workspace_bytes(const Nvfp4Args& given, int num_sms) {
    Groups groups;
    const char* arrays_end = groups.place(nullptr, given.num_experts * given.num_parts);
    return reinterpret_cast<size_t>(arrays_end) +
           Gemm::get_workspace_size(arguments(groups, given, num_sms));
  }

  static cudaError_t launch(const Nvfp4Args& given, void* workspace, int num_sms,
                            cudaStream_t stream) {
    Groups groups;
    char* own = groups.place(static_cast<char*>(workspace), given.num_experts * given.num_parts);
    set_up_nvfp4_groups<Kernel, Groups, Scales, kIsSwapped><<<1, 512, 0, stream>>>(given, groups);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    return run_grouped<Gemm>(arguments(groups, given, num_sms), own, stream);
  }

  static constexpr GroupedChoice<Nvfp4Args> choice(int max_rows) {
    return {max_rows, workspace_bytes, launch};
  }
};

}  // namespace vllm::gemm
