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
  // Of few rows, those that do not exist are not copied either; nobody stores theirs.
  const int x_rows = sharers == 1 ? min(args.m, kTileM) : kTileM;
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
// Columns of K that a 128x128 tile is multiplied with while a second launch begins. Estimated.
constexpr double kLaunchColumns = 1024;
constexpr Choice kChoices[] = {
    {64, true, true, {64, 32, 2, true}},         {64, false, false, {64, 32, 1, false}},
    {128, true, false, {128, 32, 1, false}},     {256, true, false, {128, 64, 1, false}},
    {128, false, false, {128, 64, 1, false}},    {512, false, false, {128, 128, 1, false}},
    {kAnyM, false, false, {128, 128, 2, false}},
};

Sm90Tiling choose(const Fp8BlockArgs& args, int m, int num_sms) {
  const bool is_narrow = args.n <= 32 * num_sms, is_deep = args.k >= kDeepK;
  const Choice* choice = kChoices;
  while (m > choice->max_m || (choice->is_narrow && !is_narrow) || (choice->is_deep && !is_deep)) {
    ++choice;  // the last one fits all
  }
  return choice->tiling;
}

// Of an odd number of tiles, the last has no neighbour to share x with.
Sm90Tiling paired(Sm90Tiling tiling, int n) {
  const bool is_even = (n + tiling.tile_n - 1) / tiling.tile_n % 2 == 0;
  if (!tiling.is_split && !is_even) tiling.cluster = 1;
  return tiling;
}

// How many rows tall tiles take, from the first on. All multiprocessors work for as many rounds of
// tiles as the last of them does, so the last round of tall ones may better be one of smaller.
int num_tall_rows(const Fp8BlockArgs& args, int num_sms) {
  const int64_t num_n = (args.n + 127) / 128;
  const auto num_rounds = [&](int num_m) { return (num_m * num_n + num_sms - 1) / num_sms; };
  const int num_all = (args.m + 255) / 256;
  int best = num_all;
  double least = kTallTime * num_rounds(num_all);
  for (int num_tall = 0; num_tall < num_all; ++num_tall) {
    const double launch = num_tall == 0 ? 0 : kLaunchColumns / args.k;
    const int rest = args.m - num_tall * 256;
    const double time = kTallTime * num_rounds(num_tall) + num_rounds((rest + 127) / 128) + launch;
    if (time < least) best = num_tall, least = time;
  }
  return min(best * 256, args.m);
}

cudaError_t launch_tiling(const Fp8BlockArgs& args, Sm90Tiling tiling, int num_sms,
                          cudaStream_t stream) {
  for (const Row& row : kTable) {
    if (row.tile_m == tiling.tile_m && row.tile_n == tiling.tile_n &&
        row.is_split == tiling.is_split) {
      return row.launch(args, tiling.cluster, num_sms, stream);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace

Sm90Plan sm90_plan(const Fp8BlockArgs& args, int num_sms) {
  const int m = args.m, num_experts = args.num_experts;
  if (args.offsets != nullptr) {  // who gets how many rows is known on the GPU alone
    const bool has_many = m > 64 * num_experts;
    const Sm90Tiling tiling = {has_many ? 128 : 64, has_many ? 128 : 64, 1, false};
    return {m, tiling, tiling};
  }
  const Sm90Tiling tiling = choose(args, m, num_sms), tall = {256, 128, 2, false};
  const bool is_square = tiling.tile_m == 128 && tiling.tile_n == 128;
  const int num_tall =
      is_square && m > kTallM && can_be_tall(args) ? num_tall_rows(args, num_sms) : 0;
  if (num_tall == 0) return {m, paired(tiling, args.n), tiling};
  return {num_tall, paired(tall, args.n), paired(choose(args, m - num_tall, num_sms), args.n)};
}

cudaError_t launch_sm90_fp8_block(const Fp8BlockArgs& args, const Sm90Plan& plan, int num_sms,
                                  cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return cudaSuccess;
  Fp8BlockArgs part = args;
  part.m = plan.num_rows;
  const cudaError_t error = launch_tiling(part, plan.first, num_sms, stream);
  if (error != cudaSuccess || plan.num_rows == args.m) return error;
  part.m = args.m - plan.num_rows;
  part.x += plan.num_rows * args.ldx;
  part.x_scales += plan.num_rows * args.x_scales_ld;
  part.out = static_cast<uint16_t*>(args.out) + plan.num_rows * args.ldo;
  return launch_tiling(part, plan.rest, num_sms, stream);
}

}  // namespace vllm::gemm
