#include "sm90_fp8_block.cuh"

namespace vllm::gemm {
namespace {

constexpr int kMaxShared = 227 << 10;

// Stages that fit `num_blocks` thread blocks of a multiprocessor.
template <int kTileM, int kTileN, bool kIsSplit>
constexpr int num_stages(int num_blocks) {
  using Layout = Sm90Layout<kTileM, kTileN, 12, kIsSplit>;
  const int reserved = 1024;  // by the system, of each thread block
  const int free = (kMaxShared + reserved) / num_blocks - reserved - Layout::kStagingBytes;
  return free / (Layout::kStageBytes + Layout::kNumScales * 4 + 2 * 8);
}

// Lanes write 8 columns at once, and W comes in groups of 32 rows.
bool can_be_tall(const Fp8BlockArgs& args) {
  return args.is_vector && args.n % 32 == 0 && args.k > 0;
}

template <int kTileM, int kTileN, bool kIsSplit>
cudaError_t launch(const Fp8BlockArgs& args, int cluster, int num_sms, cudaStream_t stream) {
  constexpr int kNumBlocks = kTileM == 64 ? 2 : 1;  // on a multiprocessor
  constexpr int kStages = num_stages<kTileM, kTileN, kIsSplit>(kNumBlocks);
  using Layout = Sm90Layout<kTileM, kTileN, kStages, kIsSplit>;
  const auto kernel = sm90_fp8_block_kernel<kTileM, kTileN, kStages, kIsSplit>;
  if (cluster < 1 || cluster > (kIsSplit ? 8 : 2)) return cudaErrorInvalidValue;
  const int sharers = kIsSplit ? 1 : cluster;
  // Few rows: those that would be filled with zeros are not copied at all; nobody stores theirs.
  const int x_rows = sharers == 1 && args.m < kTileM ? (args.m + 7) / 8 * 8 : kTileM;
  CUtensorMap x_map, w_map;
  cudaError_t error = encode_byte_rows(&x_map, args.x, args.m, args.k, args.ldx, x_rows / sharers);
  if (error != cudaSuccess) return error;
  const int64_t w_rows = int64_t{args.n} * args.num_experts;
  if (Layout::kIsTall && !can_be_tall(args)) return cudaErrorInvalidValue;
  const auto encode_w = Layout::kIsTall ? encode_interleaved_rows : encode_byte_rows;
  error = encode_w(&w_map, args.weight, w_rows, args.k, args.ldw, kTileN);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;

  const int width = kTileN * sharers;
  const int64_t num_tiles = (args.m + kTileM - 1) / kTileM * int64_t{(args.n + width - 1) / width};
  int64_t num_clusters = num_tiles;
  if (!kIsSplit) {
    const int64_t resident = int64_t{num_sms} * kNumBlocks / cluster;
    if (args.offsets != nullptr || num_tiles > resident) num_clusters = resident;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_clusters * cluster));
  config.blockDim = dim3(Layout::kThreads);
  config.dynamicSmemBytes = Layout::kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args, x_map, w_map, cluster, x_rows);
}

struct Row {
  int tile_m, tile_n;
  bool is_split;
  cudaError_t (*launch)(const Fp8BlockArgs&, int cluster, int num_sms, cudaStream_t);
};

template <int kTileM, int kTileN, bool kIsSplit>
constexpr Row row() {
  return {kTileM, kTileN, kIsSplit, launch<kTileM, kTileN, kIsSplit>};
}

constexpr Row kTable[] = {
    row<64, 32, true>(),   row<128, 64, true>(),  row<64, 32, false>(),   row<64, 64, false>(),
    row<128, 32, false>(), row<128, 64, false>(), row<128, 128, false>(), row<256, 128, false>(),
};

// The first row that fits is taken. is_narrow: weights whose tiles of 32 rows do not outnumber the
// multiprocessors; is_deep: their columns are worth being divided.
struct Choice {
  int max_m;
  bool is_narrow, is_deep;
  Sm90Tiling tiling;
};

constexpr int kAnyM = 1 << 30, kDeepK = 8192;
constexpr int kTallM = 256;         // tokens, above which tall tiles are thought of
constexpr double kTallTime = 1.85;  // of a tall tile, in those of a 128x128 one (H100)
constexpr Choice kChoices[] = {
    {64, true, true, {64, 32, 2, true}},         {64, false, false, {64, 32, 1, false}},
    {128, true, false, {128, 32, 1, false}},     {256, true, false, {128, 64, 1, false}},
    {128, false, false, {128, 64, 1, false}},    {512, false, false, {128, 128, 1, false}},
    {kAnyM, false, false, {128, 128, 2, false}},
};

}  // namespace

Sm90Tiling sm90_tiling(const Fp8BlockArgs& args, int num_sms) {
  const int m = args.m, n = args.n, num_experts = args.num_experts;
  if (num_experts > 1) {  // who gets how many rows is known on the GPU alone
    return m > 64 * num_experts ? Sm90Tiling{128, 128, 1, false} : Sm90Tiling{64, 64, 1, false};
  }
  const bool is_narrow = n <= 32 * num_sms, is_deep = args.k >= kDeepK;
  const Choice* choice = kChoices;
  while (m > choice->max_m || (choice->is_narrow && !is_narrow) || (choice->is_deep && !is_deep)) {
    ++choice;  // the last one fits all
  }
  Sm90Tiling tiling = choice->tiling;
  const auto num_rounds = [&](int tile_m) {  // of tiles of 128 columns on all multiprocessors
    const int64_t num_tiles = int64_t{(m + tile_m - 1) / tile_m} * ((n + 127) / 128);
    return (num_tiles + num_sms - 1) / num_sms;
  };
  const bool is_square = tiling.tile_m == 128 && tiling.tile_n == 128;
  if (is_square && m > kTallM && can_be_tall(args) &&
      kTallTime * num_rounds(256) <= num_rounds(128)) {
    tiling = {256, 128, 2, false};
  }
  // Of an odd number of tiles, the last has no neighbour to share x with.
  const bool is_even = (n + tiling.tile_n - 1) / tiling.tile_n % 2 == 0;
  if (!tiling.is_split && !is_even) tiling.cluster = 1;
  return tiling;
}

cudaError_t launch_sm90_fp8_block(const Fp8BlockArgs& args, Sm90Tiling tiling, int num_sms,
                                  cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return cudaSuccess;
  for (const Row& row : kTable) {
    if (row.tile_m == tiling.tile_m && row.tile_n == tiling.tile_n &&
        row.is_split == tiling.is_split) {
      return row.launch(args, tiling.cluster, num_sms, stream);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace vllm::gemm
