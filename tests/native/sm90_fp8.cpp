// The FP8 block GEMM of Hopper in csrc, kernels and launches, over emulated CUDA.
//
// Reads a file of a header (Header) and data, runs what it asks for, and writes the output part of
// the data back into it. Given the word `walk` instead, goes through the tiles of many sizes
// without multiplying, and prints how many are wrong; given `plan` and m, n, k and a number of
// multiprocessors, prints the rows and the height of the tiles of each launch. A program and not a
// library: only a program's thread-local memory lies at one place of every thread, as emulated
// shared memory has to.
#include "emulated_cuda.h"
// After it: what it defines stands for CUDA in them.
#include <cudaTypedefs.h>

#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "sm90_fp8_ptx.cuh"

#define cudaGetDriverEntryPointByVersion(name, found, version, flags, state)                     \
  (*(found) = reinterpret_cast<void*>(emulated::encode), *(state) = cudaDriverEntryPointSuccess, \
   cudaSuccess)
#define cudaFuncSetAttribute(...) cudaSuccess
#include "sm90_fp8_block.cu"
#include "tensor_map.cu"

using namespace vllm::gemm;

// Offsets are those of data in the file; 0 for none.
struct Header {
  int64_t tile_m, tile_n, cluster, is_split, num_sms, is_bf16;
  int64_t x, x_scales, weight, scales, bias, offsets, out, m, n, k, num_experts;
  int64_t x_scales_ld, x_scales_ldk, ldx, ldw, ldo, may_be_outside, has_nan;
};

// Goes through the tiles as the thread blocks of five clusters do. Wrong are: a tile that begins or
// copies a scale outside its expert's rows, or reaches beyond them where there are enough; the
// scale of another row; and an element of out that is not written once, or is nobody's.
template <int kTileM, int kTileN, bool kIsSplit>
int num_wrong(const Fp8BlockArgs& args, const std::vector<int>& offsets, int cluster) {
  constexpr int kClusters = 5;
  int wrong = 0;
  std::vector<uint8_t> times(static_cast<size_t>(args.m) * args.n);
  const auto visit = [&](const Tile& tile) {
    const int lane = threadIdx.x, begin = offsets[tile.expert], end = offsets[tile.expert + 1];
    const bool is_whole = tile.row + kTileM <= end, is_short = end - begin < kTileM;
    wrong += tile.row < begin || !(is_whole || (is_short && tile.row == begin));
    const ScaleCopier<kTileM> scales(args, tile, 0);
    for (int i = 0; i < kTileM / 32; ++i) {
      const int row = tile.row + lane + i * 32;
      const bool is_copied = i * 32 < scales.num_rows;
      wrong += is_copied && row >= end;
      if (!tile.writes(row)) continue;
      wrong += !is_copied || scales.x[i] != args.x_scales + row * args.x_scales_ld;
      wrong += row < begin || row >= end;
      for (int column = tile.column; column < min(tile.column + kTileN, args.n); ++column) {
        ++times[static_cast<size_t>(row) * args.n + column];
      }
    }
  };
  for (int first = 0; first < kClusters; ++first) {
    for (int rank = 0; rank < (kIsSplit ? 1 : cluster); ++rank) {
      const auto walk = [&] {
        Tiles<kTileM, kTileN, kIsSplit> tiles(args, cluster, rank);
        Tile tile = {};
        for (int index = first; tiles.at(index, tile); index += kClusters) visit(tile);
      };
      emulated::run_block(32, walk, nullptr);
    }
  }
  for (size_t i = 0; i < times.size(); ++i) {
    const int row = static_cast<int>(i / args.n);
    wrong += times[i] != (row >= offsets.front() && row < offsets.back());
  }
  return wrong;
}

int num_wrong(const std::vector<int>& offsets, int m, int n) {
  const std::vector<float> scales(2 * m);
  Fp8BlockArgs args = {};
  args.x_scales = scales.data(), args.x_scales_ld = 2, args.x_scales_ldk = 1;
  args.m = m, args.n = n, args.k = 128, args.num_experts = static_cast<int>(offsets.size()) - 1;
  if (args.num_experts > 1) args.offsets = offsets.data();
  int wrong =
      num_wrong<64, 32, true>(args, offsets, 4) + num_wrong<128, 64, true>(args, offsets, 1);
  for (const int cluster : {1, 2}) {
    wrong += num_wrong<64, 32, false>(args, offsets, cluster);
    wrong += num_wrong<64, 64, false>(args, offsets, cluster);
    wrong += num_wrong<128, 32, false>(args, offsets, cluster);
    wrong += num_wrong<128, 64, false>(args, offsets, cluster);
    wrong += num_wrong<128, 128, false>(args, offsets, cluster);
    wrong += num_wrong<256, 128, false>(args, offsets, cluster);
  }
  return wrong;
}

int walk() {
  int wrong = 0;
  for (int m = 1; m <= 1100; ++m) wrong += num_wrong({0, m}, m, 40);
  for (const int m : {2047, 2048, 2049, 4200}) wrong += num_wrong({0, m}, m, 300);
  std::minstd_rand random(0);
  for (int i = 0; i < 150; ++i) {
    std::vector<int> offsets(2 + random() % 70);
    offsets[0] = random() % 3 * 50;
    for (size_t e = 1; e < offsets.size(); ++e) {
      const int most[] = {1, 4, 65, 130, 600};
      offsets[e] = offsets[e - 1] + random() % most[random() % 5];
    }
    wrong += num_wrong(offsets, offsets.back() + random() % 100 + 1, 40);
  }
  printf("%d wrong\n", wrong);
  return wrong != 0;
}

int print_plan(int m, int n, int k, int num_sms) {
  Fp8BlockArgs args = {};
  args.m = m, args.n = n, args.k = k, args.num_experts = 1, args.is_vector = true;
  const Sm90Plan plan = sm90_plan(args, num_sms);
  printf("%d of %d", plan.num_rows, plan.first.tile_m);
  if (plan.num_rows < m) printf(", %d of %d", m - plan.num_rows, plan.rest.tile_m);
  return 0;
}

int main(int, char** words) {
  if (words[1] == std::string("walk")) return walk();
  if (words[1] == std::string("plan")) {
    const auto number = [&](int index) { return std::stoi(words[index]); };
    return print_plan(number(2), number(3), number(4), number(5));
  }
  std::fstream file(words[1], std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const Header h = *reinterpret_cast<const Header*>(bytes.data());
  const auto at = [&](int64_t offset) { return offset == 0 ? nullptr : bytes.data() + offset; };
  Fp8BlockArgs args = {};
  args.x = reinterpret_cast<const uint8_t*>(at(h.x));
  args.x_scales = reinterpret_cast<const float*>(at(h.x_scales));
  args.weight = reinterpret_cast<const uint8_t*>(at(h.weight));
  args.scales = reinterpret_cast<const float*>(at(h.scales));
  args.bias = reinterpret_cast<const float*>(at(h.bias));
  args.offsets = reinterpret_cast<const int32_t*>(at(h.offsets));
  args.out = at(h.out);
  args.m = h.m, args.n = h.n, args.k = h.k, args.num_experts = h.num_experts;
  args.x_scales_ld = h.x_scales_ld, args.x_scales_ldk = h.x_scales_ldk;
  args.ldx = h.ldx, args.ldw = h.ldw, args.ldo = h.ldo;
  args.is_bf16 = h.is_bf16;
  args.is_vector = h.n % 8 == 0 && h.ldo % 8 == 0;
  const Sm90Tiling tiling = {static_cast<int>(h.tile_m), static_cast<int>(h.tile_n),
                             static_cast<int>(h.cluster), h.is_split != 0};
  const Sm90Plan plan =
      h.tile_m == 0 ? sm90_plan(args, h.num_sms) : Sm90Plan{args.m, tiling, tiling};
  // What a thread block finds in its shared memory is NaN, also as E4M3.
  emulated::before_block = [] { std::memset(ring, 0xFF, sizeof(ring)); };
  watched = args.x;
  const cudaError_t error = launch_sm90_fp8_block(args, plan, h.num_sms, nullptr);
  file.clear();
  file.seekp(h.out);
  file.write(bytes.data() + h.out, static_cast<std::streamsize>(bytes.size()) - h.out);
  if (num_rows_outside > 0 && !h.may_be_outside) return 98;
  if (num_nan_copied > 0 && !h.has_nan) return 97;
  return error;
}
