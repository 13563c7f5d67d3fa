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
  static_assert(sizeof(Partial) <= (kIsApart ? kTokenBytes : kBytes));
};

// The tokens of a thread block, and their expert.
struct TokenBlock {
  int expert, first, end;
};

// Waits for the kernel before, if that may write blocks.
__device__ __forceinline__ TokenBlock token_block(const WeightOnlyArgs& args, int num_tokens) {
  if (args.blocks == nullptr) return {0, static_cast<int>(blockIdx.y) * num_tokens, args.m};
#if __CUDA_ARCH__ >= 900
  if (!args.has_blocks_before) cudaGridDependencySynchronize();
#endif
  const int* block = args.blocks + blockIdx.y;
  const int expert = load_fresh(block), first = load_fresh(block + args.num_blocks);
  return {expert, first, min(first + args.block_rows, load_fresh(block + 2 * args.num_blocks))};
}

__device__ __forceinline__ int row_of_x(const WeightOnlyArgs& args, int token) {
  return args.order != nullptr ? args.divided_by_top_k(args.order[token]) : token;
}

// Adds the products of all tiles of columns of this warp, `stride` apart from `first` on, and of
// `first_of_tokens` of those that copy tokens together. All stages but the last are on their way.
template <typename Format, typename T, int kTokenTiles, int kRowTiles, int kScaleSteps,
          typename Memory = WeightOnlyMemory<Format, T, kTokenTiles, kRowTiles, kScaleSteps>>
__device__ __forceinline__ void add_columns(const WeightOnlyWeight& weight,
                                            const typename Memory::Tiles& tiles,
                                            const typename Memory::Tokens& tokens, int first,
                                            int first_of_tokens, int stride,
                                            float (&sums)[kRowTiles][kTokenTiles][4]) {
  constexpr int kStages = Memory::kStages;
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
          tiles.read(slot), tokens, slot, Memory::kIsApart ? 0 : first - first_of_tokens, sums);
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
}

// Adds up the sums of the warps that share rows, and of the thread blocks of a cluster, in the
// place of tokens that were copied; rows first_row and on.
template <typename Format, typename T, typename Memory, int kTokenTiles, int kRowTiles>
__device__ __forceinline__ void store_results(const WeightOnlyArgs& args, const TokenBlock& block,
                                              int first_row,
                                              const float (&sums)[kRowTiles][kTokenTiles][4]) {
  constexpr int kSharing = Memory::kSharing, kRoundTiles = Memory::kRoundTiles;
  constexpr int kWarpRows = kTileRows * kRowTiles, kBlockRows = Memory::kRowWarps * kWarpRows;
  const WeightOnlyWeight& weight = args.weight;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4;
  auto& partial = *reinterpret_cast<typename Memory::Partial*>(weight_only_memory);
  const auto store = [&](int token, int row, float sum) {
    if (row >= weight.n) return;
    const int64_t row_of_all = static_cast<int64_t>(block.expert) * weight.n + row;
    if (weight.row_factors != nullptr) sum *= weight.row_factors[row_of_all];
    sum *= Format::template kFactor<T>;
    if constexpr (Format::kScalesTokens) sum *= args.x_scales[row_of_x(args, token)];
    if (args.bias != nullptr) sum += args.bias[row_of_all];
    static_cast<T*>(args.out)[token * args.ldo + row] = Pairs<T>::from_float(sum);
  };
#pragma unroll
  for (int round = 0; round < kTokenTiles; round += kRoundTiles) {
    const int begin = block.first + round * 8, num_tokens = min(block.end - begin, kRoundTiles * 8);
    if (num_tokens <= 0) break;
#pragma unroll
    for (int i = 0; i < kRowTiles * kRoundTiles * 4; ++i) {
      const int r = i / (4 * kRoundTiles), tile = i / 4 % kRoundTiles, part = i % 4;
      const int token = tile * 8 + quad * 2 + part % 2;
      partial[warp][token][r * kTileRows + part / 2 * 8 + group] = sums[r][round + tile][part];
    }
    __syncthreads();
    const int num_results = num_tokens * kBlockRows;
    for (int i = threadIdx.x; i < num_results; i += kWeightOnlyThreads) {
      const int token = i / kBlockRows, row = i % kBlockRows;
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
        const int token = i / kBlockRows, row = i % kBlockRows;
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

// kTokenTiles: tiles of 8 tokens. Grid: (thread blocks that share rows, blocks of tokens, rows).
// Where warps wait for nobody, a thread block takes rows gridDim.z blocks of them apart, one after
// another, and the weights of the next ones are on their way while sums are added up.
template <typename Format, typename T, int kTokenTiles, int kRowTiles, int kScaleSteps>
__global__ void __launch_bounds__(kWeightOnlyThreads, blocks_at_once(kTokenTiles))
    weight_only_kernel(const __grid_constant__ WeightOnlyArgs args) {
  using Memory = WeightOnlyMemory<Format, T, kTokenTiles, kRowTiles, kScaleSteps>;
  using Tiles = typename Memory::Tiles;
  using Tokens = typename Memory::Tokens;
  constexpr int kSharing = Memory::kSharing, kStages = Memory::kStages;
  constexpr int kBlockTiles = Memory::kRowWarps * kRowTiles, kBlockRows = kBlockTiles * kTileRows;
  constexpr bool kIsApart = Memory::kIsApart;

  const WeightOnlyWeight& weight = args.weight;
  const int warp = threadIdx.x / 32;
  const int stride = gridDim.x * kSharing, first_of_block = blockIdx.x * kSharing;
  const int first = first_of_block + warp % kSharing;
  const int first_of_tokens = kIsApart ? first : first_of_block;
#if __CUDA_ARCH__ >= 900
  // The next kernel of the stream may begin to read its own weights wherever there is room.
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const TokenBlock block = token_block(args, Memory::kTokens);
  const auto tiles_of = [&](int rows) {
    return Tiles(weight, rows * kBlockTiles + warp / kSharing * kRowTiles, block.expert,
                 Memory::kTokenBytes + warp * kStages * Tiles::kStageBytes);
  };
  const auto start = [&](const Tiles& tiles) {
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
      const int column_tile = first + step * stride;
      if (column_tile < weight.column_tiles) tiles.start(weight, column_tile, step);
      commit_copies();
    }
  };
  int rows = blockIdx.z;
  Tiles tiles = tiles_of(rows);
  if (block.expert >= 0) start(tiles);
#if __CUDA_ARCH__ >= 900
  // W does not depend on the kernel before this one, x does: what precedes overlaps its end. Nobody
  // leaves earlier: each kernel ends after those before it.
  cudaGridDependencySynchronize();
#endif
  if (block.expert < 0) return;
  Tokens tokens(kIsApart ? warp * Tokens::kBytes : 0);
#pragma unroll
  for (int j = 0; j < Tokens::kRows; ++j) {
    const int token = block.first + Tokens::token(j), column = Tokens::chunk_column();
    const int row = token < block.end ? row_of_x(args, token) * args.ldx : 0;
    tokens.rows[j] = kept(static_cast<const typename Memory::X*>(args.x) + row + column);
    tokens.num_columns[j] = kept(token < block.end ? weight.k - column : 0);  // whole chunks
  }
  while (true) {
    tokens.fill(first_of_tokens, stride);
    float sums[kRowTiles][kTokenTiles][4] = {};
    add_columns<Format, T, kTokenTiles, kRowTiles, kScaleSteps>(weight, tiles, tokens, first,
                                                                first_of_tokens, stride, sums);
    const int next = rows + gridDim.z;
    const bool has_next = kIsApart && next * kBlockRows < weight.n;
    if (has_next) {
      tiles = tiles_of(next);
      __syncwarp();  // all lanes have read the last stages
      start(tiles);
    }
    __syncthreads();  // sums take the place of tokens
    store_results<Format, T, Memory>(args, block, rows * kBlockRows, sums);
    if (!has_next) return;
    __syncthreads();  // tokens take it again
    rows = next;
  }
}

}  // namespace vllm::gemm
