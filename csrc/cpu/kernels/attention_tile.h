// One tile of kKeyTile keys against the rows of one query tile: scores, softmax, weighted values.
#pragma once
#include "micro_kernel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {

constexpr int kKeysAhead = 64;  // distance at which keys are prefetched
constexpr float kNegativeInfinity = -__builtin_inff();
constexpr int kPaddedRows = (kMaxQueryRows + kLanes - 1) / kLanes * kLanes;

// Rows are (token, head in group), token-major. All buffers belong to one thread.
struct TileWork {
  const AttentionArgs* args;
  const QueryTile* query;
  int64_t kv_head, group, head_dim, padded_dim;
  RowTiles rows{0};
  float* packed_query;  // row tiles of [head_dim, rows], scaled
  float* scores;        // [rows, kKeyTile]
  float* keys;          // [kKeyTile / kTileColumns, head_dim, kTileColumns]
  float* values;        // [padded_dim / kTileColumns, kKeyTile, kTileColumns]
  // The tile's result: softmax maxima and sums per row, and sums of p * v, [rows, padded_dim].
  float* tile_max;
  float* tile_sum;
  float* tile_out;
  // The result over all tiles so far.
  float* max;
  float* sum;
  float* out;
};

struct KeyRange {
  int begin, end;  // within a key tile; empty where end <= begin
};

// Keys of the tile starting at `first_key` that rows [row_begin, row_end) see between them.
SIMD_INLINE KeyRange visible_keys(const TileWork& work, int64_t first_key, int64_t row_begin,
                                  int64_t row_end) {
  const int64_t first = work.query->first_position + row_begin / work.group;
  const int64_t last = work.query->first_position + (row_end - 1) / work.group;
  const int64_t begin = first_visible_key(first, *work.args) - first_key;
  const int64_t end = last + 1 - first_key;
  return {static_cast<int>(begin < 0 ? 0 : begin),
          static_cast<int>(end > kKeyTile ? kKeyTile : end)};
}

// Block and offset of a key of this request.
struct KeyPlace {
  int64_t block, offset;
};
SIMD_INLINE KeyPlace place_of(const TileWork& work, int64_t key) {
  const AttentionArgs& args = *work.args;
  const int64_t index = key / args.cache.block_size;
  const int32_t* table = args.block_tables + work.query->request * args.block_table_stride;
  return {table[index], key - index * args.cache.block_size};
}
template <ElementType kType>
SIMD_INLINE const StorageOf<kType>* key_at(const TileWork& work, KeyPlace place) {
  const KvCache& cache = work.args->cache;
  const int64_t head = place.block * cache.num_kv_heads + work.kv_head;
  return static_cast<const StorageOf<kType>*>(cache.key) +
         head * cache.head_dim * cache.block_size + place.offset;
}
template <ElementType kType>
SIMD_INLINE const StorageOf<kType>* value_at(const TileWork& work, KeyPlace place) {
  const KvCache& cache = work.args->cache;
  const int64_t head = place.block * cache.num_kv_heads + work.kv_head;
  return static_cast<const StorageOf<kType>*>(cache.value) +
         (head * cache.block_size + place.offset) * cache.head_dim;
}

// Softmax numerators of one row in place of its scores over `range`: e^(score - max) where the
// row sees the key, exactly 0 elsewhere. A stale key's score may be NaN: it is replaced, never
// multiplied.
inline void softmax_row(float* scores, KeyRange range, KeyRange seen, float softcap, float* max,
                        float* sum) {
  const int begin = range.begin / kLanes * kLanes;
  F32x16 largest = set1(kNegativeInfinity);
  for (int k = begin; k < range.end; k += kLanes) {
    if (k + kLanes <= seen.begin || k >= seen.end) {
      store(scores + k, set1(kNegativeInfinity));
      continue;
    }
    F32x16 score = load(scores + k);
    if (softcap > 0.0f) {
      score = soft_cap(score, softcap);
      store(scores + k, score);
    }
    if (k < seen.begin || k + kLanes > seen.end) {
      score = keep_lanes(score, seen.begin - k, seen.end - k, kNegativeInfinity);
      store(scores + k, score);
    }
    largest = vllm::cpu::VLLM_CPU_ISA_NAMESPACE::max(score, largest);
  }
  *max = reduce_max(largest);
  const F32x16 subtract = set1(seen.end > seen.begin ? *max : 0.0f);
  F32x16 total = zero();
  for (int k = begin; k < range.end; k += kLanes) {
    const F32x16 p = exp(sub(load(scores + k), subtract));
    store(scores + k, p);
    total = add(total, p);
  }
  *sum = reduce_add(total);
}

SIMD_INLINE void softmax_rows(const TileWork& work, int64_t first_key, int64_t row_begin,
                              int64_t row_end, KeyRange range) {
  for (int64_t r = row_begin; r < row_end; ++r) {
    softmax_row(work.scores + r * kKeyTile, range, visible_keys(work, first_key, r, r + 1),
                work.args->softcap, work.tile_max + r, work.tile_sum + r);
  }
}

SIMD_INLINE void clear_rows(const TileWork& work, int64_t row_begin, int64_t row_end) {
  for (int64_t r = row_begin; r < row_end; ++r) {
    work.tile_max[r] = kNegativeInfinity;
    work.tile_sum[r] = 0.0f;
    for (int64_t d = 0; d < work.padded_dim; d += kLanes) {
      store(work.tile_out + r * work.padded_dim + d, zero());
    }
  }
}

// Blocks lie anywhere, so hardware prefetchers stop at each block's end. Asks for sixteen keys'
// share of a block of the key or value cache before it is due.
template <ElementType kType>
SIMD_INLINE void prefetch_share(const TileWork& work, const void* cache, KeyPlace place) {
  const KvCache& kv = work.args->cache;
  const int64_t row = (place.block * kv.num_kv_heads + work.kv_head) * kv.block_size + place.offset;
  const auto* share = static_cast<const StorageOf<kType>*>(cache) + row * kv.head_dim;
  for (int64_t i = 0; i < kLanes * kv.head_dim; i += 64 / int{sizeof(*share)}) {
    __builtin_prefetch(share + i);
  }
}

// Few rows: keys and values are widened in registers, straight from the cache.
// Requires head_dim % 16 == 0 and a single row tile.
template <ElementType kType, int kRows>
void attend_in_registers(const TileWork& work, int64_t first_key) {
  // Vectors per row, so that independent chains cover the latency of an FMA.
  constexpr int kWide = kRows * kRegs <= 6 ? 2 : 1;
  const KvCache& cache = work.args->cache;
  const KeyRange range = visible_keys(work, first_key, 0, kRows);
  if (range.end <= range.begin) return clear_rows(work, 0, kRows);
  const int64_t last_key = work.query->first_position + work.query->num_tokens - 1;
  for (int k = range.begin / kLanes * kLanes; k < range.end; k += kWide * kLanes) {
    const StorageOf<kType>* key[kWide];
    for (int w = 0; w < kWide; ++w) {
      // Past the last key the first vector is read again: its scores are replaced below.
      const int at = k + w * kLanes < range.end ? k + w * kLanes : k;
      const KeyPlace place = place_of(work, first_key + at);
      key[w] = key_at<kType>(work, place);
      prefetch_share<kType>(work, cache.value, place);
      const int64_t ahead = first_key + at + kKeysAhead;
      if (ahead <= last_key) prefetch_share<kType>(work, cache.key, place_of(work, ahead));
    }
    F32x16 acc[kRows][kWide];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int w = 0; w < kWide; ++w) acc[r][w] = zero();
    }
    for (int64_t d = 0; d < work.head_dim; ++d) {
      multiply_add_step<kType>(work.packed_query + d * kRows, 1, key, acc);
#pragma GCC unroll 2
      for (int w = 0; w < kWide; ++w) key[w] += cache.block_size;
    }
    for (int r = 0; r < kRows; ++r) {
      for (int w = 0; w < kWide && k + w * kLanes < kKeyTile; ++w) {
        store(work.scores + r * kKeyTile + k + w * kLanes, acc[r][w]);
      }
    }
  }
  softmax_rows(work, first_key, 0, kRows, range);
  for (int64_t d = 0; d < work.head_dim; d += kWide * kLanes) {
    F32x16 acc[kRows][kWide];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int w = 0; w < kWide; ++w) acc[r][w] = zero();
    }
    const bool is_whole = d + kWide * kLanes <= work.head_dim;
    for (int k = range.begin, end; k < range.end; k = end) {
      const KeyPlace place = place_of(work, first_key + k);
      const int64_t left = cache.block_size - place.offset;
      end = range.end - k < left ? range.end : k + static_cast<int>(left);
      const auto* value = value_at<kType>(work, place) + d;
      const float* p = work.scores + k;
      if (is_whole) {
        multiply_add<kType, kRows, kWide>(p, kKeyTile, 1, value, work.head_dim, end - k, acc);
      } else {
        F32x16 first[kRows][1];
        for (int r = 0; r < kRows; ++r) first[r][0] = acc[r][0];
        multiply_add<kType, kRows, 1>(p, kKeyTile, 1, value, work.head_dim, end - k, first);
        for (int r = 0; r < kRows; ++r) acc[r][0] = first[r][0];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int w = 0; w < (is_whole ? kWide : 1); ++w) {
        store(work.tile_out + r * work.padded_dim + d + w * kLanes, acc[r][w]);
      }
    }
  }
}

// Keys [range) of the tile as float32; lanes past the last vector of keys are zero.
template <ElementType kType>
void widen_keys(const TileWork& work, int64_t first_key, KeyRange range) {
  const int64_t stride = work.args->cache.block_size;
  const int end = (range.end + kTileColumns - 1) / kTileColumns * kTileColumns;
  for (int k = range.begin / kTileColumns * kTileColumns; k < end; k += kLanes) {
    float* out = work.keys + k / kTileColumns * work.head_dim * kTileColumns + k % kTileColumns;
    if (k + kLanes <= range.begin || k >= range.end) {
      for (int64_t d = 0; d < work.head_dim; ++d) store(out + d * kTileColumns, zero());
      continue;
    }
    const auto* key = key_at<kType>(work, place_of(work, first_key + k));
    for (int64_t d = 0; d < work.head_dim; ++d) {
      store(out + d * kTileColumns, load_as<kType>(key + d * stride));
    }
  }
}

// Values of keys [range) as float32, zero in [head_dim, padded_dim). Other keys are not read.
template <ElementType kType>
void widen_values(const TileWork& work, int64_t first_key, KeyRange range) {
  for (int k = range.begin; k < range.end; ++k) {
    const auto* value = value_at<kType>(work, place_of(work, first_key + k));
    for (int64_t d = 0; d < work.padded_dim; d += kLanes) {
      float* out =
          work.values + (d / kTileColumns * kKeyTile + k) * kTileColumns + d % kTileColumns;
      const int64_t left = work.head_dim - d;
      store(out, left > 0 ? load_first<kType>(value + d, static_cast<int>(left)) : zero());
    }
  }
}

template <int kRows>
void score_rows(const TileWork& work, int64_t row, KeyRange range) {
  const float* query = work.packed_query + row * work.head_dim;
  for (int k = range.begin / kTileColumns * kTileColumns; k < range.end; k += kTileColumns) {
    F32x16 acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
    }
    multiply_add<ElementType::kFloat32, kRows, kVectors>(
        query, 1, kRows, work.keys + k * work.head_dim, kTileColumns, work.head_dim, acc);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(work.scores + (row + r) * kKeyTile + k + v * kLanes, acc[r][v]);
      }
    }
  }
}

template <int kRows>
void weigh_values(const TileWork& work, int64_t row, int64_t column, KeyRange range) {
  F32x16 acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
  }
  multiply_add<ElementType::kFloat32, kRows, kVectors>(
      work.scores + row * kKeyTile + range.begin, kKeyTile, 1,
      work.values + column * kKeyTile + range.begin * kTileColumns, kTileColumns,
      range.end - range.begin, acc);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store(work.tile_out + (row + r) * work.padded_dim + column + v * kLanes, acc[r][v]);
    }
  }
}

// Many rows: the tile's keys and values are widened once, then multiplied by row tiles.
template <ElementType kType>
void attend_widened(const TileWork& work, int64_t first_key) {
  const int64_t num_rows = work.rows.num_rows;
  const KeyRange all = visible_keys(work, first_key, 0, num_rows);
  if (all.end <= all.begin) return clear_rows(work, 0, num_rows);
  widen_keys<kType>(work, first_key, all);
  for (int64_t t = 0; t < work.rows.num_tiles; ++t) {
    const int64_t row = work.rows.start(t), end = work.rows.start(t + 1);
    const KeyRange range = visible_keys(work, first_key, row, end);
    if (range.end <= range.begin) {
      clear_rows(work, row, end);
      continue;
    }
    with_row_count<kMaxRows>(
        work.rows.size(t), [&](auto rows) { score_rows<decltype(rows)::value>(work, row, range); });
    softmax_rows(work, first_key, row, end, range);
  }
  widen_values<kType>(work, first_key, all);
  for (int64_t column = 0; column < work.padded_dim; column += kTileColumns) {
    for (int64_t t = 0; t < work.rows.num_tiles; ++t) {
      const int64_t row = work.rows.start(t), end = work.rows.start(t + 1);
      const KeyRange range = visible_keys(work, first_key, row, end);
      if (range.end <= range.begin) continue;
      with_row_count<kMaxRows>(work.rows.size(t), [&](auto rows) {
        weigh_values<decltype(rows)::value>(work, row, column, range);
      });
    }
  }
}

inline void attend_tile(const TileWork& work, int64_t first_key) {
  with_any_type(work.args->cache.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    if (work.rows.num_tiles == 1 && work.head_dim % kLanes == 0) {
      with_row_count<kMaxRows>(work.rows.size(0), [&](auto rows) {
        attend_in_registers<kType, decltype(rows)::value>(work, first_key);
      });
    } else {
      attend_widened<kType>(work, first_key);
    }
  });
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
