// Tiles of a packed weight on their way from memory to registers.
#pragma once
#include "weight_only.h"
#include "weight_only_codes.cuh"

namespace vllm::gemm {

// The tiles of one weight that a warp multiplies, from one tile of rows down. kScaleSteps: float32
// scales of a row in a tile of columns: 2 where groups are of 32 columns, else 1.
template <typename Format, typename T, int kRowTiles, int kScaleSteps>
struct RowTiles {
  static constexpr int kScales = Format::kScalesWeights ? 1 : 2 * kScaleSteps;

  // One tile of columns of each: codes, and scales as they are stored. Of float32 scales, those of
  // rows group and group + 8 for the first step, then for the second.
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
        for (int step = 0; step < kScaleSteps; ++step) {
          const int group = (column_tile * kTileColumns + step * 32) >> weight.column_shift;
          const int place = group * weight.scale_rows, next = weight.scale_rows == 1 ? 0 : 8;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            loaded.scales[r][step * 2 + i] =
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
    found[0] = __uint_as_float(loaded.scales[r][half * 2 % kScales]);
    found[1] = __uint_as_float(loaded.scales[r][(half * 2 + 1) % kScales]);
  }
};

// The tiles of a warp on their way through its own part of shared memory, so that some are in
// flight while others are multiplied: where loads to registers are in flight across a loop, ptxas
// waits for all of them before it uses the first, and it moves them behind griddepcontrol.wait.
template <typename Format, typename T, int kRowTiles, int kScaleSteps>
struct StagedTiles {
  using Loaded = typename RowTiles<Format, T, kRowTiles, kScaleSteps>::Loaded;
  static constexpr int kLoads = Format::kLoads;
  static constexpr int kCodeBytes = kRowTiles * kLoads * 512;
  // Scales of a tile of columns: 32 times 2 bytes, or 16 of 4, which a weight may have once.
  static constexpr int kScaleBytes = 64, kScaleSets = kRowTiles * kScaleSteps;
  static constexpr int kLaneScales = Format::kScalesWeights ? 16 : 4;  // bytes that a lane copies
  static constexpr int kScaleLanes = kScaleBytes / kLaneScales, kSetsAtOnce = 32 / kScaleLanes;
  static constexpr int kScaleCopies = (kScaleSets + kSetsAtOnce - 1) / kSetsAtOnce;
  static constexpr int kStageBytes = kCodeBytes + kScaleSets * kScaleBytes;

  const char* codes[kRowTiles];      // this lane's
  const char* scales[kScaleCopies];  // those that this lane copies; null for 1
  // In weight_only_memory, of the first stage: this lane's codes, the scales that it copies and
  // those that it reads.
  int codes_place, scales_place[kScaleCopies], own_scales_place;

  __device__ __forceinline__ StagedTiles(const WeightOnlyWeight& weight, int first_tile, int expert,
                                         int stages) {
    const int num_tiles = (weight.n + kTileRows - 1) / kTileRows, lane = threadIdx.x % 32;
    const auto tile_of = [&](int r) {
      // Tiles past the end repeat the last one; nobody stores their results.
      return static_cast<int64_t>(expert) * num_tiles + min(first_tile + r, num_tiles - 1);
    };
    codes_place = kept(stages + lane * 16);
    const int scales_lane = lane % kScaleLanes * kLaneScales;
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      scales_place[i] = kept(stages + kCodeBytes + scale_set(i) * kScaleBytes + scales_lane);
    }
    own_scales_place =
        kept(stages + kCodeBytes + (Format::kScalesWeights ? lane * 2 : lane / 4 * 4));
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      codes[r] = kept(static_cast<const char*>(weight.codes) +
                      tile_of(r) * weight.column_tiles * (kLoads * 512) + lane * 16);
    }
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      const int64_t tile = tile_of(scale_set(i) / kScaleSteps);
      const auto* all = static_cast<const char*>(weight.scales);
      int64_t offset = 0;
      if constexpr (Format::kScalesWeights) {
        offset = tile * weight.column_tiles * kScaleBytes + lane % kScaleLanes * kLaneScales;
      } else {
        const int row = weight.scale_rows == 1 ? 0 : lane % 16;
        offset = (tile * weight.groups * weight.scale_rows + row) * 4;
      }
      scales[i] = kept(all == nullptr ? nullptr : all + offset);
    }
  }

  // Of this lane's copy i: which rows and which half of a tile of columns. Lanes without one of
  // their own copy the last one again: a branch would cost the warp more.
  static __device__ __forceinline__ int scale_set(int i) {
    const int set = i * kSetsAtOnce + static_cast<int>(threadIdx.x) % 32 / kScaleLanes;
    return min(set, kScaleSets - 1);
  }

  __device__ __forceinline__ void start(const WeightOnlyWeight& weight, int column_tile,
                                        int slot) const {
    char* stage = weight_only_memory + slot * kStageBytes;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        copy_async<16>(stage + codes_place + (r * kLoads + i) * 512,
                       codes[r] + static_cast<int64_t>(column_tile) * (kLoads * 512) + i * 512, 16);
      }
    }
    if (!Format::kScalesWeights && scales[0] == nullptr) return;
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      int offset = column_tile * kScaleBytes;
      if constexpr (!Format::kScalesWeights) {
        const int column = column_tile * kTileColumns + scale_set(i) % kScaleSteps * 32;
        offset = (column >> weight.column_shift) * weight.scale_rows * 4;
      }
      copy_async<kLaneScales>(stage + scales_place[i], scales[i] + offset, kLaneScales);
    }
  }

  // What all lanes of the warp copied.
  __device__ __forceinline__ Loaded read(int slot) const {
    const char* stage = weight_only_memory + slot * kStageBytes;
    Loaded loaded;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        loaded.codes[r][i] =
            *reinterpret_cast<const uint4*>(stage + codes_place + (r * kLoads + i) * 512);
      }
      const char* own = stage + own_scales_place + r * kScaleSteps * kScaleBytes;
      if constexpr (Format::kScalesWeights) {
        loaded.scales[r][0] = *reinterpret_cast<const uint16_t*>(own);
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kScaleSteps; ++i) {  // rows group and group + 8
          const char* place = own + i / 2 * kScaleBytes + i % 2 * 32;
          loaded.scales[r][i] = scales[0] == nullptr ? __float_as_uint(1.0f)
                                                     : *reinterpret_cast<const uint32_t*>(place);
        }
      }
    }
    return loaded;
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

}  // namespace vllm::gemm
