// The sampler of csrc/layers, kernel and launch, over emulated CUDA.
//
// Reads a file of a header (Header) and data, and writes the tokens into it. A program for the
// reason that weight_only.cpp gives.
#include "warp.h"
// After it: what it defines stands for CUDA in them.
#include <bit>
#include <cmath>
#include <fstream>
#include <iterator>

inline uint32_t atomicAdd(uint32_t* address, uint32_t amount) {
  const uint32_t before = *address;
  *address += amount;
  return before;
}
inline int __ffs(unsigned v) { return v == 0 ? 0 : std::countr_zero(v) + 1; }
inline int __clz(uint32_t v) { return std::countl_zero(v); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline uint64_t __double2ull_rz(double v) {
  return v <= 0 ? 0 : v >= 0x1p64 ? ~uint64_t{0} : static_cast<uint64_t>(v);
}
inline int64_t __double_as_longlong(double v) { return std::bit_cast<int64_t>(v); }
inline int __double2loint(double v) { return static_cast<int>(std::bit_cast<uint64_t>(v)); }
inline double __hiloint2double(int high, int low) {
  return std::bit_cast<double>(uint64_t{static_cast<uint32_t>(high)} << 32 |
                               static_cast<uint32_t>(low));
}
inline float __double2float_rd(double v) {
  const auto nearest = static_cast<float>(v);
  return nearest > v ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0L / std::sqrt((long double)a)); }

constexpr int kSharedBytes = 227 << 10;
int ptx_version = 0;
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaFuncGetAttributes(attributes, kernel) \
  ((attributes)->ptxVersion = ptx_version, cudaSuccess)
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaDeviceGetAttribute(value, attribute, device) (*(value) = kSharedBytes, cudaSuccess)

namespace vllm::layers {
namespace {
thread_local float4 staged[kSharedBytes / sizeof(float4)];
// What a kernel leaves as it was must not look like logits.
thread_local const bool is_filled = (std::fill_n(&staged[0].x, kSharedBytes / 4, NAN), true);
}  // namespace
}  // namespace vllm::layers

#include "csrc/layers/sampling.cu"

using namespace vllm::layers;

// Offsets are those of data in the file.
struct Header {
  int64_t type, is_vector, ptx_version, num_rows, vocab, row_stride;
  int64_t logits, temperature, top_k, top_p, min_p, uniforms, tokens;
};

int main(int, char** words) {
  std::fstream file(words[1], std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const Header h = *reinterpret_cast<const Header*>(bytes.data());
  const auto floats = [&](int64_t offset) {
    return reinterpret_cast<const float*>(bytes.data() + offset);
  };
  SampleArgs args = {static_cast<FloatType>(h.type), bytes.data() + h.logits};
  args.num_rows = h.num_rows, args.vocab = h.vocab, args.row_stride = h.row_stride;
  args.temperature = floats(h.temperature), args.top_p = floats(h.top_p);
  args.min_p = floats(h.min_p);
  args.top_k = reinterpret_cast<const int64_t*>(bytes.data() + h.top_k);
  args.uniforms = reinterpret_cast<const double*>(bytes.data() + h.uniforms);
  args.tokens = reinterpret_cast<int64_t*>(bytes.data() + h.tokens);
  args.is_vector = h.is_vector;
  ptx_version = static_cast<int>(h.ptx_version);
  const cudaError_t error = launch_sample(args, nullptr);
  file.clear();
  file.seekp(0);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return error;
}
