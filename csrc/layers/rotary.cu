// Rotary position embedding of q and k in place, alone or after the RMSNorm of each head: one
// launch for the heads of both, and for those of V where K and V go to the cache. A head lies in
// the registers of some lanes of a warp, which hand the other elements of their pairs around: heads
// of any shape in shared memory; those of 64, 128 or 256 columns that are rotated whole, in halves,
// by shuffles, several heads of a token at a time.
#include "cache_write.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace vllm::layers {
namespace {

constexpr int kThreads = 128;
// From here on bytes in flight count for more than latency: a thread takes kManyHeads heads.
constexpr int64_t kManyTokens = 256;
constexpr int kManyHeads = 4;

// What the kWidth columns from `column` on are rotated with: their pairs' other elements, cosines,
// and sines with the sign of the term.
struct Turn {
  float partner[kWidth], cosine[kWidth], sine[kWidth];
};

// head: all columns of the head in shared memory; cos_sin: the position's row.
template <bool kIsVector, typename T>
__device__ __forceinline__ Turn turn_of(const RotaryArgs& args, const T* head, const float* cos_sin,
                                        int column) {
  Turn turn;
  const int half = static_cast<int>(args.rotary_dim) / 2;
  if constexpr (kIsVector) {
    // half is a multiple of kWidth: the columns lie in one half.
    const bool is_first = column < half;
    if (args.is_neox) {
      const int frequency = is_first ? column : column - half;
      load<true>(head + (is_first ? column + half : column - half), kWidth, turn.partner);
      load<true>(cos_sin + frequency, kWidth, turn.cosine);
      load<true>(cos_sin + half + frequency, kWidth, turn.sine);
#pragma unroll
      for (float& sine : turn.sine) sine = is_first ? -sine : sine;
      return turn;
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const int at = column + i < args.rotary_dim ? column + i : 0;  // beyond them: not used
    const bool is_first = args.is_neox ? at < half : at % 2 == 0;
    const int frequency = args.is_neox ? (is_first ? at : at - half) : at / 2;
    turn.partner[i] = to_float(head[args.is_neox ? (is_first ? at + half : at - half) : (at ^ 1)]);
    turn.cosine[i] = cos_sin[frequency];
    turn.sine[i] = is_first ? -cos_sin[half + frequency] : cos_sin[half + frequency];
  }
  return turn;
}

// Heads that a token has here. V has as many as K.
__host__ __device__ __forceinline__ unsigned heads_per_token(const RotaryArgs& args) {
  const int64_t num_keys = args.cache.keys != nullptr ? 2 * args.key.num_heads : args.key.num_heads;
  return static_cast<unsigned>(args.query.num_heads + num_keys);
}

// Head `index` of a token, of queries, keys or values.
template <typename T>
__device__ __forceinline__ T* head_of(const RotaryArgs& args, unsigned token, unsigned index) {
  const unsigned num_queries = static_cast<unsigned>(args.query.num_heads);
  const unsigned num_rotated = num_queries + static_cast<unsigned>(args.key.num_heads);
  const bool is_query = index < num_queries, is_value = index >= num_rotated;
  const Heads& heads = is_query ? args.query : is_value ? args.cache.value : args.key;
  const unsigned first = is_query ? 0 : is_value ? num_rotated : num_queries;
  return static_cast<T*>(heads.data) + token * heads.token_stride +
         (index - first) * heads.head_stride;
}

// num_lanes: lanes per head.
template <typename T, bool kHasNorm, bool kIsVector>
__global__ __launch_bounds__(kThreads) void rotary_kernel(RotaryArgs args, unsigned num_rows,
                                                          int num_lanes) {
  alignas(16) __shared__ T shared[kThreads * kWidth];
  wait_for_inputs();
  const unsigned row = blockIdx.x * (kThreads / num_lanes) + threadIdx.x / num_lanes;
  const bool is_row = row < num_rows;
  const unsigned num_queries = static_cast<unsigned>(args.query.num_heads);
  const unsigned num_keys = static_cast<unsigned>(args.key.num_heads);
  const unsigned num_heads = heads_per_token(args);
  const unsigned token = is_row ? row / num_heads : 0, index = row % num_heads;
  const bool is_query = index < num_queries, is_value = index >= num_queries + num_keys;
  const bool is_cached = !is_query && args.cache.keys != nullptr;
  const int column = threadIdx.x % num_lanes * kWidth;
  const int64_t num_columns = kHasNorm || is_cached ? args.head_dim : args.rotary_dim;
  const int valid = is_row ? num_valid(column, num_columns) : 0;
  T* data = head_of<T>(args, token, index) + column;
  const int64_t slot = slot_of(args, token);
  float values[kWidth];
  load<kIsVector>(data, valid, values);
  if constexpr (kHasNorm) {
    float weight[kWidth];
    load<kIsVector>((is_query ? args.query_norm : args.key_norm) + column, valid, weight);
    const float sum = sum_over_lanes(sum_of_squares(values, 0.0f), num_lanes);
    if (!is_value) {
      scale(values, inverse_rms(sum, args.head_dim, args.eps), weight);
      round_to<T>(values);
    }
  }
  store<true>(shared + threadIdx.x * kWidth, kWidth, values);
  __syncwarp();
  if (is_row && !is_value && column < args.rotary_dim) {
    const int64_t position = args.positions[token];
    const bool is_known = position >= 0 && position < args.max_position;
    const float* cos_sin = args.cos_sin + (is_known ? position : 0) * args.rotary_dim;
    const Turn turn =
        turn_of<kIsVector>(args, shared + (threadIdx.x * kWidth - column), cos_sin, column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float turned =
          __fmaf_rn(values[i], turn.cosine[i], __fmul_rn(turn.partner[i], turn.sine[i]));
      if (column + i < args.rotary_dim) {
        values[i] = is_known ? turned : __int_as_float(0x7FC00000);
      }
    }
  }
  if (is_cached) {
    const unsigned head = index - (is_value ? num_queries + num_keys : num_queries);
    if (valid > 0) write_cache<T, kIsVector>(args, slot, head, is_value, column, valid, values);
  } else {
    store<kIsVector>(data, valid, values);
  }
}

// Cosines, and sines with the sign of their term, for kWidth columns of a head of 2 * half that is
// rotated whole. NaN where the position is unknown.
__device__ __forceinline__ void load_turn(const RotaryArgs& args, int64_t position, int column,
                                          int half, float (&cosine)[kWidth],
                                          float (&sine)[kWidth]) {
  const bool is_known = position >= 0 && position < args.max_position, is_first = column < half;
  const float* cos_sin = args.cos_sin + (is_known ? position : 0) * (2 * half);
  const int frequency = is_first ? column : column - half;
  load<true>(cos_sin + frequency, kWidth, cosine);
  load<true>(cos_sin + half + frequency, kWidth, sine);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    cosine[i] = is_known ? cosine[i] : __int_as_float(0x7FC00000);
    sine[i] = is_first ? -sine[i] : sine[i];
  }
}

// kLanes lanes take kHeads heads of kLanes * kWidth columns, all of one token.
template <typename T, int kLanes, int kHeads, bool kHasNorm>
__global__ __launch_bounds__(kThreads) void whole_rotary_kernel(RotaryArgs args,
                                                                unsigned num_groups,
                                                                unsigned groups_per_token) {
  constexpr int kDim = kLanes * kWidth;
  wait_for_inputs();
  const unsigned group = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const unsigned token = group < num_groups ? group / groups_per_token : 0;
  const unsigned first = group % groups_per_token * kHeads;
  const unsigned num_queries = static_cast<unsigned>(args.query.num_heads);
  const unsigned num_rotated = num_queries + static_cast<unsigned>(args.key.num_heads);
  const unsigned end = group < num_groups ? heads_per_token(args) : 0;
  const int column = threadIdx.x % kLanes * kWidth;
  const auto head_at = [&](unsigned head) {
    return reinterpret_cast<Stored<T>*>(head_of<T>(args, token, head) + column);
  };
  Stored<T> stored[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    stored[h] = {};
    if (first + h < end) stored[h] = *head_at(first + h);
  }
  const int64_t slot = slot_of(args, token);
  float cosine[kWidth], sine[kWidth];
  load_turn(args, args.positions[token], column, kDim / 2, cosine, sine);
  [[maybe_unused]] float weight[kWidth];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const bool is_value = first + h >= num_rotated;
    float values[kWidth], partner[kWidth];
    if constexpr (kHasNorm) {
      if (h == 0 || first + h == num_queries) {
        load<true>((first + h < num_queries ? args.query_norm : args.key_norm) + column, kWidth,
                   weight);
      }
      unpack(stored[h], values);
      const float sum = sum_over_lanes(sum_of_squares(values, 0.0f), kLanes);
      // inverse_rms: to divide by a power of two is to multiply by its inverse.
      scale(values, __frsqrt_rn(__fmul_rn(sum, 1.0f / kDim) + args.eps), weight);
      if (!is_value) stored[h] = pack<T>(values);
    }
    unpack(stored[h], values);
    Stored<T> other;
#pragma unroll
    for (int i = 0; i < Stored<T>::kWords; ++i) {
      other.words[i] = __shfl_xor_sync(kAllLanes, stored[h].words[i], kLanes / 2);
    }
    unpack(other, partner);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float turned = __fmaf_rn(values[i], cosine[i], __fmul_rn(partner[i], sine[i]));
      values[i] = is_value ? values[i] : turned;
    }
    if (first + h >= end) continue;
    if (first + h >= num_queries && args.cache.keys != nullptr) {
      const unsigned head = first + h - (is_value ? num_rotated : num_queries);
      write_cache<T, true>(args, slot, head, is_value, column, kWidth, values);
    } else {
      *head_at(first + h) = pack<T>(values);
    }
  }
}

template <typename T, int kLanes, int kHeads>
cudaError_t launch_whole(const RotaryArgs& args, cudaStream_t stream) {
  const int64_t per_token = (heads_per_token(args) + kHeads - 1) / kHeads;
  const unsigned groups = static_cast<unsigned>(args.num_tokens * per_token);
  const LaunchShape shape = {(groups - 1) / (kThreads / kLanes) + 1, kThreads};
  const auto kernel = args.query_norm != nullptr ? whole_rotary_kernel<T, kLanes, kHeads, true>
                                                 : whole_rotary_kernel<T, kLanes, kHeads, false>;
  return launch(kernel, shape, stream, args, groups, static_cast<unsigned>(per_token));
}

template <typename T, int kLanes>
cudaError_t launch_whole(const RotaryArgs& args, cudaStream_t stream) {
  return args.num_tokens < kManyTokens ? launch_whole<T, kLanes, 1>(args, stream)
                                       : launch_whole<T, kLanes, kManyHeads>(args, stream);
}

bool is_whole(const RotaryArgs& args) {
  const int64_t dim = args.head_dim;
  const bool is_supported = dim == 64 || dim == 128 || dim == 256;
  return args.is_vector && args.is_neox && args.rotary_dim == dim && is_supported;
}

}  // namespace

cudaError_t launch_rotary(const RotaryArgs& args, cudaStream_t stream) {
  const int64_t num_rows = args.num_tokens * heads_per_token(args);
  if (num_rows == 0) return cudaSuccess;
  const bool has_norm = args.query_norm != nullptr, has_cache = args.cache.keys != nullptr;
  const int64_t columns = has_norm || has_cache ? args.head_dim : args.rotary_dim;
  if (num_rows > INT32_MAX || columns > kMaxHeadDim) return cudaErrorInvalidValue;
  const int lanes = lanes_for(columns), rows_per_block = kThreads / lanes;
  const unsigned rows = static_cast<unsigned>(num_rows);
  const LaunchShape shape = {(rows - 1) / rows_per_block + 1, kThreads};
  return dispatch(args.type, [&]<typename T>() {
    if (is_whole(args)) {
      return columns == 64    ? launch_whole<T, 64 / kWidth>(args, stream)
             : columns == 128 ? launch_whole<T, 128 / kWidth>(args, stream)
                              : launch_whole<T, 256 / kWidth>(args, stream);
    }
    if (has_norm) {
      return args.is_vector
                 ? launch(rotary_kernel<T, true, true>, shape, stream, args, rows, lanes)
                 : launch(rotary_kernel<T, true, false>, shape, stream, args, rows, lanes);
    }
    return args.is_vector
               ? launch(rotary_kernel<T, false, true>, shape, stream, args, rows, lanes)
               : launch(rotary_kernel<T, false, false>, shape, stream, args, rows, lanes);
  });
}

}  // namespace vllm::layers
