// Element types, argument blocks and the table of kernels that every instruction set provides.
// No C++ standard headers: kernel files are compiled once per instruction set, and an inline
// library function emitted with AVX-512 must never be the copy that the linker keeps.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace vllm::cpu {

enum class ElementType : int {
  kFloat32,
  kBFloat16,
  kFloat16,
  kE4M3,
  // Of weights only: whole numbers, and 4-bit codes.
  kInt8,
  kInt4,   // code - 8
  kUint4,  // code - zero point of its group
  kE2M1,
};

inline constexpr int kPanelWidth = 32;  // output columns that one packed weight panel holds
// 4-bit codes are packed four rows of a panel at a time (see linear_pack.h).
inline constexpr int kQuadRows = 4;
inline constexpr int kQuadBytes = kQuadRows * kPanelWidth / 2;
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxTaps = 8;        // of a causal convolution
inline constexpr int kMaxQueryRows = 96;  // (token, head) rows that share one pass over the keys
inline constexpr int kMaxSplitRows = 16;  // rows of a query tile whose keys several threads share
inline constexpr int kKeyTile = 128;      // keys per softmax tile, counted from position 0

// Values of the sixteen codes of a 4-bit type; of kUint4 before the zero point is subtracted.
struct CodeValues {
  alignas(64) float values[16];
};
template <ElementType kType>
inline constexpr CodeValues kCodeValues{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
template <>
inline constexpr CodeValues kCodeValues<ElementType::kInt4>{
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};
template <>
inline constexpr CodeValues kCodeValues<ElementType::kE2M1>{
    {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6}};

constexpr bool is_code(ElementType type) {
  return type == ElementType::kInt4 || type == ElementType::kUint4 || type == ElementType::kE2M1;
}

// A row-strided matrix; the last dimension is contiguous and strides count elements.
struct Rows {
  void* data;
  ElementType type;
  int64_t stride;
};

struct LinearArgs {
  Rows x;              // [m, k] float32, bfloat16 or float16
  Rows out;            // [m, n], same type
  const void* weight;  // [panels, k, 32] or codes [panels, quads, 64] (see linear_pack.h)
  ElementType weight_type;
  const void* scales;  // [panels, num_k_blocks, 32]; E4M3 ones count 1/256 of their value
  ElementType scale_type;
  const float* scale_factors;  // [panels, 32], multiplied with scales; may be null
  const uint8_t* zero_points;  // [panels, num_k_blocks, 32], of kUint4 only
  const float* bias;           // [panels, 32]
  int64_t m, n, k, block_k;
};

// One [tokens, heads, head_dim] view; head_dim is contiguous.
struct Heads {
  void* data;
  ElementType type;
  int64_t token_stride, head_stride;
};

struct KvCache {
  void* key;    // [num_blocks, num_kv_heads, head_dim, block_size]
  void* value;  // [num_blocks, num_kv_heads, block_size, head_dim]
  ElementType type;
  int64_t num_blocks, num_kv_heads, head_dim, block_size;
  float k_scale, v_scale;  // stored = value / scale, E4M3 only (1 otherwise)
};

// Consecutive tokens of one request that walk its keys together, for every KV head in turn.
struct QueryTile {
  int32_t request, num_tokens;
  int64_t first_token;     // row of query and out
  int64_t first_position;  // of first_token in its request
  int64_t key_tile_begin, key_tile_end;
  int64_t partial;  // first of key tiles x KV heads partial results, or -1: not split
};

// One thread's piece of work: key tiles [begin, end) of one query tile and KV head.
struct AttentionUnit {
  int32_t query_tile, kv_head;
  int64_t key_tile_begin, key_tile_end;
};

struct AttentionArgs {
  Heads query, out;
  KvCache cache;
  const int32_t* block_tables;  // [num_requests, block_table_stride]
  int64_t block_table_stride;
  const int32_t* query_start;  // [num_requests + 1]
  const int32_t* seq_lens;     // [num_requests]
  int64_t num_requests, num_query_heads;
  int64_t sliding_window;  // 0: none
  bool is_chunked;         // queries see the keys of their own chunk of sliding_window positions
  const float* sinks;      // [num_query_heads]: logits of keys without values; may be null
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: none
  // The plan; it decides who computes what, never a result.
  const QueryTile* query_tiles;
  int64_t num_query_tiles;
  const AttentionUnit* units;
  int64_t num_units, num_partials;
};

struct CacheWriteArgs {
  Heads key, value;
  KvCache cache;
  const int64_t* slots;  // [tokens]; negative: skip
  int64_t num_tokens;
};

struct NormArgs {
  Heads x, residual, gate, out;  // residual.data and gate.data may be null
  const float* weight;
  int64_t num_tokens, num_heads, dim;
  float eps;
};

struct RotaryArgs {
  Heads query, key;  // rotated in place; key.data may be null
  int64_t num_query_heads, num_key_heads;
  const int64_t* positions;
  const float* cos_sin;  // [max_position, rotary_dim]: cosines, then sines
  int64_t num_tokens, rotary_dim;
  bool is_neox;
};

struct SiluArgs {
  Rows x, out;  // [m, 2 n] -> [m, n]
  int64_t m, n;
  float limit;  // of the clamped variant; 0 for plain silu
};

struct GeluArgs {
  Rows x, out;  // [m, 2 n] -> [m, n]
  int64_t m, n;
  bool is_tanh;
};

// x = softcap * tanh(x / softcap).
struct SoftCapArgs {
  Rows x;  // [m, n]
  int64_t m, n;
  float softcap;
};

// x *= sigmoid(gate), with one gate for each element or for each head.
struct SigmoidArgs {
  Heads x, gate;
  int64_t num_tokens, num_heads, dim;
  bool is_per_head;
};

// Requests that carry a state from step to step, each in its slot. One whose sequence is as long as
// its queries has no step behind it: its state counts as zero, whatever the slot holds.
struct StateRequests {
  const int32_t* query_start;  // [num_requests + 1]
  const int32_t* seq_lens;     // [num_requests]
  const int32_t* slots;        // [num_requests]
  int64_t num_requests;
};

struct ConvArgs {
  Rows x, out;          // [tokens, channels], one type
  const float* weight;  // [taps, channels]
  void* state;          // [slots, taps - 1, channels] of x's type
  StateRequests requests;
  int64_t channels, taps;
};

struct DeltaRuleArgs {
  Heads query, key;         // [tokens, num_key_heads, key_dim]
  Heads value, out;         // [tokens, num_value_heads, value_dim]
  Rows a, b;                // [tokens, num_value_heads]
  const float* decay_rate;  // [num_value_heads]
  const float* dt_bias;     // [num_value_heads]
  float* state;             // [slots, num_value_heads, key_dim, value_dim]
  StateRequests requests;
  int64_t num_key_heads, num_value_heads, key_dim, value_dim;
};

struct SampleArgs {
  const float* logits;  // [num_rows, vocab], rows `stride` apart
  int64_t num_rows, vocab, stride;
  // Per row. temperature 0: the largest logit; top_k 0, top_p 1 and min_p 0: keep every token.
  const float* temperature;
  const int64_t* top_k;
  const float *top_p, *min_p;
  const double* uniforms;  // in [0, 1)
  int64_t* tokens;
};

struct KernelTable {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*attention)(const AttentionArgs&);
  void (*cache_write)(const CacheWriteArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*silu_and_mul)(const SiluArgs&);
  void (*gelu_and_mul)(const GeluArgs&);
  void (*soft_cap)(const SoftCapArgs&);
  void (*mul_sigmoid)(const SigmoidArgs&);
  void (*causal_conv1d)(const ConvArgs&);
  void (*gated_delta_rule)(const DeltaRuleArgs&);
  void (*sample)(const SampleArgs&);
};

// First key that a query at `position` sees. Static for the reason at the top of this file.
static inline int64_t first_visible_key(int64_t position, const AttentionArgs& args) {
  const int64_t window = args.sliding_window;
  if (window == 0 || position < window) return 0;
  return args.is_chunked ? position / window * window : position - window + 1;
}

// Memory that lives as long as its thread and only grows; 64-byte aligned.
enum class Scratch : int { kShared, kPrivate, kScales };
void* thread_scratch(Scratch which, size_t num_bytes);

}  // namespace vllm::cpu
