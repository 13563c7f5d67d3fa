// The NVFP4 quantiser of csrc, kernels and launches, over emulated CUDA: experts' rows alone.
//
// Reads a file of a header (Header) and data, quantises, and writes the data back into it. A
// program for the reason that weight_only.cpp gives.
#include <cuda_fp8.h>
// Before what makes this look like a device's compiler.
#include "warp.h"
// After it: what it defines stands for CUDA in them.
#include <cmath>
#include <fstream>
#include <iterator>

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }

// Its own software, as the host has it, and not instructions.
#undef __CUDA_ARCH__
#include "csrc/quantization/fp4/nvfp4_quant.cu"

using namespace vllm::fp4;

// x, global_scales, expert_offsets, pairs and out are offsets in the file, pairs 0 for none. `out`
// has codes, and scales from scales_at on.
struct Header {
  int64_t m, num_groups, num_experts, num_tokens, top_k, scale_rows, num_sms, is_gated;
  int64_t x, global_scales, expert_offsets, pairs, out, scales_at;
};

int main(int, char** words) {
  std::fstream file(words[1], std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const Header h = *reinterpret_cast<const Header*>(bytes.data());
  Nvfp4Quant quant = {};
  quant.x = bytes.data() + h.x, quant.type = InputType::kBFloat16;
  quant.m = h.m, quant.num_groups = h.num_groups;
  quant.global_scale = reinterpret_cast<const float*>(bytes.data() + h.global_scales);
  quant.q = reinterpret_cast<uint8_t*>(bytes.data() + h.out);
  quant.scales = quant.q + h.scales_at;
  quant.layout = ScaleLayout::kGrouped, quant.is_gated = h.is_gated;
  quant.expert_offsets = reinterpret_cast<const int32_t*>(bytes.data() + h.expert_offsets);
  quant.num_experts = static_cast<int>(h.num_experts), quant.scale_rows = h.scale_rows;
  if (h.pairs != 0) quant.pairs = reinterpret_cast<const int32_t*>(bytes.data() + h.pairs);
  quant.num_tokens = h.num_tokens, quant.top_k = static_cast<int>(h.top_k);
  const cudaError_t error = launch_nvfp4_quant(quant, static_cast<int>(h.num_sms), nullptr);
  file.clear();
  file.seekp(0);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return error;
}
