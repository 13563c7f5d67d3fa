// y[M, N] = x[M, K] * W[N, K]^T for x in bf16 or fp16 and W in FP8, NVFP4 or int4, which is widened
// in registers: for few tokens a kernel that is limited by reading W once.
//
// W is the operand of 16 rows of mma.sync, tokens the one of 8 columns. A tile of W is 16 rows x 64
// columns; its codes are stored so that every lane loads 16 bytes and has its part of four products
// (weight_only_layout.py). An mma sums over its 16 columns in any order, so a lane may bring eight
// columns that lie together, as long as it brings the same ones of x. Nothing of W passes shared
// memory. A warp owns kRowTiles tiles of rows and takes every n-th tile of columns, kDepth of them
// in flight; the warps that share rows add their sums up at the end, those of a cluster of thread
// blocks too, always in one order: results do not depend on timing.
#pragma once
#include <cooperative_groups.h>

#include "weight_only.h"
#include "weight_only_codes.cuh"

namespace vllm::gemm {

constexpr int kWeightOnlyWarps = 8;
constexpr int kWeightOnlyThreads = 32 * kWeightOnlyWarps;

// The tiles of one weight that a warp multiplies, from one tile of rows down.
template <typename Format, typename T, int kRowTiles>
struct RowTiles {
  static constexpr int kScales = Format::kScalesWeights ? 1 : 4;

  // One tile of columns of each: codes, and scales as they are stored. Of float32 scales, those of
  // rows group and group + 8 for the first 32 columns, then for the others.
  struct Loaded {
    uint4 codes[kRowTiles][Format::kLoads];
    uint32_t scales[kRowTiles][kScales];
  };

  const uint4* codes[kRowTiles];
  const char* scales[kRowTiles];

  __device__ __forceinline__ RowTiles(const WeightOnlyWeight& weight, int first_tile, int expert) {
    const int num_tiles = (weight.n + kTileRows - 1) / kTileRows, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      // Tiles past the end repeat the last one; nobody stores their results.
      const int64_t tile =
          static_cast<int64_t>(expert) * num_tiles + min(first_tile + r, num_tiles - 1);
      codes[r] = static_cast<const uint4*>(weight.codes) +
                 tile * weight.column_tiles * Format::kLoads * 32 + lane;
      const auto* all = static_cast<const char*>(weight.scales);
      if constexpr (Format::kScalesWeights) {
        scales[r] = all + (tile * weight.column_tiles * 32 + lane) * 2;
      } else {
        const int row = weight.scale_rows == 1 ? 0 : lane / 4;
        scales[r] = all == nullptr
                        ? nullptr
                        : all + (tile * weight.groups * weight.scale_rows + row) * sizeof(float);
      }
    }
  }

  __device__ __forceinline__ void load(const WeightOnlyWeight& weight, int column_tile,
                                       Loaded& loaded) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < Format::kLoads; ++i) {
        loaded.codes[r][i] = load_once(codes[r] + (column_tile * Format::kLoads + i) * 32);
      }
      if constexpr (Format::kScalesWeights) {
        loaded.scales[r][0] =
            __ldg(reinterpret_cast<const uint16_t*>(scales[r]) + column_tile * 32);
      } else {
        const auto* own = reinterpret_cast<const uint32_t*>(scales[r]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int group = (column_tile * kTileColumns + half * 32) >> weight.column_shift;
          const int place = group * weight.scale_rows, next = weight.scale_rows == 1 ? 0 : 8;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            loaded.scales[r][half * 2 + i] =
                own == nullptr ? __float_as_uint(1.0f) : __ldg(own + place + i * next);
          }
        }
      }
    }
  }

  // The scales of a half of a tile, in the form that Format::widen takes.
  static __device__ __forceinline__ void scales_of(const Loaded& loaded, int r, int half,
                                                   uint32_t (&found)[2]) {
    found[0] = Format::template scale<T>(loaded.scales[r][0] & 255u);
    found[1] = Format::template scale<T>(loaded.scales[r][0] >> 8);
  }
  static __device__ __forceinline__ void scales_of(const Loaded& loaded, int r, int half,
                                                   float (&found)[2]) {
    found[0] = __uint_as_float(loaded.scales[r][(half * 2) % kScales]);
    found[1] = __uint_as_float(loaded.scales[r][(half * 2 + 1) % kScales]);
  }
};

template <typename Format>
struct ScaleOf {
  using type = float;
};
template <>
struct ScaleOf<Nvfp4> {
  using type = uint32_t;
};

// Warps of a thread block that have rows of their own; the others share rows, not columns. Many
// tokens are read from the L1 cache, which the warps of one column tile share.
constexpr int row_warps(int token_tiles) { return token_tiles >= 4 ? 4 : 1; }

// Tiles of columns in flight, by the registers that they take.
template <typename Format, int kTokenTiles, int kRowTiles>
constexpr int depth() {
  constexpr int kWeight = kRowTiles * (4 * Format::kLoads + (Format::kScalesWeights ? 1 : 4));
  constexpr int kTokens = kTokenTiles <= 2 ? 8 * kTokenTiles : 0;
  constexpr int kDepth = (kTokenTiles <= 4 ? 80 : 36) / (kWeight + kTokens);
  return kDepth > 4 ? 4 : kDepth < 2 ? 2 : kDepth;
}

// kTokenTiles: tiles of 8 tokens. Grid: (thread blocks that share rows, blocks of tokens, rows).
template <typename Format, typename T, int kTokenTiles, int kRowTiles>
__global__ void __launch_bounds__(kWeightOnlyThreads, kTokenTiles <= 2 ? 2 : 1)
    weight_only_kernel(const __grid_constant__ WeightOnlyArgs args) {
  using Arithmetic = Pairs<T>;
  using Tiles = RowTiles<Format, T, kRowTiles>;
  constexpr int kRowWarps = row_warps(kTokenTiles);
  constexpr int kSharing = kWeightOnlyWarps / kRowWarps;
  constexpr int kDepth = depth<Format, kTokenTiles, kRowTiles>();
  constexpr bool kHoldsTokens = kTokenTiles <= 2;
  constexpr int kWarpRows = kTileRows * kRowTiles;
  constexpr int kRoundTiles = kTokenTiles < 4 ? kTokenTiles : 4;
  __shared__ float partial[kWeightOnlyWarps][kRoundTiles * 8][kWarpRows + 1];

  const WeightOnlyWeight& weight = args.weight;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4;
  const int first_row = blockIdx.z * kRowWarps * kWarpRows;
  const int stride = gridDim.x * kSharing;
  const int first = blockIdx.x * kSharing + warp % kSharing;
#if __CUDA_ARCH__ >= 900
  // The next kernel of the stream may begin to read its own weights wherever there is room.
  cudaTriggerProgrammaticLaunchCompletion();
#endif

  int expert = 0, first_token = blockIdx.y * kTokenTiles * 8, end = args.m;
  if (args.blocks != nullptr) {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
    expert = args.blocks[blockIdx.y];
    if (expert < 0) return;
    first_token = args.blocks[args.num_blocks + blockIdx.y];
    end = min(first_token + args.block_rows, args.blocks[2 * args.num_blocks + blockIdx.y]);
  }
  const Tiles tiles(weight, first_row / kTileRows + warp / kSharing * kRowTiles, expert);
  typename Tiles::Loaded loaded[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (first + d * stride < weight.column_tiles) tiles.load(weight, first + d * stride, loaded[d]);
  }
#if __CUDA_ARCH__ >= 900
  // W does not depend on the kernel before this one, x does: what precedes overlaps its end.
  cudaGridDependencySynchronize();
#endif
  int rows_of_x[kTokenTiles];  // where the row of this lane's token begins; negative for none
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    const int token = first_token + tile * 8 + group;
    int row = token;
    if (token < end && args.order != nullptr) row = args.order[token] / args.top_k;
    rows_of_x[tile] = token < end ? row * args.ldx : -1;
  }
  const auto load_tokens = [&](int column_tile, int tile, int half) {
    const int column = column_tile * kTileColumns + Format::column(quad, half);
    if (rows_of_x[tile] < 0 || column >= weight.k) return make_uint4(0, 0, 0, 0);  // k % 8 == 0
    return *reinterpret_cast<const uint4*>(static_cast<const T*>(args.x) + rows_of_x[tile] +
                                           column);
  };
  uint4 held[kHoldsTokens ? kDepth : 1][kTokenTiles][2];
  if constexpr (kHoldsTokens) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int i = 0; i < 2 * kTokenTiles; ++i) {
        held[d][i / 2][i % 2] = first + d * stride < weight.column_tiles
                                    ? load_tokens(first + d * stride, i / 2, i % 2)
                                    : make_uint4(0, 0, 0, 0);
      }
    }
  }

  float sums[kRowTiles][kTokenTiles][4] = {};
  for (int begin = first; begin < weight.column_tiles; begin += kDepth * stride) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int column_tile = begin + d * stride, next = column_tile + kDepth * stride;
      if (column_tile >= weight.column_tiles) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 x[kTokenTiles];
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          if constexpr (kHoldsTokens) {
            x[tile] = held[d][tile][half];
          } else {
            x[tile] = load_tokens(column_tile, tile, half);
          }
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          typename ScaleOf<Format>::type scales[2];
          Tiles::scales_of(loaded[d], r, half, scales);
          float own[kTokenTiles][4] = {};
          float (&sum)[kTokenTiles][4] = Format::kScalesWeights ? sums[r] : own;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t a[4];
            Format::template widen<T>(loaded[d].codes[r], half * 2 + i, scales, a);
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile) {
              mma<T>(sum[tile], a, word(x[tile], 2 * i), word(x[tile], 2 * i + 1));
            }
          }
          if constexpr (!Format::kScalesWeights) {
            const float factors[2] = {Format::factor(scales[0]), Format::factor(scales[1])};
#pragma unroll
            for (int i = 0; i < 4 * kTokenTiles; ++i) {
              sums[r][i / 4][i % 4] += own[i / 4][i % 4] * factors[i % 4 / 2];
            }
          }
        }
      }
      if (next < weight.column_tiles) {
        tiles.load(weight, next, loaded[d]);
        if constexpr (kHoldsTokens) {
#pragma unroll
          for (int i = 0; i < 2 * kTokenTiles; ++i) {
            held[d][i / 2][i % 2] = load_tokens(next, i / 2, i % 2);
          }
        }
      }
    }
  }

  const auto store = [&](int token, int row, float sum) {
    if (row >= weight.n) return;
    if (weight.row_factors != nullptr) {
      sum *= weight.row_factors[static_cast<int64_t>(expert) * weight.n + row];
    }
    if constexpr (Format::kScalesWeights) sum *= Format::template kFactor<T>;
    if (args.bias != nullptr) sum += args.bias[row];
    static_cast<T*>(args.out)[token * args.ldo + row] = Arithmetic::from_float(sum);
  };
#pragma unroll
  for (int round = 0; round < kTokenTiles; round += kRoundTiles) {
    const int begin = first_token + round * 8, num_tokens = min(end - begin, kRoundTiles * 8);
    if (num_tokens <= 0) break;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int tile = 0; tile < kRoundTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          partial[warp][tile * 8 + quad * 2 + i % 2][r * kTileRows + i / 2 * 8 + group] =
              sums[r][round + tile][i];
        }
      }
    }
    __syncthreads();
    const int num_results = num_tokens * kRowWarps * kWarpRows;
    for (int i = threadIdx.x; i < num_results; i += kWeightOnlyThreads) {
      const int token = i / (kRowWarps * kWarpRows), row = i % (kRowWarps * kWarpRows);
      float* own = &partial[row / kWarpRows * kSharing][token][row % kWarpRows];
      float sum = *own;
#pragma unroll
      for (int w = 1; w < kSharing; ++w) {
        sum += partial[row / kWarpRows * kSharing + w][token][row % kWarpRows];
      }
      if (gridDim.x == 1) {
        store(begin + token, first_row + row, sum);
      } else {
        *own = sum;
      }
    }
#if __CUDA_ARCH__ >= 900
    if (gridDim.x > 1) {
      // The thread blocks of a cluster share columns out; each adds up a part of the results.
      auto cluster = cooperative_groups::this_cluster();
      cluster.sync();
      const int size = gridDim.x;
      for (int i = blockIdx.x * kWeightOnlyThreads + threadIdx.x; i < num_results;
           i += size * kWeightOnlyThreads) {
        const int token = i / (kRowWarps * kWarpRows), row = i % (kRowWarps * kWarpRows);
        float* own = &partial[row / kWarpRows * kSharing][token][row % kWarpRows];
        float sum = 0.0f;
        for (int rank = 0; rank < size; ++rank) sum += *cluster.map_shared_rank(own, rank);
        store(begin + token, first_row + row, sum);
      }
      cluster.sync();  // nobody overwrites or leaves what another still reads
    }
#endif
    if (round + kRoundTiles < kTokenTiles) __syncthreads();
  }
}

// out = rows first_row and on, [num_rows, k], with all their scales. A warp per tile at a time.
template <typename Format, typename T>
__global__ void __launch_bounds__(kWeightOnlyThreads)
    weight_only_widen_kernel(const __grid_constant__ WeightOnlyWeight weight, int first_row,
                             int num_rows, T* out) {
  using Arithmetic = Pairs<T>;
  using Tiles = RowTiles<Format, T, 1>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4, tile_row = blockIdx.x * kTileRows;
  const Tiles tiles(weight, first_row / kTileRows + blockIdx.x, 0);
  float factors[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = min(first_row + tile_row + group + i * 8, weight.n - 1);
    factors[i] = weight.row_factors == nullptr ? 1.0f : weight.row_factors[row];
    if constexpr (Format::kScalesWeights) factors[i] *= Format::template kFactor<T>;
  }
  const int stride = gridDim.y * kWeightOnlyWarps;
  for (int column_tile = blockIdx.y * kWeightOnlyWarps + warp; column_tile < weight.column_tiles;
       column_tile += stride) {
    typename Tiles::Loaded loaded;
    tiles.load(weight, column_tile, loaded);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      typename ScaleOf<Format>::type scales[2];
      Tiles::scales_of(loaded, 0, half, scales);
      float all[2] = {factors[0], factors[1]};
      if constexpr (!Format::kScalesWeights) {
        all[0] *= Format::factor(scales[0]), all[1] *= Format::factor(scales[1]);
      }
      uint32_t wide[2][4];  // of rows group and group + 8: eight columns
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        Format::template widen<T>(loaded.codes[0], half * 2 + i, scales, a);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = Arithmetic::to_float2(a[j]);
          wide[j % 2][i * 2 + j / 2] =
              Arithmetic::from_float2(pair.x * all[j % 2], pair.y * all[j % 2]);
        }
      }
      const int column = column_tile * kTileColumns + Format::column(quad, half);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = tile_row + group + i * 8;
        if (row >= num_rows || column >= weight.k) continue;
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * weight.k + column) =
            make_uint4(wide[i][0], wide[i][1], wide[i][2], wide[i][3]);
      }
    }
  }
}

}  // namespace vllm::gemm
