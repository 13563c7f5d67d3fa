// What CuTe and CUTLASS say of the block-scaled FP8 GEMM of SM120, on the host: for each line
// "m n k stride" of the input, the offsets of the scales of the last element of both operands, and
// whether the collective accepts the real sizes and those that `run` rounds up.
#include <cstdio>

#include "gemm/blackwell_gemm.cuh"

using Product = vllm::gemm::BlackwellFp8Block<
    cutlass::arch::Sm120, cutlass::gemm::KernelScheduleSm120Blockwise,
    cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<128>>,
    cute::Shape<cute::Int<1>, cute::Int<1>, cute::Int<1>>, cutlass::bfloat16_t>;

bool is_taken(int m, int n, int k) {
  Product::Gemm::Arguments args = {};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = {m, n, k, 1};
  return Product::Gemm::can_implement(args) == cutlass::Status::kSuccess;
}

int main() {
  int m, n, k, stride;
  while (std::scanf("%d %d %d %d", &m, &n, &k, &stride) == 4) {
    auto a = Product::Scales::tile_atom_to_shape_SFA(cute::make_shape((m + 3) / 4 * 4, n, k, 1));
    cute::get<1, 1>(a.stride()) = stride;
    const auto b = Product::Scales::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1));
    const int whole_n = (n + 127) / 128 * 128, whole_k = (k + 127) / 128 * 128;
    std::printf("%d %d %d %d\n", int(a(m - 1, k - 1, 0)), int(b(n - 1, k - 1, 0)),
                is_taken(m, n, k), is_taken(m, whole_n, whole_k));
  }
}
