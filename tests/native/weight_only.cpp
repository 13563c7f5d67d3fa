// The weight-only GEMM of csrc, kernels and launches, over emulated CUDA.
//
// Reads a file of a header (Header) and data, runs what it asks for, and writes the output part of
// the data back into it. A program and not a library: only a program's thread-local memory lies at
// one place of every thread, as emulated shared memory has to.
#include <cuda_fp8.h>
// Before what stands for a device's compiler.
#include "emulated_cuda.h"
// After it: what it defines stands for CUDA in them.
#include <fstream>
#include <iterator>

#define cudaFuncSetAttribute(...) cudaSuccess

#include "weight_only.cu"
#include "weight_only_launch.cuh"
#include "weight_only_w4a8.cu"

using namespace vllm::gemm;

// Offsets are those of data in the file; 0 for none.
struct Header {
  int64_t is_widen, code, is_bf16, has_clusters, row_tiles, splits;
  int64_t codes, scales, row_factors, n, k, column_tiles, groups, scale_rows, column_shift;
  int64_t x, x_scales, m, ldx, bias, out, ldo;
  int64_t blocks, num_blocks, block_rows, order, top_k, has_blocks_before, num_sms;
};

int main(int, char** words) {
  // What a thread block finds in its shared memory is NaN in every format.
  emulated::before_block = [] {
    std::memset(weight_only_memory, 0xff, sizeof(weight_only_memory));
  };
  std::fstream file(words[1], std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const Header h = *reinterpret_cast<const Header*>(bytes.data());
  const auto at = [&](int64_t offset) { return offset == 0 ? nullptr : bytes.data() + offset; };
  const auto floats = [&](int64_t offset) { return reinterpret_cast<const float*>(at(offset)); };
  const auto ints = [&](int64_t offset) { return reinterpret_cast<const int*>(at(offset)); };
  WeightOnlyArgs args = {};
  args.weight.codes = at(h.codes), args.weight.scales = at(h.scales);
  args.weight.row_factors = floats(h.row_factors);
  args.weight.n = h.n, args.weight.k = h.k, args.weight.column_tiles = h.column_tiles;
  args.weight.groups = h.groups, args.weight.scale_rows = h.scale_rows;
  args.weight.column_shift = h.column_shift;
  args.x = at(h.x), args.x_scales = floats(h.x_scales), args.bias = floats(h.bias),
  args.out = at(h.out);
  args.m = h.m, args.ldx = h.ldx, args.ldo = h.ldo;
  args.blocks = ints(h.blocks), args.order = ints(h.order);
  args.num_blocks = h.num_blocks, args.block_rows = h.block_rows;
  args.top_k_inverse = inverse_of(h.top_k), args.has_blocks_before = h.has_blocks_before;
  const auto code = static_cast<WeightCode>(h.code);
  cudaError_t error;
  if (h.is_widen) {
    error =
        launch_weight_only_widen(args.weight, code, h.is_bf16, h.splits, h.m, args.out, nullptr);
  } else {
    const int tokens = args.blocks == nullptr ? args.m : args.block_rows;
    WeightOnlyShape shape =
        weight_only_shape(code, tokens, args.num_blocks, args.weight, h.num_sms, h.has_clusters);
    if (h.row_tiles != 0) {
      shape.row_tiles = static_cast<int>(h.row_tiles), shape.splits = static_cast<int>(h.splits);
    }
    error = code == WeightCode::kW4a8
                ? launch_w4a8(args, h.is_bf16, shape, h.has_clusters, nullptr)
                : launch_weight_only(args, code, h.is_bf16, shape, h.has_clusters, nullptr);
  }
  file.clear();
  file.seekp(h.out);
  file.write(bytes.data() + h.out, static_cast<std::streamsize>(bytes.size()) - h.out);
  return error;
}
