// y[M, N] = x[M, K] * W[N, K]^T for x in bf16 or fp16 and W in FP8, NVFP4 or int4, which is widened
// in registers: for tokens so few that a kernel is limited by reading W once, and for some more.
// For x in E4M3, scaled per token, and W in int4: for any number.
//
// W is the operand of 16 rows of mma.sync, tokens the one of 8 columns. A tile of W is 16 rows x 64
// columns; its codes are stored so that every lane loads 16 bytes and has its part of four products
// (weight_only_layout.py). An mma sums over its 16 columns in any order, so a lane may bring eight
// columns that lie together, as long as it brings the same ones of x. Nothing of W passes shared
// memory. A warp owns kRowTiles tiles of rows and takes every n-th tile of columns, depth of them
// in flight. Up to 16 tokens each warp loads x itself; more pass shared memory, and W is widened
// once for all tokens of a thread block. The warps that share rows add their sums up at the end,
// those of a cluster of thread blocks too, always in one order: results do not depend on timing.
#pragma once
#include <cooperative_groups.h>

#include "weight_only_tokens.cuh"

namespace vllm::gemm {

// Of each lane, for so few tokens that a warp loads them itself.
template <typename Format, typename X, int kTokenTiles>
struct HeldTokens {
  using Eight = typename EightOf<X>::type;

  const X* x;
  int k;
  int rows[kTokenTiles];  // where the row of this lane's token begins; negative for none

  __device__ __forceinline__ void load(int column_tile, Eight (&held)[kTokenTiles][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i) {
      const int column =
          column_tile * kTileColumns + Format::column(threadIdx.x % 4, i % 2);  // k % 8 == 0
      held[i / 2][i % 2] = rows[i / 2] < 0 || column >= k
                               ? Eight{}
                               : *reinterpret_cast<const Eight*>(x + rows[i / 2] + column);
    }
  }
};

// Adds the products of one tile of columns. Sums of one scale are multiplied by it together.
template <typename Format, typename T, typename Tiles, int kScaleSteps, typename Eight,
          int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void multiply_held(const typename Tiles::Loaded& loaded,
                                              const Eight (&held)[kTokenTiles][2],
                                              float (&sums)[kRowTiles][kTokenTiles][4]) {
  using X = typename Format::template Activation<T>;
  constexpr int kProducts = Format::kProducts;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    float own[kTokenTiles][4] = {};
    float (&sum)[kTokenTiles][4] = Format::kScalesWeights ? sums[r] : own;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      typename ScaleOf<Format>::type scales[2];
      Tiles::scales_of(loaded, r, half, scales);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        uint32_t a[4];
        Format::template widen<T>(loaded.codes[r], half * kProducts + i, scales, a);
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          const Eight& x = held[tile][half];
          mma<X>(sum[tile], a, word(x, 2 * i), word(x, 2 * i + 1));
        }
      }
      if constexpr (!Format::kScalesWeights) {
        if (half == 0 && kScaleSteps == 1) continue;
        const float factors[2] = {Format::factor(scales[0]), Format::factor(scales[1])};
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) {
          sums[r][i / 4][i % 4] += own[i / 4][i % 4] * factors[i % 4 / 2];
          own[i / 4][i % 4] = 0.0f;
        }
      }
    }
  }
}

// Tiles of columns in flight, by the registers that they take.
template <typename Format, typename X, int kTokenTiles, int kRowTiles, int kScaleSteps>
constexpr int depth() {
  constexpr int kScales = Format::kScalesWeights ? 1 : 2 * kScaleSteps;
  constexpr int kWeight = kRowTiles * (4 * Format::kLoads + kScales);
  constexpr int kTokens = kTokenTiles <= 2 ? 4 * sizeof(X) * kTokenTiles : 0;
  constexpr int kDepth = (kTokenTiles <= 2 ? 80 : kTokenTiles <= 8 ? 30 : 0) / (kWeight + kTokens);
  return kDepth > 4 ? 4 : kDepth < 2 ? 2 : kDepth;
}

// kTokenTiles: tiles of 8 tokens. Grid: (thread blocks that share rows, blocks of tokens, rows).
template <typename Format, typename T, int kTokenTiles, int kRowTiles, int kScaleSteps>
__global__ void __launch_bounds__(kWeightOnlyThreads, blocks_at_once(kTokenTiles))
    weight_only_kernel(const __grid_constant__ WeightOnlyArgs args) {
  using X = typename Format::template Activation<T>;
  using Tiles = RowTiles<Format, T, kRowTiles, kScaleSteps>;
  constexpr int kRowWarps = row_warps(kTokenTiles);
  constexpr int kSharing = kWeightOnlyWarps / kRowWarps;
  constexpr int kDepth = depth<Format, X, kTokenTiles, kRowTiles, kScaleSteps>();
  constexpr bool kHoldsTokens = kTokenTiles <= 2;
  constexpr int kTokens = 8 * kTokenTiles, kWarpRows = kTileRows * kRowTiles;
  constexpr int kRoundTiles = kTokenTiles < 4 ? kTokenTiles : 4;
  using Staged = StagedTokens<Format, X, kHoldsTokens ? kWeightOnlyThreads / 8 : kTokens, kSharing>;
  using Partial = float[kWeightOnlyWarps][kRoundTiles * 8][kWarpRows + 1];
  constexpr int kStagedBytes = kHoldsTokens ? 0 : Staged::kBytes;
  constexpr int kPartialBytes = sizeof(Partial);
  // Sums of the warps, and before them the stages of x.
  alignas(16) __shared__ char memory[kStagedBytes > kPartialBytes ? kStagedBytes : kPartialBytes];

  const WeightOnlyWeight& weight = args.weight;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4;
  const int first_row = blockIdx.z * kRowWarps * kWarpRows;
  const int stride = gridDim.x * kSharing, first_of_block = blockIdx.x * kSharing;
  const int first = first_of_block + warp % kSharing;
#if __CUDA_ARCH__ >= 900
  // The next kernel of the stream may begin to read its own weights wherever there is room.
  cudaTriggerProgrammaticLaunchCompletion();
#endif

  int expert = 0, first_token = blockIdx.y * kTokens, end = args.m;
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
  const auto row_of = [&](int token) {  // of x
    return args.order != nullptr ? args.order[token] / args.top_k : token;
  };
  const auto start_of = [&](int token) {  // where its row begins; negative for none
    return token < end ? row_of(token) * args.ldx : -1;
  };

  float sums[kRowTiles][kTokenTiles][4] = {};
  if constexpr (kHoldsTokens) {
    using Held = HeldTokens<Format, X, kTokenTiles>;
    Held tokens = {static_cast<const X*>(args.x), weight.k, {}};
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) tokens.rows[t] = start_of(first_token + t * 8 + group);
    typename Held::Eight held[kDepth][kTokenTiles][2] = {};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (first + d * stride < weight.column_tiles) tokens.load(first + d * stride, held[d]);
    }
    for (int begin = first; begin < weight.column_tiles; begin += kDepth * stride) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int column_tile = begin + d * stride, next = column_tile + kDepth * stride;
        if (column_tile >= weight.column_tiles) break;
        multiply_held<Format, T, Tiles, kScaleSteps>(loaded[d], held[d], sums);
        if (next < weight.column_tiles) {
          tiles.load(weight, next, loaded[d]);
          tokens.load(next, held[d]);
        }
      }
    }
  } else {
    Staged tokens = {reinterpret_cast<uint4*>(memory), static_cast<const X*>(args.x), weight.k, {}};
#pragma unroll
    for (int j = 0; j < Staged::kRows; ++j) {
      tokens.rows[j] = start_of(first_token + Staged::token(j));
    }
    const int num_steps = (weight.column_tiles - first_of_block + stride - 1) / stride;
#pragma unroll
    for (int step = 0; step < Staged::kStages - 1; ++step) {
      if (step < num_steps) tokens.start(first_of_block + step * stride, step);
      commit_copies();
    }
    for (int begin = 0, slot = 0; begin < num_steps; begin += kDepth) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int step = begin + d, ahead = step + Staged::kStages - 1;
        if (step >= num_steps) break;
        wait_for_copies<Staged::kStages - 2>();
        __syncthreads();  // all see this stage, and have done with the one before it
        const int before = slot == 0 ? Staged::kStages - 1 : slot - 1;
        if (ahead < num_steps) tokens.start(first_of_block + ahead * stride, before);
        commit_copies();
        const int column_tile = first + step * stride, next = column_tile + kDepth * stride;
        if (column_tile < weight.column_tiles) {
          multiply_staged<Format, T, kTokenTiles, Tiles>(loaded[d], tokens, slot, warp % kSharing,
                                                         sums);
          if (next < weight.column_tiles) tiles.load(weight, next, loaded[d]);
        }
        slot = slot == Staged::kStages - 1 ? 0 : slot + 1;
      }
    }
    __syncthreads();  // sums take the place of x
  }

  Partial& partial = *reinterpret_cast<Partial*>(memory);
  const auto store = [&](int token, int row, float sum) {
    if (row >= weight.n) return;
    if (weight.row_factors != nullptr) {
      sum *= weight.row_factors[static_cast<int64_t>(expert) * weight.n + row];
    }
    sum *= Format::template kFactor<T>;
    if constexpr (Format::kScalesTokens) sum *= args.x_scales[row_of(token)];
    if (args.bias != nullptr) sum += args.bias[row];
    static_cast<T*>(args.out)[token * args.ldo + row] = Pairs<T>::from_float(sum);
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

}  // namespace vllm::gemm
