#include "linear_pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "thread_pool.h"

namespace vllm::cpu {
namespace {

bool is_interleaved(ElementType type) {
  return type == ElementType::kBFloat16 || type == ElementType::kE4M3;
}

int interleaved_column(int column) {
  constexpr int kHalf = kPanelWidth / 2;
  return column < kHalf ? 2 * column : 2 * (column - kHalf) + 1;
}

template <class T>
int64_t pack_panel(const T* weight, ElementType type, int64_t num_columns, int64_t k,
                   int64_t stride, T* packed) {
  constexpr int64_t kDepth = 256;  // rows of a panel that stay in L1 while columns fill them
  int64_t num_nans = 0;
  if (num_columns < kPanelWidth) std::memset(packed, 0, k * kPanelWidth * sizeof(T));
  for (int64_t begin = 0; begin < k; begin += kDepth) {
    const int64_t end = std::min(begin + kDepth, k);
    for (int column = 0; column < num_columns; ++column) {
      const T* source = weight + column * stride;
      T* target = packed + (is_interleaved(type) ? interleaved_column(column) : column);
      for (int64_t i = begin; i < end; ++i) target[i * kPanelWidth] = source[i];
      if (type == ElementType::kE4M3) {
        for (int64_t i = begin; i < end; ++i) num_nans += (int(source[i]) & 0x7F) == 0x7F;
      }
    }
  }
  return num_nans;
}

template <class F>
void for_each_panel(int64_t num_panels, const F& pack) {
  run_items(
      num_panels,
      [](const void* context, int64_t panel) { (*static_cast<const F*>(context))(panel); }, &pack);
}

template <class T>
int64_t pack_panels(const void* weight, ElementType type, int64_t n, int64_t k, int64_t stride,
                    void* packed) {
  const int64_t num_panels = (n + kPanelWidth - 1) / kPanelWidth;
  std::atomic<int64_t> num_nans{0};
  const auto pack = [&](int64_t panel) {
    const int64_t first = panel * kPanelWidth;
    num_nans += pack_panel(static_cast<const T*>(weight) + first * stride, type,
                           std::min<int64_t>(kPanelWidth, n - first), k, stride,
                           static_cast<T*>(packed) + panel * k * kPanelWidth);
  };
  for_each_panel(num_panels, pack);
  return num_nans;
}

// Codes k and k + 1 of a row, the first in the low nibble; zeros from `end` on.
uint8_t pair_of_codes(const uint8_t* row, int64_t k, int64_t end) {
  if (k >= end) return 0;
  const int first = row[k / 2] >> k % 2 * 4 & 15;
  const int second = k + 1 < end ? row[(k + 1) / 2] >> (k + 1) % 2 * 4 & 15 : 0;
  return static_cast<uint8_t>(first | second << 4);
}

// Byte 4 l + b holds rows b % 2 and b % 2 + 2 of column l + 16 (b / 2).
void pack_quad(const uint8_t* codes, int64_t num_columns, int64_t stride, int64_t k, int64_t end,
               uint8_t* quad) {
  constexpr int kHalf = kPanelWidth / 2;
  std::memset(quad, 0, kQuadBytes);
  for (int64_t column = 0; column < num_columns; ++column) {
    const uint8_t* row = codes + column * stride;
    const int low = pair_of_codes(row, k, end), high = pair_of_codes(row, k + 2, end);
    uint8_t* target = quad + 4 * (column % kHalf) + 2 * (column / kHalf);
    target[0] = static_cast<uint8_t>((low & 15) | (high & 15) << 4);
    target[1] = static_cast<uint8_t>(low >> 4 | (high & 0xF0));
  }
}

}  // namespace

int64_t num_quads(int64_t k, int64_t block_k) {
  const auto quads_of = [](int64_t rows) { return (rows + kQuadRows - 1) / kQuadRows; };
  return k / block_k * quads_of(block_k) + quads_of(k % block_k);
}

void pack_codes(const void* codes, int64_t n, int64_t k, int64_t block_k, int64_t stride,
                void* packed) {
  const int64_t panel_size = num_quads(k, block_k) * kQuadBytes;
  for_each_panel((n + kPanelWidth - 1) / kPanelWidth, [&](int64_t panel) {
    const int64_t first = panel * kPanelWidth;
    const auto* source = static_cast<const uint8_t*>(codes) + first * stride;
    auto* quad = static_cast<uint8_t*>(packed) + panel * panel_size;
    for (int64_t begin = 0; begin < k; begin += block_k) {
      const int64_t end = std::min(begin + block_k, k);
      for (int64_t row = begin; row < end; row += kQuadRows, quad += kQuadBytes) {
        pack_quad(source, std::min<int64_t>(kPanelWidth, n - first), stride, row, end, quad);
      }
    }
  });
}

int64_t pack_weight(const void* weight, ElementType type, int64_t n, int64_t k, int64_t stride,
                    void* packed) {
  switch (type) {
    case ElementType::kFloat32:
      return pack_panels<float>(weight, type, n, k, stride, packed);
    case ElementType::kE4M3:
    case ElementType::kInt8:
      return pack_panels<uint8_t>(weight, type, n, k, stride, packed);
    default:
      return pack_panels<uint16_t>(weight, type, n, k, stride, packed);
  }
}

}  // namespace vllm::cpu
