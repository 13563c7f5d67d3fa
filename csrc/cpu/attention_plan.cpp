#include "attention_plan.h"

#include <algorithm>

namespace vllm::cpu {
namespace {

// Keys of short query tiles are shared between threads below this many units per thread.
constexpr int64_t kMinUnitsPerThread = 8;

void add_query_tiles(const AttentionArgs& args, int32_t request, int64_t tokens_per_tile,
                     std::vector<QueryTile>& tiles) {
  if (args.seq_lens[request] == 0) return;
  const int64_t begin = args.query_start[request], end = args.query_start[request + 1];
  const int64_t num_tokens = end - begin;
  const int64_t num_tiles = (num_tokens + tokens_per_tile - 1) / tokens_per_tile;
  const int64_t first_position = args.seq_lens[request] - num_tokens;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t from = num_tokens * i / num_tiles, to = num_tokens * (i + 1) / num_tiles;
    QueryTile tile;
    tile.request = request;
    tile.num_tokens = static_cast<int32_t>(to - from);
    tile.first_token = begin + from;
    tile.first_position = first_position + from;
    tile.key_tile_begin = first_visible_key(tile.first_position, args) / kKeyTile;
    tile.key_tile_end = (first_position + to - 1) / kKeyTile + 1;
    tile.partial = -1;
    tiles.push_back(tile);
  }
}

}  // namespace

void plan_attention(const AttentionArgs& args, int num_threads, AttentionPlan& plan) {
  const int64_t num_kv_heads = args.cache.num_kv_heads;
  const int64_t group = args.num_query_heads / num_kv_heads;
  const int64_t tokens_per_tile = std::max<int64_t>(1, kMaxQueryRows / group);
  plan.query_tiles.clear();
  plan.units.clear();
  plan.num_partials = 0;
  for (int32_t r = 0; r < args.num_requests; ++r) {
    add_query_tiles(args, r, tokens_per_tile, plan.query_tiles);
  }
  const int64_t num_whole_units = static_cast<int64_t>(plan.query_tiles.size()) * num_kv_heads;
  const bool may_split = num_threads > 1 && num_whole_units < kMinUnitsPerThread * num_threads;
  for (size_t i = 0; i < plan.query_tiles.size(); ++i) {
    QueryTile& tile = plan.query_tiles[i];
    const int64_t num_key_tiles = tile.key_tile_end - tile.key_tile_begin;
    const bool is_split =
        may_split && num_key_tiles > 1 && tile.num_tokens * group <= kMaxSplitRows;
    if (is_split) {
      tile.partial = plan.num_partials;
      plan.num_partials += num_key_tiles * num_kv_heads;
    }
    const int64_t step = is_split ? 1 : num_key_tiles;
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      for (int64_t t = tile.key_tile_begin; t < tile.key_tile_end; t += step) {
        plan.units.push_back({static_cast<int32_t>(i), head, t, t + step});
      }
    }
  }
  const auto cost = [&](const AttentionUnit& unit) {
    return (unit.key_tile_end - unit.key_tile_begin) * plan.query_tiles[unit.query_tile].num_tokens;
  };
  std::stable_sort(
      plan.units.begin(), plan.units.end(),
      [&](const AttentionUnit& a, const AttentionUnit& b) { return cost(a) > cost(b); });
}

}  // namespace vllm::cpu
