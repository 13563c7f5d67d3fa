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
  run_items(
      num_panels,
      [](const void* context, int64_t panel) {
        (*static_cast<const decltype(pack)*>(context))(panel);
      },
      &pack);
  return num_nans;
}

}  // namespace

int64_t pack_weight(const void* weight, ElementType type, int64_t n, int64_t k, int64_t stride,
                    void* packed) {
  switch (type) {
    case ElementType::kFloat32:
      return pack_panels<float>(weight, type, n, k, stride, packed);
    case ElementType::kE4M3:
      return pack_panels<uint8_t>(weight, type, n, k, stride, packed);
    default:
      return pack_panels<uint16_t>(weight, type, n, k, stride, packed);
  }
}

}  // namespace vllm::cpu
