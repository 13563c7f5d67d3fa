// The weight-only GEMM's way for many tokens: rows of the weight in memory, for another GEMM.
#pragma once
#include "weight_only_tiles.cuh"

namespace vllm::gemm {

// out = rows first_row and on, [num_rows, k], with all their scales. A warp per tile at a time.
template <typename Format, typename T>
__global__ void __launch_bounds__(kWeightOnlyThreads)
    weight_only_widen_kernel(const __grid_constant__ WeightOnlyWeight weight, int first_row,
                             int num_rows, T* out) {
  using Arithmetic = Pairs<T>;
  using Tiles = RowTiles<Format, T, 1, 2>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4, tile_row = blockIdx.x * kTileRows;
  const Tiles tiles(weight, first_row / kTileRows + blockIdx.x, 0);
  float factors[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = min(first_row + tile_row + group + i * 8, weight.n - 1);
    factors[i] = weight.row_factors == nullptr ? 1.0f : weight.row_factors[row];
    factors[i] *= Format::template kFactor<T>;
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
