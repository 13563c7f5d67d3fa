// Tiles of a packed weight on their way from memory to registers.
#pragma once
#include "weight_only.h"
#include "weight_only_codes.cuh"

namespace vllm::gemm {

constexpr int kWeightOnlyWarps = 8;
constexpr int kWeightOnlyThreads = 32 * kWeightOnlyWarps;

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

template <typename Format>
struct ScaleOf {
  using type = float;
};
template <>
struct ScaleOf<Nvfp4> {
  using type = uint32_t;
};

}  // namespace vllm::gemm
