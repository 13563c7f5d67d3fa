// The linear layer of bfloat16 activations, for many rows: widens weights once to pairs of bfloat16
// in L1, which is exact for all weights but float16 and float32, and multiplies pairs.
#pragma once
#include "bf16_pairs.h"
#include "linear_panel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr bool fits_bfloat16(ElementType type) {
  return type != ElementType::kFloat16 && type != ElementType::kFloat32;
}
inline bool is_of_pairs(const LinearArgs& args) {
  return args.x.type == ElementType::kBFloat16 && fits_bfloat16(args.weight_type);
}

// Pairs that `rows` of one scale block take: of codes those of whole quads.
inline int64_t pairs_of(const LinearArgs& args, int64_t rows) {
  return is_code(args.weight_type) ? (rows + kQuadRows - 1) / kQuadRows * (kQuadRows / 2)
                                   : (rows + 1) / 2;
}
// Pairs before row k, which begins a scale block or lies a multiple of kDepth into one.
inline int64_t pair_offset(const LinearArgs& args, int64_t k) {
  return k / args.block_k * pairs_of(args, args.block_k) + pairs_of(args, k % args.block_k);
}

// x as pairs in tiles: tile t is [pairs, size(t)] at offset start(t) * pairs.
struct PairedRows {
  unsigned* pairs;
  int* granularity;  // of each tile
  int64_t pairs_per_row;

  PairedRows(const LinearArgs& args, const RowTiles& tiles)
      : pairs_per_row(pair_offset(args, args.k)) {
    const int64_t size = args.m * pairs_per_row;
    pairs = static_cast<unsigned*>(
        thread_scratch(Scratch::kShared, (size + tiles.num_tiles) * sizeof(unsigned)));
    granularity = reinterpret_cast<int*>(pairs + size);
  }
};

template <int kRows>
int pair_rows(const LinearArgs& args, const unsigned short* x, unsigned* out) {
  constexpr int kStep = 2 * kLanes;
  unsigned block[kRows][kLanes];
  SmallestValue smallest;
  for (int64_t start = 0; start < args.k; start += args.block_k) {
    const int64_t end = start + args.block_k < args.k ? start + args.block_k : args.k;
    for (int64_t k = start; k < end; k += kStep) {
      const int64_t count = end - k < kStep ? end - k : kStep;
      const __mmask32 present = ~0u >> (kStep - count);
      for (int r = 0; r < kRows; ++r) {
        const __m512i values = _mm512_maskz_loadu_epi16(present, x + r * args.x.stride + k);
        smallest.include(values);
        _mm512_storeu_si512(block[r], _mm512_rol_epi32(values, 16));
      }
      const int num_pairs = static_cast<int>(pairs_of(args, count));
      for (int i = 0; i < num_pairs; ++i) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) out[r] = block[r][i];
        out += kRows;
      }
    }
  }
  return smallest.granularity();
}

inline void pair_tile(const LinearArgs& args, const RowTiles& tiles, int64_t tile,
                      const PairedRows& paired) {
  const int64_t first = tiles.start(tile);
  const auto* x = static_cast<const unsigned short*>(args.x.data) + first * args.x.stride;
  with_row_count<kMaxRows>(tiles.size(tile), [&](auto rows) {
    paired.granularity[tile] =
        pair_rows<decltype(rows)::value>(args, x, paired.pairs + first * paired.pairs_per_row);
  });
}

// Weight rows that are widened together: some whole scale blocks, or a piece of a longer one.
struct Chunk {
  int64_t begin, depth, num_blocks;  // depth: rows of each block
  bool begins_block, ends_block;

  Chunk(const LinearArgs& args, int64_t first) : begin(first), num_blocks(1) {
    const int64_t rest = args.block_k - first % args.block_k;
    depth = rest < args.k - first ? rest : args.k - first;
    begins_block = first % args.block_k == 0;
    ends_block = depth <= kDepth;
    if (!ends_block) depth = kDepth;
    if (depth == args.block_k) {
      num_blocks =
          kDepth / depth < (args.k - first) / depth ? kDepth / depth : (args.k - first) / depth;
    }
  }
  int64_t end() const { return begin + depth * num_blocks; }
};

// A chunk of one row tile and panel.
struct PairStep {
  const unsigned* x;
  const unsigned* weight;
  const float* scale;
  float* total;    // [rows, 32]
  float* partial;  // [rows, 32]: the chain of a scale block longer than a chunk
  int64_t num_pairs, num_blocks;
  bool begins_block, ends_block;
};

// sums[r][v] += the product of rows [kFirst, kFirst + kCount) of a tile of kRows.
template <int kRows, int kFirst, int kCount, bool kHasDenormals>
SIMD_INLINE void add_pair_products(const unsigned* x, const unsigned* weight, int64_t num_pairs,
                                   __m512 (&sums)[kCount][kVectors]) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const __m512i right[] = {_mm512_loadu_si512(weight), _mm512_loadu_si512(weight + kLanes)};
#pragma GCC unroll 16
    for (int r = 0; r < kCount; ++r) {
      const __m512i left = _mm512_set1_epi32(static_cast<int>(x[kFirst + r]));
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = add_pair_product<kHasDenormals>(sums[r][v], left, right[v]);
      }
    }
    x += kRows;
    weight += kPanelWidth;
  }
}

template <int kCount>
SIMD_INLINE void load_rows(const float* from, __m512 (&rows)[kCount][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      rows[r][v] =
          from ? _mm512_loadu_ps(from + r * kPanelWidth + v * kLanes) : _mm512_setzero_ps();
    }
  }
}
template <int kCount>
SIMD_INLINE void store_rows(float* to, const __m512 (&rows)[kCount][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(to + r * kPanelWidth + v * kLanes, rows[r][v]);
    }
  }
}
template <int kCount>
SIMD_INLINE void add_scaled(const float* scales, const __m512 (&sums)[kCount][kVectors],
                            __m512 (&totals)[kCount][kVectors]) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const __m512 scale = _mm512_loadu_ps(scales + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kCount; ++r)
      totals[r][v] = _mm512_fmadd_ps(sums[r][v], scale, totals[r][v]);
  }
}

// One block or a piece of one, whose sums fill the registers.
template <int kRows, bool kHasDenormals>
void run_block(const PairStep& step) {
  __m512 sums[kRows][kVectors];
  load_rows(step.begins_block ? nullptr : step.partial, sums);
  add_pair_products<kRows, 0, kRows, kHasDenormals>(step.x, step.weight, step.num_pairs, sums);
  if (!step.ends_block) return store_rows(step.partial, sums);
  __m512 totals[kRows][kVectors];
  load_rows(step.total, totals);
  add_scaled(step.scale, sums, totals);
  store_rows(step.total, totals);
}

// Several short blocks: half of the rows at a time, so that their totals stay in registers too.
template <int kRows, int kFirst, int kCount, bool kHasDenormals>
void run_short_blocks(const PairStep& step) {
  __m512 totals[kCount][kVectors];
  load_rows(step.total + kFirst * kPanelWidth, totals);
  for (int64_t block = 0; block < step.num_blocks; ++block) {
    const int64_t pair = block * step.num_pairs;
    __m512 sums[kCount][kVectors];
    load_rows(nullptr, sums);
    add_pair_products<kRows, kFirst, kCount, kHasDenormals>(
        step.x + pair * kRows, step.weight + pair * kPanelWidth, step.num_pairs, sums);
    add_scaled(step.scale + block * kPanelWidth, sums, totals);
  }
  store_rows(step.total + kFirst * kPanelWidth, totals);
}

template <int kRows, bool kHasDenormals>
void run_pairs(const PairStep& step) {
  constexpr int kHalf = kRows / 2;
  if (step.num_blocks == 1) return run_block<kRows, kHasDenormals>(step);
  run_short_blocks<kRows, 0, kRows - kHalf, kHasDenormals>(step);
  if constexpr (kHalf > 0) {
    run_short_blocks<kRows, kRows - kHalf, kHalf, kHasDenormals>(step);
  }
}

inline void run_pair_tile(int rows, bool has_denormals, const PairStep& step) {
  with_row_count<kMaxRows>(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::value;
    if (has_denormals) return run_pairs<kRows, true>(step);
    run_pairs<kRows, false>(step);
  });
}

// Returns the granularity of the widened values.
inline int widen_chunk(const LinearArgs& args, int64_t panel, const Chunk& chunk,
                       const float* zeros, unsigned* widened) {
  int found = 0;
  with_weight_type(args.weight_type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    if constexpr (fits_bfloat16(kType)) {
      const auto* weight = static_cast<const StorageOf<kType>*>(args.weight) +
                           panel * weight_offset<kType>(args, args.k);
      for (int64_t block = 0; block < chunk.num_blocks; ++block) {
        const int64_t k = chunk.begin + block * chunk.depth;
        const int one =
            widen_pairs<kType>(weight + weight_offset<kType>(args, k), chunk.depth,
                               zeros ? zeros + block * kPanelWidth : nullptr,
                               widened + block * pairs_of(args, chunk.depth) * kPanelWidth);
        found = one < found ? one : found;
      }
    }
  });
  return found;
}

// One panel of weights against the row tiles [tile_begin, tile_end).
inline void multiply_paired_panel(const LinearArgs& args, const RowTiles& tiles,
                                  const PairedRows& paired, int64_t panel, int64_t tile_begin,
                                  int64_t tile_end) {
  // Blocks of one row take a pair, or with codes a quad, each.
  constexpr int64_t kWidened = kDepth * (kQuadRows / 2) * kPanelWidth;
  const int64_t first_row = tiles.start(tile_begin);
  const int64_t num_rows = tiles.start(tile_end) - first_row;
  const PanelScales stored = panel_scales(args, panel, 1);
  auto* total = static_cast<float*>(
      thread_scratch(Scratch::kPrivate, (kWidened + 2 * num_rows * kPanelWidth) * sizeof(float)));
  float* partial = total + num_rows * kPanelWidth;
  auto* widened = reinterpret_cast<unsigned*>(partial + num_rows * kPanelWidth);
  const F32x16 bias_low = load(args.bias + panel * kPanelWidth);
  const F32x16 bias_high = load(args.bias + panel * kPanelWidth + kLanes);
  for (int64_t r = 0; r < num_rows; ++r) {
    store(total + r * kPanelWidth, bias_low);
    store(total + r * kPanelWidth + kLanes, bias_high);
  }
  for (int64_t begin = 0; begin < args.k;) {
    const Chunk chunk(args, begin);
    const int64_t scale = begin / args.block_k * kPanelWidth;
    const float* zeros = stored.zeros ? stored.zeros + scale : nullptr;
    const int granularity = widen_chunk(args, panel, chunk, zeros, widened);
    const int64_t offset = pair_offset(args, begin);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int rows = tiles.size(tile);
      const int64_t row = tiles.start(tile), own_row = row - first_row;
      const PairStep step{paired.pairs + row * paired.pairs_per_row + offset * rows,
                          widened,
                          stored.scales + scale,
                          total + own_row * kPanelWidth,
                          partial + own_row * kPanelWidth,
                          pairs_of(args, chunk.depth),
                          chunk.num_blocks,
                          chunk.begins_block,
                          chunk.ends_block};
      run_pair_tile(rows, paired.granularity[tile] + granularity < kSmallestNormal, step);
    }
    begin = chunk.end();
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    store_row(args, first_row + r, panel, load(total + r * kPanelWidth),
              load(total + r * kPanelWidth + kLanes));
  }
}

inline void paired_linear(const LinearArgs& args, int64_t num_panels) {
  const RowTiles tiles(args.m);
  const PairedRows paired(args, tiles);
  share_tiles(
      args, tiles, num_panels, [&](int64_t tile) { pair_tile(args, tiles, tile, paired); },
      [&](int64_t panel, int64_t begin, int64_t end) {
        multiply_paired_panel(args, tiles, paired, panel, begin, end);
      });
}

}  // namespace
}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
