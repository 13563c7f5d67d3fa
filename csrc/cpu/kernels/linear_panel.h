// What the linear kernels share: constants, scales and results of a panel.
#pragma once
#include "micro_kernel.h"
#include "parallel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr int64_t kWidenPrefetch = 4096;  // bytes ahead: across the page ends that stop hardware
constexpr int64_t kDepth = 128;           // weight rows that are widened at a time
constexpr int64_t kTilesPerBlock = 384 / kMaxRows;
// Multiply-adds, and elements to pack, that waking other threads must be worth.
constexpr int64_t kSerialWork = 1 << 15;
constexpr int64_t kSerialElements = 1 << 14;

inline void store_row(const LinearArgs& args, int64_t row, int64_t panel, const F32x16& low,
                      const F32x16& high) {
  const int64_t column = panel * kPanelWidth;
  const int count = static_cast<int>(args.n - column);
  with_float_type(args.out.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    auto* out = static_cast<StorageOf<kType>*>(args.out.data) + row * args.out.stride + column;
    store_first<kType>(out, low, count);
    if (count > kLanes) store_first<kType>(out + kLanes, high, count - kLanes);
  });
}

inline int64_t num_blocks(const LinearArgs& args) {
  return (args.k + args.block_k - 1) / args.block_k;
}

// Where in a panel's storage row k lies; of codes a row that begins a quad.
template <ElementType kType>
int64_t weight_offset(const LinearArgs& args, int64_t k) {
  if constexpr (!is_code(kType)) return k * kPanelWidth;
  const int64_t quads_per_block = (args.block_k + kQuadRows - 1) / kQuadRows;
  const int64_t quads_of_rest = (k % args.block_k + kQuadRows - 1) / kQuadRows;
  return (k / args.block_k * quads_per_block + quads_of_rest) * kQuadBytes;
}

// Scales of `count` panels as float32 [count, num_k_blocks, 32], and their zero points.
struct PanelScales {
  const float* scales;
  const float* zeros;  // null where there are none
};
inline PanelScales panel_scales(const LinearArgs& args, int64_t panel, int count) {
  const int64_t size = num_blocks(args) * kPanelWidth;
  if (args.scale_type == ElementType::kFloat32 && !args.scale_factors && !args.zero_points) {
    return {static_cast<const float*>(args.scales) + panel * size, nullptr};
  }
  auto* scales =
      static_cast<float*>(thread_scratch(Scratch::kScales, 2 * count * size * sizeof(float)));
  float* zeros = args.zero_points ? scales + count * size : nullptr;
  with_any_type(args.scale_type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    const auto* stored = static_cast<const StorageOf<kType>*>(args.scales) + panel * size;
    for (int64_t i = 0; i < count * size; i += kLanes) {
      F32x16 scale = load_as<kType>(stored + i);
      if (args.scale_factors) {
        const int64_t column = (panel + i / size) * kPanelWidth + i % kPanelWidth;
        scale = mul(scale, load(args.scale_factors + column));
      }
      store(scales + i, scale);
    }
  });
  for (int64_t i = 0; zeros && i < count * size; ++i) zeros[i] = args.zero_points[panel * size + i];
  return {scales, zeros};
}

// Lays x out with pack(tile), then calls multiply(panel, first tile, end of tiles) for all of both.
template <typename Pack, typename Multiply>
void share_tiles(const LinearArgs& args, const RowTiles& tiles, int64_t num_panels,
                 const Pack& pack, const Multiply& multiply) {
  const int64_t num_row_blocks = (tiles.num_tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  share_items(tiles.num_tiles, args.m * args.k > kSerialElements, pack);
  share_items(num_row_blocks * num_panels, args.m * args.n * args.k > kSerialWork,
              [&](int64_t item) {
                const int64_t block = item / num_panels;
                multiply(item % num_panels, tiles.num_tiles * block / num_row_blocks,
                         tiles.num_tiles * (block + 1) / num_row_blocks);
              });
}

}  // namespace
}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
