// What the grouped GEMMs of Blackwell tell CUTLASS about each expert, on the host: seen through
// CuTe's layouts, every element is where the operands hold it. Prints what is not.
#include <cstdio>
#include <vector>

#include "../../csrc/gemm/blackwell_fp8_grouped.cuh"

using namespace vllm::gemm;
using cutlass::arch::Sm120;

template <int kTileN, bool kIsSwapped>
using Gemm = BlackwellFp8Grouped<Sm120, cutlass::gemm::KernelScheduleSm120Blockwise,
                                 cutlass::epilogue::collective::EpilogueScheduleAuto,
                                 cute::Shape<cute::_128, cute::Int<kTileN>, cute::_128>, kIsSwapped,
                                 cutlass::bfloat16_t>;

int num_wrong = 0;

void expect(bool is_right, const char* what, int expert, int row, int column) {
  if (!is_right && ++num_wrong < 20) printf("%s: expert %d [%d, %d]\n", what, expert, row, column);
}

template <class Gemm, bool kIsSwapped>
void check(const Fp8BlockArgs& args, const int32_t* offsets) {
  typename Gemm::Groups groups = {};
  std::vector<char> workspace(reinterpret_cast<size_t>(groups.place(nullptr, args.num_experts)));
  groups.place(workspace.data(), args.num_experts);
  const int num_blocks = (args.k + 127) / 128;
  for (int e = 0; e < args.num_experts; ++e) {
    set_up_group<typename Gemm::Kernel, typename Gemm::Scales, kIsSwapped>(args, groups, e);
    const int rows = offsets[e + 1] - offsets[e];
    const auto [m, n, k] = groups.shapes[e];
    expect(m == (kIsSwapped ? args.n : rows), "m", e, m, 0);
    expect(n == (kIsSwapped ? rows : args.n) && k == args.k, "n, k", e, n, k);
    const auto* x = reinterpret_cast<const uint8_t*>(kIsSwapped ? groups.b[e] : groups.a[e]);
    const auto* weight = reinterpret_cast<const uint8_t*>(kIsSwapped ? groups.a[e] : groups.b[e]);
    const auto x_stride = kIsSwapped ? groups.stride_b[e] : groups.stride_a[e];
    const auto weight_stride = kIsSwapped ? groups.stride_a[e] : groups.stride_b[e];
    const auto element = [&](auto stride, int row, int column) {
      return cute::crd2idx(cute::make_coord(row, column, 0), cute::make_shape(1, 1, 1), stride);
    };
    const auto row_scale = [&](int i, int j) {
      return kIsSwapped ? groups.sfb[e] + groups.layout_sfb[e](i, j, 0)
                        : groups.sfa[e] + groups.layout_sfa[e](i, j, 0);
    };
    const auto block_scale = [&](int i, int j) {
      return kIsSwapped ? groups.sfa[e] + groups.layout_sfa[e](i, j, 0)
                        : groups.sfb[e] + groups.layout_sfb[e](i, j, 0);
    };
    for (int i = 0; i < rows; ++i) {
      const int64_t row = offsets[e] + i;
      for (int j = 0; j < args.k; ++j) {
        expect(x + element(x_stride, i, j) == args.x + row * args.ldx + j, "x", e, i, j);
        expect(row_scale(i, j) == args.x_scales + row * args.x_scales_ld + j / 128, "x_scales", e,
               i, j);
      }
      for (int j = 0; j < args.n; ++j) {
        const int place = element(groups.stride_d[e], kIsSwapped ? j : i, kIsSwapped ? i : j);
        const auto* out = static_cast<cutlass::bfloat16_t*>(args.out) + row * args.ldo + j;
        expect(groups.d[e] + place == out, "out", e, i, j);
      }
    }
    for (int i = 0; i < args.n; ++i) {
      const int64_t row = int64_t{e} * args.n + i;
      const int64_t scale_row = int64_t{e} * ((args.n + 127) / 128) + i / 128;
      for (int j = 0; j < args.k; ++j) {
        expect(weight + element(weight_stride, i, j) == args.weight + row * args.ldw + j, "weight",
               e, i, j);
        expect(block_scale(i, j) == args.scales + scale_row * num_blocks + j / 128, "scales", e, i,
               j);
      }
    }
  }
}

int main() {
  // Addresses alone are compared; nothing is read from them. Sizes end inside blocks.
  const int32_t offsets[] = {0, 0, 5, 6, 6, 139};
  std::vector<float> scales(1 << 12), x_scales(1 << 12);
  std::vector<uint8_t> x(1 << 16), weight(1 << 20);
  std::vector<cutlass::bfloat16_t> out(1 << 16);
  Fp8BlockArgs args = {};
  args.x = x.data(), args.x_scales = x_scales.data(), args.weight = weight.data();
  args.scales = scales.data(), args.offsets = offsets, args.out = out.data();
  args.m = 139, args.n = 136, args.k = 272, args.num_experts = 5;
  args.ldx = 288, args.ldw = 272, args.ldo = 144, args.x_scales_ld = 5, args.x_scales_ldk = 1;
  args.is_bf16 = args.is_vector = true;
  check<Gemm<32, true>, true>(args, offsets);
  check<Gemm<128, false>, false>(args, offsets);
  printf("%d addresses wrong\n", num_wrong);
  return num_wrong != 0;
}
