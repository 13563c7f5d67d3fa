// How sm90_fp8_block.cuh writes its sums: those of a whole tile from the registers of its warps,
// those of a tile whose columns of K a cluster divides through the shared memory of all its thread
// blocks.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90_fp8_ptx.cuh"
#include "sm90_fp8_tiles.cuh"

namespace vllm::gemm {

__device__ __forceinline__ uint32_t pack(float low, float high, bool is_bf16) {
  if (is_bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Eight neighbouring columns of one row; the row is inside.
__device__ __forceinline__ void store(const Fp8BlockArgs& args, int row, int column, uint4 values) {
  uint16_t* out = static_cast<uint16_t*>(args.out) + row * args.ldo + column;
  if (args.is_vector) {
    if (column < args.n) *reinterpret_cast<uint4*>(out) = values;
    return;
  }
  const uint16_t* single = reinterpret_cast<const uint16_t*>(&values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < args.n) out[i] = single[i];
  }
}

// Sums of `column` and the one after it, with the scales and the bias of theirs that are inside.
__device__ __forceinline__ float2 finish(const Fp8BlockArgs& args, int column, float low,
                                         float high) {
  if (args.column_scales != nullptr) {
    if (column < args.n) low *= args.column_scales[column];
    if (column + 1 < args.n) high *= args.column_scales[column + 1];
  }
  if (args.bias != nullptr) {
    if (column < args.n) low += args.bias[column];
    if (column + 1 < args.n) high += args.bias[column + 1];
  }
  return make_float2(low, high);
}

// The 16 rows of a warp, through its own shared memory: lanes then write whole lines.
template <int kTileN>
__device__ __forceinline__ void store_warp(const Fp8BlockArgs& args, const Tile& tile,
                                           int first_row, const float (&sums)[kTileN / 2],
                                           uint8_t* staging) {
  constexpr int kColumns = kStagingColumns<kTileN>, kPitch = kStagingPitch<kTileN>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < kTileN / kColumns; ++part) {
    const int first_column = tile.column + part * kColumns;
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      const int column = i / 4 * 8 + lane % 4 * 2, row = lane / 4 + i / 2 % 2 * 8;
      const float* pair = sums + part * kColumns / 2 + i;
      const float2 done = finish(args, first_column + column, pair[0], pair[1]);
      *reinterpret_cast<uint32_t*>(staging + row * kPitch + column * 2) =
          pack(done.x, done.y, args.is_bf16);
    }
    __syncwarp();
    constexpr int kVectors = kColumns / 8;
#pragma unroll
    for (int i = lane; i < 16 * kVectors; i += 32) {
      const int row = i / kVectors, column = i % kVectors * 8;
      if (tile.writes(first_row + row)) {
        store(args, first_row + row, first_column + column,
              *reinterpret_cast<const uint4*>(staging + row * kPitch + column * 2));
      }
    }
    __syncwarp();
  }
}

// Of `row` and `row` + 8, what a lane has of a tile's kTileN columns, whose W came by
// encode_interleaved_rows: 8 neighbours of every 32. Rows of out are aligned, and n % 32 == 0.
template <int kTileN>
__device__ __forceinline__ void store_neighbours(const Fp8BlockArgs& args, const Tile& tile,
                                                 int row, const float (&sums)[kTileN / 2]) {
  const int lane_column = tile.column + threadIdx.x % 4 * 8;
  uint16_t* out = static_cast<uint16_t*>(args.out) + row * args.ldo + lane_column;
#pragma unroll
  for (int part = 0; part < kTileN / 32; ++part) {
    if (tile.column + part * 32 >= args.n) return;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sums + part * 16 + i * 4 + below * 2;
        const float2 done = finish(args, lane_column + part * 32 + 2 * i, pair[0], pair[1]);
        packed[i] = pack(done.x, done.y, args.is_bf16);
      }
      if (tile.writes(row + below * 8)) {
        *reinterpret_cast<uint4*>(out + below * 8 * args.ldo + part * 32) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }
}

// What a group of four warps leaves for the other thread blocks of its cluster.
template <int kTileN, class Layout>
__device__ __forceinline__ void store_partial(uint8_t* ring, int warp,
                                              const float (&sums)[kTileN / 2]) {
  const int lane = threadIdx.x % 32;
  float* partial = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int i = 0; i < kTileN / 2; i += 2) {
    const int column = i / 4 * 8 + lane % 4 * 2, row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    *reinterpret_cast<float2*>(partial + row * Layout::kPartialPitch + column) =
        make_float2(sums[i], sums[i + 1]);
  }
}

// Adds up what the thread blocks of a cluster left in `partial`; each writes its share of the tile.
template <class Layout>
__device__ __forceinline__ void store_split(const Fp8BlockArgs& args, const Tile& tile,
                                            const float* partial, int cluster, int rank) {
  constexpr int kVectors = Layout::kColumns / 8, kThreads = Layout::kThreads;
  const int skipped = tile.first - tile.row;
  const int num_rows = min(Layout::kRows, tile.end - tile.row) - skipped;
  for (int i = rank * kThreads + threadIdx.x; i < num_rows * kVectors; i += cluster * kThreads) {
    const int row = skipped + i / kVectors, column = i % kVectors * 8;
    float sum[8] = {};
#pragma unroll 4
    for (int source = 0; source < cluster; ++source) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 v =
            load_cluster(partial + row * Layout::kPartialPitch + column + half * 4, source);
        sum[half * 4] += v.x, sum[half * 4 + 1] += v.y;
        sum[half * 4 + 2] += v.z, sum[half * 4 + 3] += v.w;
      }
    }
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 done = finish(args, tile.column + column + 2 * j, sum[2 * j], sum[2 * j + 1]);
      packed[j] = pack(done.x, done.y, args.is_bf16);
    }
    store(args, tile.row + row, tile.column + column,
          make_uint4(packed[0], packed[1], packed[2], packed[3]));
  }
}

}  // namespace vllm::gemm
