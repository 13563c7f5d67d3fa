// What the grouped NVFP4 GEMMs of Blackwell tell CUTLASS about each product, on the host: seen
// through CuTe's layouts, every element is where the operands hold it. Prints what is not.
#include <cstdio>
#include <tuple>
#include <vector>

#include "../../csrc/gemm/blackwell_nvfp4_grouped.cuh"

using namespace vllm::gemm;

template <int kTileN, bool kIsSwapped>
using Gemm100 = BlackwellNvfp4Grouped<cutlass::arch::Sm100,
                                      cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100,
                                      cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm,
                                      cute::Shape<cute::_128, cute::Int<kTileN>, cute::_256>,
                                      kIsSwapped, cutlass::arch::sm100_smem_capacity_bytes>;

using Gemm120 =
    BlackwellNvfp4Grouped<cutlass::arch::Sm120, cutlass::gemm::collective::KernelScheduleAuto,
                          cutlass::epilogue::collective::EpilogueScheduleAuto,
                          cute::Shape<cute::_128, cute::_128, cute::_128>, false,
                          cutlass::arch::sm120_smem_capacity_bytes>;

int num_wrong = 0;

void expect(bool is_right, const char* what, int group, int row, int column) {
  if (!is_right && ++num_wrong < 20) printf("%s: group %d [%d, %d]\n", what, group, row, column);
}

int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Byte of the scale of an element among tiles of 128 rows and 4 scales (PTX ISA, block scaling).
int64_t scale_place(int row, int column, int k) {
  const int place = column / 16, tiles = round_up(k / 16, 4) / 4;
  return (int64_t{row / 128} * tiles + place / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
         place % 4;
}

// One side of a product: where its element [row, column], and the scale of that, are told to be.
template <class Value, class Stride, class Scale, class Layout>
struct Side {
  const Value* values;
  Stride stride;
  const Scale* scales;
  Layout layout;

  void check(const char* name, int group, int num_rows, int k, const uint8_t* all_values,
             const uint8_t* all_scales) const {
    for (int i = 0; i < num_rows; ++i) {
      for (int j = 0; j < k; ++j) {
        const int64_t nibble =
            cute::crd2idx(cute::make_coord(i, j, 0), cute::make_shape(1, 1, 1), stride);
        const auto* byte = reinterpret_cast<const uint8_t*>(values) + nibble / 2;
        expect(byte == all_values + int64_t{i} * k / 2 + j / 2 && nibble % 2 == j % 2, name, group,
               i, j);
        const auto* scale = reinterpret_cast<const uint8_t*>(scales) + layout(i, j, 0);
        expect(scale == all_scales + scale_place(i, j, k), "its scale", group, i, j);
      }
    }
  }
};

template <class Value, class Stride, class Scale, class Layout>
Side(const Value*, Stride, const Scale*, Layout) -> Side<Value, Stride, Scale, Layout>;

template <class Gemm, bool kIsSwapped>
void check(const Nvfp4Args& args) {
  typename Gemm::Groups groups = {};
  const int num_groups = args.num_experts * args.num_parts;
  std::vector<char> workspace(reinterpret_cast<size_t>(groups.place(nullptr, num_groups)));
  groups.place(workspace.data(), num_groups);
  const int64_t scale_bytes = round_up(args.k / 16, 4);
  int64_t begin_scales = 0;
  for (int e = 0; e < args.num_experts; ++e) {
    const int begin = args.offsets[e], rows = args.offsets[e + 1] - begin;
    for (int part = 0; part < args.num_parts; ++part) {
      const int g = e * args.num_parts + part;
      set_up_group<typename Gemm::Kernel, typename Gemm::Groups, typename Gemm::Scales, kIsSwapped>(
          args, groups, g, rows, begin, begin_scales);
      const auto [m, n, k] = groups.shapes[g];
      expect(m == (kIsSwapped ? args.n : rows), "m", g, m, 0);
      expect(n == (kIsSwapped ? rows : args.n) && k == args.k, "n, k", g, n, k);
      const Side first{groups.a[g], groups.stride_a[g], groups.sfa[g], groups.layout_sfa[g]};
      const Side second{groups.b[g], groups.stride_b[g], groups.sfb[g], groups.layout_sfb[g]};
      const auto& x = std::get<kIsSwapped ? 1 : 0>(std::tie(first, second));
      const auto& weight = std::get<kIsSwapped ? 0 : 1>(std::tie(first, second));
      x.check("x", g, rows, args.k, args.a + int64_t{begin} * args.k / 2,
              args.a_scales + begin_scales * scale_bytes);
      weight.check("weight", g, args.n, args.k, args.b + int64_t{g} * args.n * args.k / 2,
                   args.b_scales + g * round_up(args.n, 128) * scale_bytes);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < args.n; ++j) {
          const auto place =
              cute::crd2idx(cute::make_coord(kIsSwapped ? j : i, kIsSwapped ? i : j, 0),
                            cute::make_shape(1, 1, 1), groups.stride_d[g]);
          const auto* out = static_cast<cutlass::bfloat16_t*>(args.out) + (begin + i) * args.ldo +
                            part * args.n + j;
          expect(groups.d[g] + place == out, "out", g, i, j);
        }
      }
      const auto told = Gemm::arguments(groups, args, 1).epilogue.thread;
      expect(told.alpha_ptr + g * cute::get<2>(told.dAlpha) == args.alpha + g, "alpha", g, 0, 0);
    }
    begin_scales += round_up(rows, 128);
  }
}

int main() {
  // Addresses alone are compared; nothing is read from them. Sizes end inside tiles.
  const int32_t offsets[] = {0, 0, 5, 6, 6, 139};
  std::vector<uint8_t> x(1 << 16), x_scales(1 << 16), weight(1 << 20), scales(1 << 20);
  std::vector<float> alpha(10);
  std::vector<cutlass::bfloat16_t> out(1 << 16);
  Nvfp4Args args = {};
  args.a = x.data(), args.a_scales = x_scales.data(), args.b = weight.data();
  args.b_scales = scales.data(), args.alpha = alpha.data(), args.offsets = offsets;
  args.out = out.data(), args.is_bf16 = true;
  args.m = 139, args.n = 136, args.k = 288, args.num_experts = 5, args.ldo = 280;
  for (const int num_parts : {1, 2}) {
    args.num_parts = num_parts;
    check<Gemm100<64, true>, true>(args);
    check<Gemm100<128, false>, false>(args);
    check<Gemm120, false>(args);
  }
  printf("%d addresses wrong\n", num_wrong);
  return num_wrong != 0;
}
