// y[M, N] = x[M, K] * W[N, K]^T for x in bf16 or fp16 and W in FP8, NVFP4 or int4, which is widened
// in registers: for tokens so few that a kernel is limited by reading W once, and for some more.
// For x in E4M3, scaled per token, and W in int4: for any number.
//
// W is the operand of 16 rows of mma.sync, tokens the one of 8 columns. A tile of W is 16 rows x 64
// columns; its codes are stored so that every lane loads 16 bytes and has its part of four products
// (weight_only_layout.py). An mma sums over its 16 columns in any order, so a lane may bring eight
// columns that lie together, as long as it brings the same ones of x. A warp owns kRowTiles tiles
// of rows and takes every n-th tile of columns, some stages of them on their way through its part
// of shared memory. Up to 16 tokens each warp copies x itself; more are copied by all, and W is
// widened once for all tokens of a thread block. The warps that share rows add their sums up at the
// end, those of a cluster of thread blocks too, always in one order: results do not depend on
// timing.
#pragma once
#include <cooperative_groups.h>

#include "weight_only_tokens.cuh"

namespace vllm::gemm {

// What a thread block has in shared memory: stages of x and of the tiles of its warps, and at the
// end the sums in their place.
template <typename Format, typename T, int kTokenTiles, int kRowTiles, int kScaleSteps>
struct WeightOnlyMemory {
  using X = typename Format::template Activation<T>;
  using Tiles = StagedTiles<Format, T, kRowTiles, kScaleSteps>;
  static constexpr int kRowWarps = row_warps(kTokenTiles), kTokens = 8 * kTokenTiles;
  static constexpr int kSharing = kWeightOnlyWarps / kRowWarps;
  // Warps that share no columns have stages of x of their own, and wait for nobody.
  static constexpr bool kIsApart = kRowWarps == 1;
  static constexpr int kStageBytes =
      kWeightOnlyWarps * Tiles::kStageBytes + kSharing * kTokens * kTileColumns * sizeof(X);
  static constexpr int kStages = weight_only_stages(kStageBytes);
  using Tokens = StagedTokens<Format, X, kTokens, kIsApart ? 1 : kSharing,
                              kIsApart ? 32 : kWeightOnlyThreads, kStages>;
  static constexpr int kRoundTiles = kTokenTiles < 4 ? kTokenTiles : 4;
  using Partial = float[kWeightOnlyWarps][kRoundTiles * 8][kTileRows * kRowTiles + 1];
  static constexpr int kTokenBytes = Tokens::kBytes * (kIsApart ? kWeightOnlyWarps : 1);
  static constexpr int kBytes = kStages * kStageBytes;
  static_assert(sizeof(Partial) <= kBytes);
};

// kTokenTiles: tiles of 8 tokens. Grid: (thread blocks that share rows, blocks of tokens, rows).
template <typename Format, typename T, int kTokenTiles, int kRowTiles, int kScaleSteps>
__global__ void __launch_bounds__(kWeightOnlyThreads, blocks_at_once(kTokenTiles))
    weight_only_kernel(const __grid_constant__ WeightOnlyArgs args) {
  using Memory = WeightOnlyMemory<Format, T, kTokenTiles, kRowTiles, kScaleSteps>;
  using X = typename Memory::X;
  constexpr int kRowWarps = Memory::kRowWarps, kSharing = Memory::kSharing;
  constexpr int kStages = Memory::kStages, kRoundTiles = Memory::kRoundTiles;
  constexpr int kTokens = Memory::kTokens, kWarpRows = kTileRows * kRowTiles;

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
    if (!args.has_blocks_before) cudaGridDependencySynchronize();
#endif
    const int* block = args.blocks + blockIdx.y;
    expert = load_fresh(block), first_token = load_fresh(block + args.num_blocks);
    end = min(first_token + args.block_rows, load_fresh(block + 2 * args.num_blocks));
    if (expert < 0) {
#if __CUDA_ARCH__ >= 900
      cudaGridDependencySynchronize();  // no kernel ends before those before it
#endif
      return;
    }
  }
  using Tiles = typename Memory::Tiles;
  const Tiles tiles(weight, first_row / kTileRows + warp / kSharing * kRowTiles, expert,
                    Memory::kTokenBytes + warp * kStages * Tiles::kStageBytes);
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    const int column_tile = first + step * stride;
    if (column_tile < weight.column_tiles) tiles.start(weight, column_tile, step);
    commit_copies();
  }
#if __CUDA_ARCH__ >= 900
  // W does not depend on the kernel before this one, x does: what precedes overlaps its end.
  cudaGridDependencySynchronize();
#endif
  const auto row_of = [&](int token) {  // of x
    return args.order != nullptr ? args.divided_by_top_k(args.order[token]) : token;
  };
  using Tokens = typename Memory::Tokens;
  Tokens tokens(Memory::kIsApart ? warp * Tokens::kBytes : 0);
#pragma unroll
  for (int j = 0; j < Tokens::kRows; ++j) {
    const int token = first_token + Tokens::token(j), column = Tokens::chunk_column();
    const int row = token < end ? row_of(token) * args.ldx : 0;
    tokens.rows[j] = kept(static_cast<const X*>(args.x) + row + column);
    tokens.num_columns[j] = kept(token < end ? weight.k - column : 0);  // whole chunks
  }
  const int first_of_tokens = Memory::kIsApart ? first : first_of_block;
  tokens.fill(first_of_tokens, stride);

  float sums[kRowTiles][kTokenTiles][4] = {};
  const int ahead = (kStages - 1) * stride;
  const auto take_step = [&](int first_tile, int slot, int before) {
    wait_for_copies<kStages - 2>();
    // All see this stage, and have done with the one before it.
    Memory::kIsApart ? __syncwarp() : __syncthreads();
    const int column_tile = first_tile + (first - first_of_tokens);
    if (first_tile + ahead < weight.column_tiles) {
      tokens.start(first_tile + ahead, before);
      if (Memory::kIsApart || column_tile + ahead < weight.column_tiles) {
        tiles.start(weight, column_tile + ahead, before);
      }
    }
    commit_copies();
    if (Memory::kIsApart || column_tile < weight.column_tiles) {
      multiply_staged<Format, T, kTokenTiles, RowTiles<Format, T, kRowTiles, kScaleSteps>>(
          tiles.read(slot), tokens, slot, Memory::kIsApart ? 0 : warp % kSharing, sums);
    }
  };
  // Where a warp waits for nobody its instructions are the limit: of a stage that is known when
  // this is compiled, no place is computed.
  constexpr int kUnrolled = Memory::kIsApart ? kStages : 1;
  for (int tile = first_of_tokens, slot = 0; tile < weight.column_tiles;) {
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i, tile += stride) {
      const int own = kUnrolled > 1 ? i : slot;
      if (tile < weight.column_tiles) take_step(tile, own, own == 0 ? kStages - 1 : own - 1);
    }
    if (kUnrolled == 1) slot = slot == kStages - 1 ? 0 : slot + 1;
  }
  __syncthreads();  // sums take the place of what was copied

  auto& partial = *reinterpret_cast<typename Memory::Partial*>(weight_only_memory);
  const auto store = [&](int token, int row, float sum) {
    if (row >= weight.n) return;
    if (weight.row_factors != nullptr) {
      sum *= weight.row_factors[static_cast<int64_t>(expert) * weight.n + row];
    }
    sum *= Format::template kFactor<T>;
    if constexpr (Format::kScalesTokens) sum *= args.x_scales[row_of(token)];
    if (args.bias != nullptr) sum += args.bias[static_cast<int64_t>(expert) * weight.n + row];
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
