#include <cmath>
#include <cstring>

#include "../cpu/attention_plan.h"
#include "../cpu/dispatch.h"
#include "../cpu/thread_pool.h"
#include "check.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;

cpu::KvCache cache_of(const TensorView& key, const TensorView& value, double k_scale,
                      double v_scale) {
  check_cpu(key, "k_cache", 4);
  check_cpu(value, "v_cache", 4);
  check_contiguous(key, "k_cache");
  check_contiguous(value, "v_cache");
  cpu::KvCache cache;
  cache.type = storage_type(key, "k_cache");
  check_same_type(storage_type(value, "v_cache"), value, "v_cache", cache.type, "k_cache");
  cache.num_blocks = key.size(0);
  cache.num_kv_heads = key.size(1);
  cache.head_dim = key.size(2);
  cache.block_size = key.size(3);
  VLLM_CHECK(cache.num_kv_heads >= 1,
             "k_cache: given shape " << shape_name(key) << "; accepted: at least one KV head");
  VLLM_CHECK(cache.block_size >= 16 && cache.block_size % 16 == 0,
             "k_cache: given block size " << cache.block_size
                                          << " (dimension 3); accepted: a multiple of 16");
  VLLM_CHECK(cache.head_dim >= 8 && cache.head_dim % 8 == 0 && cache.head_dim <= cpu::kMaxHeadDim,
             "k_cache: given head size " << cache.head_dim
                                         << " (dimension 2); accepted: a multiple of 8 up to "
                                         << cpu::kMaxHeadDim);
  check_size(value, "v_cache", 0, cache.num_blocks, "blocks of k_cache");
  check_size(value, "v_cache", 1, cache.num_kv_heads, "KV heads of k_cache");
  check_size(value, "v_cache", 2, cache.block_size, "block size of k_cache");
  check_size(value, "v_cache", 3, cache.head_dim, "head size of k_cache");
  VLLM_CHECK(std::isfinite(k_scale) && k_scale > 0,
             "k_scale: given " << k_scale << "; accepted: a positive number");
  VLLM_CHECK(std::isfinite(v_scale) && v_scale > 0,
             "v_scale: given " << v_scale << "; accepted: a positive number");
  const bool is_scaled = cache.type == cpu::ElementType::kE4M3;
  VLLM_CHECK(is_scaled || (k_scale == 1 && v_scale == 1),
             "k_scale, v_scale: given " << k_scale << ", " << v_scale << " for a "
                                        << type_name(key.dtype())
                                        << " cache; accepted: 1 (only E4M3 caches are scaled)");
  cache.k_scale = static_cast<float>(k_scale);
  cache.v_scale = static_cast<float>(v_scale);
  cache.key = data_of(key);
  cache.value = data_of(value);
  return cache;
}

void check_heads(const TensorView& tensor, const char* name, int64_t num_heads, int64_t head_dim) {
  check_size(tensor, name, 1, num_heads, "heads");
  check_size(tensor, name, 2, head_dim, "head size of k_cache");
}

// key, value [tokens, num_kv_heads, head_dim]; slot_mapping int64 [tokens], negative: skipped.
void reshape_and_cache(TensorView key, TensorView value, TensorView k_cache, TensorView v_cache,
                       TensorView slot_mapping, double k_scale, double v_scale) {
  cpu::CacheWriteArgs args;
  args.cache = cache_of(k_cache, v_cache, k_scale, v_scale);
  args.key = heads_of(key, "key");
  args.value = heads_of(value, "value");
  args.num_tokens = key.size(0);
  check_size(value, "value", 0, args.num_tokens, "tokens of key");
  check_heads(key, "key", args.cache.num_kv_heads, args.cache.head_dim);
  check_heads(value, "value", args.cache.num_kv_heads, args.cache.head_dim);
  check_same_type(args.value.type, value, "value", args.key.type, "key");
  check_vector(slot_mapping, "slot_mapping", kDLInt, 64, args.num_tokens, "tokens of key");
  args.slots = static_cast<const int64_t*>(data_of(slot_mapping));
  const int64_t num_slots = args.cache.num_blocks * args.cache.block_size;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    VLLM_CHECK(args.slots[t] < num_slots, "slot_mapping: given slot "
                                              << args.slots[t] << " for token " << t
                                              << "; accepted: less than " << num_slots
                                              << ", or negative to skip the token");
  }
  cpu::kernels().cache_write(args);
}

void check_requests(const cpu::AttentionArgs& args, int64_t num_tokens,
                    int64_t blocks_per_request) {
  VLLM_CHECK(args.query_start[0] == 0,
             "query_start_loc: given first element " << args.query_start[0] << "; accepted: 0");
  for (int64_t r = 0; r < args.num_requests; ++r) {
    const int64_t query_len = int64_t{args.query_start[r + 1]} - args.query_start[r];
    const int64_t seq_len = args.seq_lens[r];
    VLLM_CHECK(query_len >= 0,
               "query_start_loc: decreases after request " << r << "; accepted: ascending offsets");
    VLLM_CHECK(seq_len >= query_len || seq_len == 0,
               "seq_lens: given " << seq_len << " for request " << r << " of " << query_len
                                  << " query tokens; accepted: at least as many, or 0 to fill up");
    const int64_t num_blocks =
        query_len == 0 ? 0 : (seq_len + args.cache.block_size - 1) / args.cache.block_size;
    VLLM_CHECK(num_blocks <= blocks_per_request,
               "block_tables: given " << blocks_per_request << " blocks per request; request " << r
                                      << " needs " << num_blocks << " for " << seq_len
                                      << " tokens");
    const int64_t first =
        num_blocks == 0 ? 0
                        : cpu::first_visible_key(seq_len - query_len, args) / args.cache.block_size;
    const int32_t* table = args.block_tables + r * args.block_table_stride;
    for (int64_t b = first; b < num_blocks; ++b) {
      VLLM_CHECK(table[b] >= 0 && table[b] < args.cache.num_blocks,
                 "block_tables: given block " << table[b] << " at [" << r << ", " << b
                                              << "]; accepted: 0 to " << args.cache.num_blocks - 1);
    }
  }
  VLLM_CHECK(args.query_start[args.num_requests] == num_tokens,
             "query_start_loc: given last element " << args.query_start[args.num_requests]
                                                    << "; accepted: " << num_tokens
                                                    << " (tokens of query)");
}

// Requests of no keys fill up a batch of a fixed size; nothing attends for them.
void clear_rows_without_keys(const cpu::AttentionArgs& args, TensorView out) {
  char* rows = static_cast<char*>(data_of(out));
  const int64_t item = out.dtype().bits / 8;
  for (int64_t r = 0; r < args.num_requests; ++r) {
    if (args.seq_lens[r] > 0) continue;
    for (int64_t t = args.query_start[r]; t < args.query_start[r + 1]; ++t) {
      for (int64_t head = 0; head < args.num_query_heads; ++head) {
        char* row = rows + (t * out.stride(0) + head * out.stride(1)) * item;
        std::memset(row, 0, static_cast<size_t>(args.cache.head_dim * item));
      }
    }
  }
}

// query, out [tokens, num_query_heads, head_dim]; sinks float32 [num_query_heads] or none.
void paged_attention(TensorView query, TensorView k_cache, TensorView v_cache,
                     TensorView block_tables, TensorView query_start_loc, TensorView seq_lens,
                     TensorView out, double scale, int64_t sliding_window, double k_scale,
                     double v_scale, Optional<TensorView> sinks, double softcap, bool is_chunked) {
  cpu::AttentionArgs args;
  args.cache = cache_of(k_cache, v_cache, k_scale, v_scale);
  args.query = heads_of(query, "query");
  args.out = heads_of(out, "out");
  args.num_query_heads = query.size(1);
  VLLM_CHECK(args.num_query_heads >= 1 && args.num_query_heads % args.cache.num_kv_heads == 0 &&
                 args.num_query_heads / args.cache.num_kv_heads <= cpu::kMaxQueryRows,
             "query: given " << args.num_query_heads << " heads; accepted: a multiple of the "
                             << args.cache.num_kv_heads << " KV heads, at most "
                             << cpu::kMaxQueryRows << " times as many");
  check_heads(query, "query", args.num_query_heads, args.cache.head_dim);
  check_size(out, "out", 0, query.size(0), "tokens of query");
  check_heads(out, "out", args.num_query_heads, args.cache.head_dim);
  check_same_type(args.out.type, out, "out", args.query.type, "query");
  check_cpu(block_tables, "block_tables", 2);
  check_type(block_tables, "block_tables", kDLInt, 32);
  check_last_contiguous(block_tables, "block_tables");
  args.num_requests = block_tables.size(0);
  check_vector(query_start_loc, "query_start_loc", kDLInt, 32, args.num_requests + 1,
               "rows of block_tables + 1");
  check_vector(seq_lens, "seq_lens", kDLInt, 32, args.num_requests, "rows of block_tables");
  VLLM_CHECK(sliding_window >= 0,
             "sliding_window: given " << sliding_window << "; accepted: 0 (none) or more");
  VLLM_CHECK(sliding_window > 0 || !is_chunked,
             "sliding_window: given 0; accepted with is_chunked: 1 or more");
  VLLM_CHECK(std::isfinite(scale), "scale: given " << scale << "; accepted: a finite number");
  args.block_tables = static_cast<const int32_t*>(data_of(block_tables));
  args.block_table_stride = block_tables.stride(0);
  args.query_start = static_cast<const int32_t*>(data_of(query_start_loc));
  args.seq_lens = static_cast<const int32_t*>(data_of(seq_lens));
  args.sliding_window = sliding_window;
  args.is_chunked = is_chunked;
  args.sinks = nullptr;
  if (sinks.has_value()) {
    check_vector(*sinks, "sinks", kDLFloat, 32, args.num_query_heads, "heads of query");
    args.sinks = static_cast<const float*>(data_of(*sinks));
  }
  args.scale = static_cast<float>(scale);
  VLLM_CHECK(std::isfinite(softcap) && softcap >= 0,
             "softcap: given " << softcap << "; accepted: 0 (none) or more");
  args.softcap = static_cast<float>(softcap);
  check_requests(args, query.size(0), block_tables.size(1));
  clear_rows_without_keys(args, out);

  thread_local cpu::AttentionPlan plan;
  cpu::plan_attention(args, cpu::num_threads(), plan);
  args.query_tiles = plan.query_tiles.data();
  args.num_query_tiles = static_cast<int64_t>(plan.query_tiles.size());
  args.units = plan.units.data();
  args.num_units = static_cast<int64_t>(plan.units.size());
  args.num_partials = plan.num_partials;
  cpu::kernels().attention(args);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(reshape_and_cache, reshape_and_cache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, paged_attention);

}  // namespace vllm
