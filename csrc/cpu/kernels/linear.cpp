// out[m, n] = sum_b scale[n, b] * (sum_{k in block b} x[m, k] * q[n, k]) + bias[n], in float32.
// Each inner sum is one fused multiply-add chain over ascending k; the outer sum starts from the
// bias and is one chain over ascending blocks. Every path below performs exactly these operations,
// so a row's result does not depend on m, on the other rows, or on the number of threads.
#include "linear_panel.h"
#if defined(VLLM_CPU_AVX512_BF16)
#include "linear_pairs.h"
#endif

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

// Up to this many rows, weights are widened in registers; above, once into a buffer in L1.
#if defined(VLLM_CPU_AVX512)
constexpr int kStreamRows = 8;
#else
constexpr int kStreamRows = 2;
#endif
// Far enough ahead to cover memory latency, and across the page ends that stop hardware prefetch.
constexpr int64_t kPrefetchBytes = 2048;

// x as float32 in tiles: tile t is [k, size(t)] at offset start(t) * k.
template <ElementType kType, int kRows>
void pack_rows(const LinearArgs& args, const StorageOf<kType>* x, float* out) {
  float block[kRows][kLanes];
  for (int64_t k = 0; k < args.k; k += kLanes) {
    const int count = static_cast<int>(args.k - k < kLanes ? args.k - k : kLanes);
    for (int r = 0; r < kRows; ++r) {
      store(block[r], load_first<kType>(x + r * args.x.stride + k, count));
    }
    for (int i = 0; i < count; ++i) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) out[r] = block[r][i];
      out += kRows;
    }
  }
}

void pack_tile(const LinearArgs& args, const RowTiles& tiles, int64_t tile, float* packed) {
  const int64_t first = tiles.start(tile);
  with_float_type(args.x.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::value;
    const auto* x = static_cast<const StorageOf<kType>*>(args.x.data) + first * args.x.stride;
    with_row_count<kMaxRows>(tiles.size(tile), [&](auto rows) {
      pack_rows<kType, decltype(rows)::value>(args, x, packed + first * args.k);
    });
  });
}

// Rows 2 kPair and 2 kPair + 1 of a quad, those of them below `depth`.
template <ElementType kType, int kPair, int kRows>
SIMD_INLINE void add_code_rows(const unsigned char* quad, const float* a, const F32x16 (&zero)[2],
                               int64_t depth, F32x16 (&sum)[kRows][2]) {
#pragma GCC unroll 4
  for (int i = 0; i < kRegs; ++i) {
    FloatReg weight[2][2];
    convert_codes<kType, kPair>(quad, i, weight);
#pragma GCC unroll 2
    for (int row = 2 * kPair; row < 2 * kPair + 2; ++row) {
      if (row >= depth) break;
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        FloatReg right = weight[row % 2][v];
        if constexpr (kType == ElementType::kUint4) right = reg_sub(right, zero[v].r[i]);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          sum[r][v].r[i] = reg_fma(reg_set1(a[row * kRows + r]), right, sum[r][v].r[i]);
        }
      }
    }
  }
}

// Adds `depth` weight rows of one scale block, of panels that lie panel_size apart; a: [depth,
// kRows]. Returns where the next block begins.
template <ElementType kType, int kRows, int kPanels>
SIMD_INLINE const StorageOf<kType>* add_block(const StorageOf<kType>* weight, int64_t panel_size,
                                              const float* a, int64_t depth,
                                              const F32x16 (&zero_point)[kPanels][2],
                                              F32x16 (&sum)[kPanels][kRows][2]) {
  if constexpr (is_code(kType)) {
    const auto add_quad = [&](int64_t k, int64_t num_rows) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        const auto* quad = weight + p * panel_size;
        __builtin_prefetch(quad + kPrefetchBytes);
        add_code_rows<kType, 0>(quad, a + k * kRows, zero_point[p], num_rows, sum[p]);
        add_code_rows<kType, 1>(quad, a + k * kRows, zero_point[p], num_rows, sum[p]);
      }
      weight += kQuadBytes;
    };
    int64_t k = 0;
    for (; k + kQuadRows <= depth; k += kQuadRows) add_quad(k, kQuadRows);
    if (k < depth) add_quad(k, depth - k);
  } else {
    for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        F32x16 low, high;
        const auto* row = weight + p * panel_size;
        __builtin_prefetch(row + kPrefetchBytes / sizeof(*row));
        load_panel_row<kType>(row, low, high);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const F32x16 left = set1(a[k * kRows + r]);
          sum[p][r][0] = fma(left, low, sum[p][r][0]);
          sum[p][r][1] = fma(left, high, sum[p][r][1]);
        }
      }
      weight += kPanelWidth;
    }
  }
  return weight;
}

// The panels [panel, panel + kPanels) against all rows. One row alone takes two panels: the chains
// of one are too few to hide the latency of a multiply-add.
template <ElementType kType, int kRows, int kPanels>
void stream_panels(const LinearArgs& args, const float* a, int64_t panel) {
  const int64_t panel_size = weight_offset<kType>(args, args.k);
  const int64_t scales_size = num_blocks(args) * kPanelWidth;
  const auto* weight = static_cast<const StorageOf<kType>*>(args.weight) + panel * panel_size;
  const PanelScales stored = panel_scales(args, panel, kPanels);
  F32x16 total[kPanels][kRows][2];
  for (int p = 0; p < kPanels; ++p) {
    for (int v = 0; v < 2; ++v) {
      const F32x16 bias = load(args.bias + (panel + p) * kPanelWidth + v * kLanes);
      for (int r = 0; r < kRows; ++r) total[p][r][v] = bias;
    }
  }
  int64_t scale = 0;
  for (int64_t start = 0; start < args.k; start += args.block_k) {
    const int64_t end = start + args.block_k < args.k ? start + args.block_k : args.k;
    F32x16 sum[kPanels][kRows][2];
    F32x16 zero_point[kPanels][2];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sum[p][r][0] = sum[p][r][1] = zero();
      if constexpr (kType == ElementType::kUint4) {
        const float* zeros = stored.zeros + p * scales_size + scale;
        for (int v = 0; v < 2; ++v) zero_point[p][v] = load(zeros + v * kLanes);
      }
    }
    weight = add_block<kType>(weight, panel_size, a + start * kRows, end - start, zero_point, sum);
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const F32x16 factor = load(stored.scales + p * scales_size + scale + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          total[p][r][v] = fma(sum[p][r][v], factor, total[p][r][v]);
        }
      }
    }
    scale += kPanelWidth;
  }
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) store_row(args, r, panel + p, total[p][r][0], total[p][r][1]);
  }
}

// Weight rows [begin, end) of one panel, all in one scale block, as float32 [end - begin, 32]; of
// codes up to three rows more are written.
template <ElementType kType>
void widen_panel(const LinearArgs& args, int64_t panel, int64_t begin, int64_t end,
                 const float* zeros, float* widened) {
  const auto* row = static_cast<const StorageOf<kType>*>(args.weight) +
                    panel * weight_offset<kType>(args, args.k) + weight_offset<kType>(args, begin);
  if constexpr (is_code(kType)) {
    F32x16 zero_point[2];
    if constexpr (kType == ElementType::kUint4) {
      for (int v = 0; v < 2; ++v) zero_point[v] = load(zeros + v * kLanes);
    }
    const auto store_rows = [&](FloatReg(&weight)[2][2], int i, float* target) {
      for (int cell = 0; cell < 4; ++cell) {
        FloatReg value = weight[cell / 2][cell % 2];
        if constexpr (kType == ElementType::kUint4) {
          value = reg_sub(value, zero_point[cell % 2].r[i]);
        }
        reg_store(target + cell * kLanes + i * kRegLanes, value);
      }
    };
    for (int64_t k = begin; k < end; k += kQuadRows) {
      __builtin_prefetch(row + kWidenPrefetch);
#pragma GCC unroll 4
      for (int i = 0; i < kRegs; ++i) {
        FloatReg weight[2][2];
        convert_codes<kType, 0>(row, i, weight);
        store_rows(weight, i, widened);
        convert_codes<kType, 1>(row, i, weight);
        store_rows(weight, i, widened + 2 * kPanelWidth);
      }
      row += kQuadBytes;
      widened += kQuadRows * kPanelWidth;
    }
  } else {
    for (int64_t k = begin; k < end; ++k) {
      F32x16 low, high;
      __builtin_prefetch(row + kWidenPrefetch);
      load_panel_row<kType>(row, low, high);
      store(widened, low);
      store(widened + kLanes, high);
      row += kPanelWidth;
      widened += kPanelWidth;
    }
  }
}

// One step of the chain: a piece of a scale block of one row tile and panel.
struct TileStep {
  const float* a;
  const float* b;
  const float* scale;
  float* total;    // [rows, 32]
  float* partial;  // [rows, 32]: the chain of a scale block longer than kDepth
  int64_t depth;
  bool begins_block, ends_block;
};

template <int kRows>
void run_tile(const TileStep& step) {
  F32x16 acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
  }
  if (!step.begins_block) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = load(step.partial + r * kPanelWidth + v * kLanes);
      }
    }
  }
  multiply_add<ElementType::kFloat32, kRows, kVectors>(step.a, 1, kRows, step.b, kTileColumns,
                                                       step.depth, acc);
  if (!step.ends_block) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(step.partial + r * kPanelWidth + v * kLanes, acc[r][v]);
      }
    }
    return;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 factor = load(step.scale + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* total = step.total + r * kPanelWidth + v * kLanes;
      store(total, fma(acc[r][v], factor, load(total)));
    }
  }
}

// One panel of weights against the row tiles [tile_begin, tile_end).
void multiply_panel(const LinearArgs& args, const RowTiles& tiles, const float* packed,
                    int64_t panel, int64_t tile_begin, int64_t tile_end) {
  const int64_t first_row = tiles.start(tile_begin);
  const int64_t num_rows = tiles.start(tile_end) - first_row;
  const PanelScales stored = panel_scales(args, panel, 1);
  auto* widened = static_cast<float*>(
      thread_scratch(Scratch::kPrivate, (kDepth + 2 * num_rows) * kPanelWidth * sizeof(float)));
  float* total = widened + kDepth * kPanelWidth;
  float* partial = total + num_rows * kPanelWidth;
  const F32x16 bias_low = load(args.bias + panel * kPanelWidth);
  const F32x16 bias_high = load(args.bias + panel * kPanelWidth + kLanes);
  for (int64_t r = 0; r < num_rows; ++r) {
    store(total + r * kPanelWidth, bias_low);
    store(total + r * kPanelWidth + kLanes, bias_high);
  }
  for (int64_t begin = 0, end; begin < args.k; begin = end) {
    const int64_t block = begin / args.block_k;
    int64_t block_end = (block + 1) * args.block_k;
    if (block_end > args.k) block_end = args.k;
    end = begin + kDepth < block_end ? begin + kDepth : block_end;
    const float* scale = stored.scales + block * kPanelWidth;
    const float* zeros = stored.zeros ? stored.zeros + block * kPanelWidth : nullptr;
    with_weight_type(args.weight_type, [&](auto tag) {
      widen_panel<decltype(tag)::value>(args, panel, begin, end, zeros, widened);
    });
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int rows = tiles.size(tile);
      const int64_t row = tiles.start(tile);
      const TileStep step{packed + row * args.k + begin * rows,
                          widened,
                          scale,
                          total + (row - first_row) * kPanelWidth,
                          partial + (row - first_row) * kPanelWidth,
                          end - begin,
                          begin == block * args.block_k,
                          end == block_end};
      with_row_count<kMaxRows>(rows, [&](auto count) { run_tile<decltype(count)::value>(step); });
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    store_row(args, first_row + r, panel, load(total + r * kPanelWidth),
              load(total + r * kPanelWidth + kLanes));
  }
}

void stream_linear(const LinearArgs& args, int64_t num_panels) {
  const RowTiles tiles(args.m);
  const float* a = static_cast<const float*>(args.x.data);
  if (args.m > 1 || args.x.type != ElementType::kFloat32) {
    auto* packed =
        static_cast<float*>(thread_scratch(Scratch::kShared, args.m * args.k * sizeof(float)));
    pack_tile(args, tiles, 0, packed);
    a = packed;
  }
  const int64_t per_item = args.m == 1 ? 2 : 1;
  const int64_t num_items = (num_panels + per_item - 1) / per_item;
  share_items(num_items, args.n * args.k > kSerialWork, [&](int64_t item) {
    const int64_t panel = item * per_item;
    with_weight_type(args.weight_type, [&](auto tag) {
      constexpr ElementType kType = decltype(tag)::value;
      with_row_count<kStreamRows>(static_cast<int>(args.m), [&](auto rows) {
        constexpr int kRows = decltype(rows)::value;
        if constexpr (kRows == 1) {
          if (panel + 1 < num_panels) return stream_panels<kType, 1, 2>(args, a, panel);
        }
        stream_panels<kType, kRows, 1>(args, a, panel);
      });
    });
  });
}

void tiled_linear(const LinearArgs& args, int64_t num_panels) {
  const RowTiles tiles(args.m);
  auto* packed =
      static_cast<float*>(thread_scratch(Scratch::kShared, args.m * args.k * sizeof(float)));
  share_tiles(
      args, tiles, num_panels, [&](int64_t tile) { pack_tile(args, tiles, tile, packed); },
      [&](int64_t panel, int64_t begin, int64_t end) {
        multiply_panel(args, tiles, packed, panel, begin, end);
      });
}

}  // namespace

void linear(const LinearArgs& args) {
  const int64_t num_panels = (args.n + kPanelWidth - 1) / kPanelWidth;
  if (args.m == 0 || num_panels == 0) return;
  if (args.m <= kStreamRows) return stream_linear(args, num_panels);
#if defined(VLLM_CPU_AVX512_BF16)
  if (is_of_pairs(args)) return paired_linear(args, num_panels);
#endif
  tiled_linear(args, num_panels);
}

#if defined(VLLM_CPU_AVX512_BF16)
// Whether this chip's product of pairs rounds as add_pair_product says. Documented, and found on
// the chips that we have; results would depend on the batch if one did otherwise.
bool adds_in_order() {
  // In any other order, or with one rounding, the small terms survive or die together.
  const float large = 0x1p24f;
  const auto product = [](float sum, float upper, float lower) {
    const auto bf16 = [](float value) { return __builtin_bit_cast(unsigned, value) >> 16; };
    volatile unsigned pair = bf16(upper) << 16 | bf16(lower), ones = 0x3F803F80;
    return _mm512_cvtss_f32(add_pair_product<false>(_mm512_set1_ps(sum),
                                                    _mm512_set1_epi32(static_cast<int>(pair)),
                                                    _mm512_set1_epi32(static_cast<int>(ones))));
  };
  return product(large, 1, -large) == 0 && product(large, -large, 1) == 1 &&
         product(1, large, -large) == 0 && product(large, 1, 1) == large;
}
#endif

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
