// Launches of weight_only.cuh for one format: each format is compiled apart.
#pragma once
#include "weight_only.cuh"
#include "weight_only_widen.cuh"

namespace vllm::gemm {

template <typename Format, typename T, int kTokenTiles, int kRowTiles, int kScaleSteps>
cudaError_t launch_tiles(const WeightOnlyArgs& args, WeightOnlyShape shape, bool has_clusters,
                         cudaStream_t stream) {
  constexpr int kRows = kTileRows * kRowTiles * row_warps(kTokenTiles), kTokens = 8 * kTokenTiles;
  if (args.blocks != nullptr && args.block_rows > kTokens) return cudaErrorInvalidValue;
  const int blocks = args.blocks != nullptr ? args.num_blocks : (args.m + kTokens - 1) / kTokens;
  using Memory = WeightOnlyMemory<Format, T, kTokenTiles, kRowTiles, kScaleSteps>;
  constexpr int kBytes = Memory::kBytes;
  const int splits = shape.splits, rounds = Memory::kIsApart ? shape.rounds : 1;
  const auto kernel = weight_only_kernel<Format, T, kTokenTiles, kRowTiles, kScaleSteps>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(splits, blocks, (args.weight.n + kRows * rounds - 1) / (kRows * rounds));
  config.blockDim = dim3(kWeightOnlyThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !has_clusters ? 0 : splits == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <typename Format, typename T>
cudaError_t launch_type(const WeightOnlyArgs& args, WeightOnlyShape shape, bool has_clusters,
                        cudaStream_t stream) {
  if (shape.splits < 1 || shape.splits > 8 || (shape.splits > 1 && !has_clusters)) {
    return cudaErrorInvalidValue;
  }
  if (shape.row_tiles != 1 && shape.row_tiles != 2) return cudaErrorInvalidValue;
  if (shape.rounds < 1) return cudaErrorInvalidValue;
  const bool is_one = shape.row_tiles == 1;
  const auto launch = [&](auto tiles, auto rows, auto steps) {
    return launch_tiles<Format, T, decltype(tiles)::value, decltype(rows)::value,
                        decltype(steps)::value>(args, shape, has_clusters, stream);
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> two;
  constexpr integral_constant<int, 4> four;
  constexpr integral_constant<int, 8> eight;
  constexpr integral_constant<int, 16> sixteen;
  const int tokens = args.blocks != nullptr ? args.block_rows : args.m;
  const int tiles = token_tiles(tokens, has_clusters);
  if constexpr (!Format::kScalesWeights) {
    // Groups of 32 columns are rare: fewer of these are compiled.
    if (args.weight.column_shift == 5) {
      if (tiles > 2) return launch(eight, two, two);
      return is_one ? launch(two, one, two) : launch(two, two, two);
    }
  }
  if (tiles == 1) return is_one ? launch(one, one, one) : launch(one, two, one);
  if (tiles == 2) return is_one ? launch(two, one, one) : launch(two, two, one);
  if (tiles == 4) return launch(four, two, one);
  return tiles == 8 ? launch(eight, two, one) : launch(sixteen, two, one);
}

template <typename Format>
cudaError_t launch_format(const WeightOnlyArgs& args, bool is_bf16, WeightOnlyShape shape,
                          bool has_clusters, cudaStream_t stream) {
  return is_bf16 ? launch_type<Format, __nv_bfloat16>(args, shape, has_clusters, stream)
                 : launch_type<Format, __half>(args, shape, has_clusters, stream);
}

template <typename Format, typename T>
cudaError_t widen_type(const WeightOnlyWeight& weight, int first_row, int num_rows, void* out,
                       cudaStream_t stream) {
  const int share = (weight.column_tiles + kWeightOnlyWarps - 1) / kWeightOnlyWarps;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((num_rows + kTileRows - 1) / kTileRows, share < 4 ? share : 4);
  config.blockDim = dim3(kWeightOnlyThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, weight_only_widen_kernel<Format, T>, weight, first_row,
                            num_rows, static_cast<T*>(out));
}

template <typename Format>
cudaError_t widen_format(const WeightOnlyWeight& weight, bool is_bf16, int first_row, int num_rows,
                         void* out, cudaStream_t stream) {
  return is_bf16 ? widen_type<Format, __nv_bfloat16>(weight, first_row, num_rows, out, stream)
                 : widen_type<Format, __half>(weight, first_row, num_rows, out, stream);
}

// What a format's file instantiates.
#define VLLM_WEIGHT_ONLY_FORMAT(Format)                                                          \
  template cudaError_t launch_format<Format>(const WeightOnlyArgs&, bool, WeightOnlyShape, bool, \
                                             cudaStream_t);                                      \
  template cudaError_t widen_format<Format>(const WeightOnlyWeight&, bool, int, int, void*,      \
                                            cudaStream_t)

}  // namespace vllm::gemm
