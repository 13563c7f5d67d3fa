// Writes keys and values of new tokens into their slots of the paged cache.
#include "parallel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr int64_t kTokensPerItem = 32;  // neighbours share cache lines of the key cache

template <ElementType kFrom, ElementType kTo>
void write_token(const CacheWriteArgs& args, int64_t token, int64_t slot) {
  const KvCache& cache = args.cache;
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  const F32x16 k_scale = set1(cache.k_scale), v_scale = set1(cache.v_scale);
  for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
    const int64_t head = (block * cache.num_kv_heads + h) * cache.head_dim * cache.block_size;
    const auto* key = static_cast<const StorageOf<kFrom>*>(args.key.data) +
                      token * args.key.token_stride + h * args.key.head_stride;
    const auto* value = static_cast<const StorageOf<kFrom>*>(args.value.data) +
                        token * args.value.token_stride + h * args.value.head_stride;
    auto* key_out = static_cast<StorageOf<kTo>*>(cache.key) + head + offset;
    auto* value_out = static_cast<StorageOf<kTo>*>(cache.value) + head + offset * cache.head_dim;
    for (int64_t d = 0; d < cache.head_dim; d += kLanes) {
      const int count = cache.head_dim - d < kLanes ? static_cast<int>(cache.head_dim - d) : kLanes;
      F32x16 k = load_first<kFrom>(key + d, count);
      F32x16 v = load_first<kFrom>(value + d, count);
      if constexpr (kTo == ElementType::kE4M3) {
        k = div(k, k_scale);
        v = div(v, v_scale);
      }
      StorageOf<kTo> lanes[kLanes];
      store_as<kTo>(lanes, k);
      for (int i = 0; i < count; ++i) key_out[(d + i) * cache.block_size] = lanes[i];
      store_first<kTo>(value_out + d, v, count);
    }
  }
}

}  // namespace

void cache_write(const CacheWriteArgs& args) {
  const int64_t num_items = (args.num_tokens + kTokensPerItem - 1) / kTokensPerItem;
  with_float_type(args.key.type, [&](auto from) {
    with_any_type(args.cache.type, [&](auto to) {
      share_items(num_items, true, [&](int64_t item) {
        const int64_t begin = item * kTokensPerItem;
        const int64_t left = args.num_tokens - begin;
        const int64_t end = begin + (left < kTokensPerItem ? left : kTokensPerItem);
        for (int64_t token = begin; token < end; ++token) {
          if (args.slots[token] < 0) continue;
          write_token<decltype(from)::value, decltype(to)::value>(args, token, args.slots[token]);
        }
      });
    });
  });
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
