// Attention over a paged KV cache.
//
// Keys are cut into tiles of kKeyTile at fixed positions of their request. Each tile gives a row
// its own maximum, sum and weighted values, starting from nothing; the tiles of a row are then
// merged in ascending order. So a row's bits depend on its request's keys alone: not on the other
// rows, on how the prompt was chunked, or on which thread took which tile.
#include "attention_tile.h"
#include "parallel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

// A split tile's result: maxima and sums of kMaxSplitRows rows, then [kMaxSplitRows, padded_dim].
int64_t partial_size(int64_t padded_dim) { return kMaxSplitRows * (2 + padded_dim); }

TileWork make_work(const AttentionArgs& args) {
  TileWork work;
  work.args = &args;
  work.group = args.num_query_heads / args.cache.num_kv_heads;
  work.head_dim = args.cache.head_dim;
  work.padded_dim = (work.head_dim + kTileColumns - 1) / kTileColumns * kTileColumns;
  const int64_t per_row = work.head_dim + kKeyTile + 2 * work.padded_dim;
  const int64_t size = kPaddedRows * (per_row + 4) + kKeyTile * (work.head_dim + work.padded_dim);
  auto* memory = static_cast<float*>(thread_scratch(Scratch::kPrivate, size * sizeof(float)));
  const auto take = [&](int64_t count) {
    float* out = memory;
    memory += count;
    return out;
  };
  work.scores = take(kPaddedRows * kKeyTile);
  work.keys = take(kKeyTile * work.head_dim);
  work.values = take(kKeyTile * work.padded_dim);
  work.tile_out = take(kPaddedRows * work.padded_dim);
  work.out = take(kPaddedRows * work.padded_dim);
  work.tile_max = take(kPaddedRows);
  work.tile_sum = take(kPaddedRows);
  work.max = take(kPaddedRows);
  work.sum = take(kPaddedRows);
  work.packed_query = take(kPaddedRows * work.head_dim);
  return work;
}

// Points the work at one query tile and KV head; its query rows become float32 row tiles.
void load_query(TileWork& work, const QueryTile& query, int64_t kv_head) {
  const AttentionArgs& args = *work.args;
  work.query = &query;
  work.kv_head = kv_head;
  work.rows = RowTiles(query.num_tokens * work.group);
  const float factor = args.scale * args.cache.k_scale * pending_factor(args.cache.type);
  with_float_type(args.query.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    const auto* data = static_cast<const StorageOf<kType>*>(args.query.data);
    float* out = work.packed_query;
    for (int64_t t = 0; t < work.rows.num_tiles; ++t) {
      const int rows = work.rows.size(t);
      for (int r = 0; r < rows; ++r) {
        const int64_t row = work.rows.start(t) + r;
        const int64_t head = kv_head * work.group + row % work.group;
        const auto* source = data +
                             (query.first_token + row / work.group) * args.query.token_stride +
                             head * args.query.head_stride;
        for (int64_t d = 0; d < work.head_dim; d += kLanes) {
          const int64_t left = work.head_dim - d;
          const int count = left < kLanes ? static_cast<int>(left) : kLanes;
          float lanes[kLanes];
          store(lanes, mul(load_first<kType>(source + d, count), set1(factor)));
          for (int i = 0; i < count; ++i) out[(d + i) * rows + r] = lanes[i];
        }
      }
      out += rows * work.head_dim;
    }
  });
}

void begin_rows(const TileWork& work) {
  for (int64_t r = 0; r < work.rows.num_rows; ++r) {
    work.max[r] = kNegativeInfinity;
    work.sum[r] = 0.0f;
    for (int64_t d = 0; d < work.padded_dim; d += kLanes) {
      store(work.out + r * work.padded_dim + d, zero());
    }
  }
}

// (max, sum, out) <- (max, sum, out) merged with a tile's. A tile in which a row sees no key has
// maximum -inf, and leaves that row's bits as they are (factors 1 and 0).
void merge_tile(const TileWork& work, const float* tile_max, const float* tile_sum,
                const float* tile_out) {
  float keep[kLanes], take[kLanes];
  for (int64_t base = 0; base < work.rows.num_rows; base += kLanes) {
    const int64_t left = work.rows.num_rows - base;
    const int count = left < kLanes ? static_cast<int>(left) : kLanes;
    const F32x16 old_max = load_first<ElementType::kFloat32>(work.max + base, count);
    const F32x16 new_max = load_first<ElementType::kFloat32>(tile_max + base, count);
    const F32x16 merged = max(old_max, new_max);
    const F32x16 finite = select(less(merged, set1(-__FLT_MAX__)), zero(), merged);
    store(keep, exp(sub(old_max, finite)));
    store(take, exp(sub(new_max, finite)));
    const F32x16 old_sum =
        mul(load_first<ElementType::kFloat32>(work.sum + base, count), load(keep));
    const F32x16 new_sum = load_first<ElementType::kFloat32>(tile_sum + base, count);
    store_first<ElementType::kFloat32>(work.sum + base, fma(new_sum, load(take), old_sum), count);
    store_first<ElementType::kFloat32>(work.max + base, merged, count);
    for (int r = 0; r < count; ++r) {
      float* out = work.out + (base + r) * work.padded_dim;
      const float* in = tile_out + (base + r) * work.padded_dim;
      for (int64_t d = 0; d < work.head_dim; d += kLanes) {
        store(out + d, fma(load(in + d), set1(take[r]), mul(load(out + d), set1(keep[r]))));
      }
    }
  }
}

// What the sink of the row's head adds to the sum of weights.
float sink_weight(const TileWork& work, int64_t head, int64_t row) {
  if (work.args->sinks == nullptr) return 0.0f;
  float lanes[kLanes];
  store(lanes, exp(sub(set1(work.args->sinks[head]), set1(work.max[row]))));
  return lanes[0];
}

void store_rows(const TileWork& work) {
  const AttentionArgs& args = *work.args;
  const float factor = args.cache.v_scale * pending_factor(args.cache.type);
  with_float_type(args.out.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    auto* data = static_cast<StorageOf<kType>*>(args.out.data);
    for (int64_t row = 0; row < work.rows.num_rows; ++row) {
      const int64_t head = work.kv_head * work.group + row % work.group;
      auto* out = data + (work.query->first_token + row / work.group) * args.out.token_stride +
                  head * args.out.head_stride;
      const F32x16 scale = set1(factor / (work.sum[row] + sink_weight(work, head, row)));
      for (int64_t d = 0; d < work.head_dim; d += kLanes) {
        const F32x16 value = mul(load(work.out + row * work.padded_dim + d), scale);
        store_first<kType>(out + d, value, static_cast<int>(work.head_dim - d));
      }
    }
  });
}

float* partial_of(const TileWork& work, float* partials, const QueryTile& query, int64_t kv_head,
                  int64_t key_tile) {
  const int64_t num_tiles = query.key_tile_end - query.key_tile_begin;
  const int64_t index = query.partial + kv_head * num_tiles + key_tile - query.key_tile_begin;
  return partials + index * partial_size(work.padded_dim);
}

void run_unit(TileWork& work, const AttentionUnit& unit, float* partials) {
  const QueryTile& query = work.args->query_tiles[unit.query_tile];
  load_query(work, query, unit.kv_head);
  const bool is_split = query.partial >= 0;
  if (!is_split) begin_rows(work);
  for (int64_t tile = unit.key_tile_begin; tile < unit.key_tile_end; ++tile) {
    if (is_split) {
      float* partial = partial_of(work, partials, query, unit.kv_head, tile);
      work.tile_max = partial;
      work.tile_sum = partial + kMaxSplitRows;
      work.tile_out = partial + 2 * kMaxSplitRows;
    }
    attend_tile(work, tile * kKeyTile);
    if (!is_split) merge_tile(work, work.tile_max, work.tile_sum, work.tile_out);
  }
  if (!is_split) store_rows(work);
}

void merge_partials(TileWork& work, const QueryTile& query, int64_t kv_head, float* partials) {
  work.query = &query;
  work.kv_head = kv_head;
  work.rows = RowTiles(query.num_tokens * work.group);
  begin_rows(work);
  for (int64_t tile = query.key_tile_begin; tile < query.key_tile_end; ++tile) {
    const float* partial = partial_of(work, partials, query, kv_head, tile);
    merge_tile(work, partial, partial + kMaxSplitRows, partial + 2 * kMaxSplitRows);
  }
  store_rows(work);
}

}  // namespace

void attention(const AttentionArgs& args) {
  float* partials = nullptr;
  if (args.num_partials > 0) {
    const int64_t padded_dim =
        (args.cache.head_dim + kTileColumns - 1) / kTileColumns * kTileColumns;
    partials = static_cast<float*>(thread_scratch(
        Scratch::kShared, args.num_partials * partial_size(padded_dim) * sizeof(float)));
  }
  const int64_t num_merges =
      args.num_partials > 0 ? args.num_query_tiles * args.cache.num_kv_heads : 0;
  share_items(args.num_units, true, [&](int64_t i) {
    TileWork work = make_work(args);
    run_unit(work, args.units[i], partials);
  });
  share_items(num_merges, args.num_partials > 16, [&](int64_t i) {
    const QueryTile& query = args.query_tiles[i / args.cache.num_kv_heads];
    if (query.partial < 0) return;
    TileWork work = make_work(args);
    merge_partials(work, query, i % args.cache.num_kv_heads, partials);
  });
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
