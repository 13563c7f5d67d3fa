// RMSNorm with quantisation of csrc/quantization/w8a8, kernels and launches, over emulated CUDA.
//
// Reads a file of a header (Header) and data, runs what it asks for, and writes the data back into
// it. A program for the reason that weight_only.cpp gives.
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
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
static int num_sms = 0;
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaFuncGetAttributes(attributes, kernel) ((attributes)->ptxVersion = 90, cudaSuccess)
// The only one that is asked for: of multiprocessors.
#define cudaDeviceGetAttribute(value, attribute, device) (*(value) = num_sms, cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, bytes) \
  (*(blocks) = 2048 / (threads), cudaSuccess)
#define cudaFuncSetAttribute(...) cudaSuccess

#include "csrc/quantization/w8a8/row_quant.cu"

namespace vllm::w8a8 {
namespace {
thread_local uint4 weight_units[4096];
}
}  // namespace vllm::w8a8

using namespace vllm::w8a8;

// x, weight and out are offsets in the file. `out` has the residual, if there is one, codes from
// q_at on, scales from scales_at on, and normed rows from normed_at on unless that is 0.
struct Header {
  int64_t type, is_vector, num_sms, m, k, num_rows, group_shift, is_ue8m0, is_packed;
  int64_t x, weight, out, has_residual, q_at, scales_at, normed_at, x_stride, row_stride,
      group_stride;
};

int main(int, char** words) {
  std::fstream file(words[1], std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const Header h = *reinterpret_cast<const Header*>(bytes.data());
  num_sms = h.num_sms;
  Matrix matrix = {bytes.data() + h.x, static_cast<InputType>(h.type), h.m, h.k, h.x_stride};
  matrix.q = reinterpret_cast<uint8_t*>(bytes.data() + h.out + h.q_at),
  matrix.is_vector = h.is_vector;
  RmsNorm norm = {reinterpret_cast<const float*>(bytes.data() + h.weight)};
  if (h.has_residual) norm.residual = bytes.data() + h.out;
  if (h.normed_at != 0) norm.normed = bytes.data() + h.out + h.normed_at;
  norm.residual_stride = h.k, norm.eps = 1e-6f;
  GroupScales scales = {bytes.data() + h.out + h.scales_at, h.num_rows, h.row_stride,
                        h.group_stride};
  scales.num_groups = (h.k + (int64_t{1} << h.group_shift) - 1) >> h.group_shift;
  scales.group_shift = h.group_shift, scales.min_amax = 1e-10f;
  scales.is_ue8m0 = h.is_ue8m0, scales.is_packed = h.is_packed;
  emulated::before_block = [] { std::memset(weight_units, 0xFF, sizeof(weight_units)); };
  const cudaError_t error = launch_rms_norm_group_quant(matrix, norm, scales, nullptr);
  file.clear();
  file.seekp(0);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return error;
}
