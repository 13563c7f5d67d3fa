#include "../w8a8/chunk.cuh"
#include "nvfp4_group.cuh"
#include "nvfp4_layout.cuh"
#include "nvfp4_quant.h"

namespace vllm::fp4 {
namespace {

using w8a8::Chunk;
static_assert(w8a8::kChunk == kGroup);

constexpr int kThreads = 256;
constexpr int kGroupsInFlight = 4;  // per thread, of 32 bytes of bfloat16
constexpr int kMaxBlocksPerSm = 64;

struct Args {
  Nvfp4Quant quant;
  Divisor groups_per_row, top_k;
  uint32_t total_groups;
  uint32_t tile_columns;
};

// silu(gate) * up, rounded to T.
template <typename T>
__device__ __forceinline__ Chunk<T> gated(const Chunk<T>& gate, const Chunk<T>& up) {
  Chunk<T> result;
  if (gate.amax() <= 87.0f) {
#pragma unroll
    for (int i = 0; i < kGroup / 2; ++i) {
      const float2 g = gate.pair(i), u = up.pair(i);
      result.set_pair(i, {w8a8::silu_moderate(g.x) * u.x, w8a8::silu_moderate(g.y) * u.y});
    }
  } else {  // exp(-x) may overflow, or x is not finite
#pragma unroll
    for (int i = 0; i < kGroup / 2; ++i) {
      const float2 g = gate.pair(i), u = up.pair(i);
      result.set_pair(i, {w8a8::silu(g.x) * u.x, w8a8::silu(g.y) * u.y});
    }
  }
  return result;
}

// The groups first, first + kThreads ... of the rows of q, of which those below total_groups exist.
template <typename T, bool kIsGated, bool kHasPairs, int kNumGroups>
__device__ __forceinline__ void load_groups(Chunk<T> (&groups)[kNumGroups], const Args& args,
                                            uint32_t first) {
  const T* x = static_cast<const T*>(args.quant.x);
  Chunk<T> up[kIsGated ? kNumGroups : 1];
#pragma unroll
  for (int i = 0; i < kNumGroups; ++i) {
    const uint32_t group = first + i * kThreads;
    const int valid = group < args.total_groups ? kGroup : 0;
    if constexpr (kIsGated) {
      const uint32_t row = args.groups_per_row.quotient(group);
      const uint32_t per_row = args.groups_per_row.value();
      const T* gate = x + (int64_t{group} + int64_t{row} * per_row) * kGroup;
      groups[i] = w8a8::load_chunk<true>(gate, valid);
      up[i] = w8a8::load_chunk<true>(gate + int64_t{per_row} * kGroup, valid);
    } else if constexpr (kHasPairs) {
      const uint32_t row = args.groups_per_row.quotient(group);
      const uint32_t pair = valid != 0 ? args.quant.pairs[row] : 0;
      const uint32_t token = args.top_k.quotient(pair);
      // Of rows that are left out, pairs may hold anything.
      const bool is_token = pair <= INT32_MAX && token < args.quant.num_tokens;
      const uint32_t per_row = args.groups_per_row.value(), column = group - row * per_row;
      const int64_t source = is_token ? int64_t{token} * per_row + column : 0;
      groups[i] = w8a8::load_chunk<true>(x + source * kGroup, is_token ? valid : 0);
    } else {
      groups[i] = w8a8::load_chunk<true>(x + int64_t{group} * kGroup, valid);
    }
  }
  if constexpr (kIsGated) {
#pragma unroll
    for (int i = 0; i < kNumGroups; ++i) groups[i] = gated(groups[i], up[i]);
  }
}

// Writes the 16 codes of a group; returns the code of its scale.
template <typename T>
__device__ __forceinline__ uint8_t quantise(const Chunk<T>& group, const GlobalScale& global,
                                            uint8_t* q) {
  const QuantisedGroup quantised = quantise_group(group, global);
  *reinterpret_cast<uint64_t*>(q) = quantised.codes;
  return quantised.scale;
}

// A scale among tiles; the last one of a row zeros what its tile has beyond it.
__device__ __forceinline__ void store_in_tile(const Args& args, uint32_t row, uint32_t column,
                                              uint8_t code) {
  uint8_t* target = args.quant.scales + swizzled_offset(row, column, args.tile_columns);
  *target = code;
  if (column + 1 == args.groups_per_row.value()) {
    for (uint32_t c = column + 1; c % kTileColumns != 0; ++c) *++target = 0;
  }
}

// Zeros for scale rows from `row` to `end`, by the threads of num_blocks blocks.
__device__ __forceinline__ void zero_rows(const Args& args, uint32_t row, uint32_t end,
                                          uint32_t block, uint32_t num_blocks) {
  const uint32_t num_words = (end - row) * args.tile_columns;
  for (uint32_t i = block * kThreads + threadIdx.x; i < num_words; i += num_blocks * kThreads) {
    const int64_t offset = swizzled_offset(row + i / args.tile_columns,
                                           i % args.tile_columns * kTileColumns, args.tile_columns);
    *reinterpret_cast<uint32_t*>(args.quant.scales + offset) = 0;
  }
}

// What a layout does with the groups of a thread: finds the global scale of each, quantises, and
// stores the scale's code. finish() is called by all threads at the end.

class LinearScales {
 public:
  __device__ explicit LinearScales(const Args& args)
      : scales_(args.quant.scales), global_(*args.quant.global_scale) {}

  template <typename Quantise>
  __device__ __forceinline__ void put(uint32_t group, Quantise&& quantise) const {
    scales_[group] = quantise(global_);
  }
  __device__ void finish() const {}

 private:
  uint8_t* scales_;
  GlobalScale global_;
};

class SwizzledScales {
 public:
  __device__ explicit SwizzledScales(const Args& args)
      : args_(args), global_(*args.quant.global_scale) {}

  template <typename Quantise>
  __device__ __forceinline__ void put(uint32_t group, Quantise&& quantise) const {
    const uint32_t row = args_.groups_per_row.quotient(group);
    const uint32_t column = group - row * args_.groups_per_row.value();
    store_in_tile(args_, row, column, quantise(global_));
  }
  __device__ void finish() const {
    zero_rows(args_, args_.quant.m, round_up(args_.quant.m, kTileRows), blockIdx.x, gridDim.x);
  }

 private:
  const Args& args_;
  GlobalScale global_;
};

class GroupedScales {
 public:
  __device__ explicit GroupedScales(const Args& args) : args_(args), experts_(table()) {
    const Nvfp4Quant& quant = args.quant;
    experts_.fill(quant.expert_offsets, quant.num_experts, static_cast<int32_t>(quant.m));
  }

  template <typename Quantise>
  __device__ __forceinline__ void put(uint32_t group, Quantise&& quantise) const {
    const uint32_t row = args_.groups_per_row.quotient(group);
    const uint32_t column = group - row * args_.groups_per_row.value();
    const int e = experts_.expert_of(row, args_.quant.num_experts);
    if (e < 0) return;
    const uint8_t code = quantise(GlobalScale(args_.quant.global_scale[e]));
    const uint32_t scale_row = row - experts_.first_row[e] + experts_.first_scale_row[e];
    if (scale_row < args_.quant.scale_rows) store_in_tile(args_, scale_row, column, code);
  }
  __device__ void finish() const {
    for (int e = blockIdx.x; e < args_.quant.num_experts; e += gridDim.x) {
      const int32_t rows = max(experts_.first_row[e + 1] - experts_.first_row[e], 0);
      const int64_t end = experts_.first_scale_row[e + 1];
      if (end <= args_.quant.scale_rows) {
        zero_rows(args_, experts_.first_scale_row[e] + rows, end, 0, 1);
      }
    }
  }

 private:
  static __device__ ExpertTable& table() {
    __shared__ ExpertTable table;
    return table;
  }

  const Args& args_;
  ExpertTable& experts_;
};

// A thread takes whole groups: one 8-byte store of codes and one byte of scale each.
template <typename T, typename Scales, bool kIsGated, bool kHasPairs, int kNumGroups>
__global__ __launch_bounds__(kThreads) void nvfp4_quant_kernel(const __grid_constant__ Args args) {
  const Scales scales(args);
  for (uint32_t first = blockIdx.x * (kThreads * kNumGroups) + threadIdx.x;
       first < args.total_groups; first += gridDim.x * (kThreads * kNumGroups)) {
    Chunk<T> groups[kNumGroups];
    load_groups<T, kIsGated, kHasPairs>(groups, args, first);
#pragma unroll
    for (int i = 0; i < kNumGroups; ++i) {
      const uint32_t group = first + i * kThreads;
      if (group >= args.total_groups) break;
      scales.put(group, [&](const GlobalScale& global) {
        return quantise(groups[i], global, args.quant.q + int64_t{group} * (kGroup / 2));
      });
    }
  }
  scales.finish();
}

template <typename T, typename Scales, bool kIsGated, bool kHasPairs, int kNumGroups>
cudaError_t launch(const Args& args, int num_sms, cudaStream_t stream) {
  constexpr int64_t kPerBlock = kThreads * kNumGroups;
  const int64_t wanted = (int64_t{args.total_groups} + kPerBlock - 1) / kPerBlock;
  const int64_t most = int64_t{kMaxBlocksPerSm} * num_sms;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(wanted < most ? wanted : most));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, nvfp4_quant_kernel<T, Scales, kIsGated, kHasPairs, kNumGroups>,
                            args);
}

template <typename T, typename Scales, bool kIsGated, bool kHasPairs = false>
cudaError_t launch_typed(const Args& args, int num_sms, cudaStream_t stream) {
  // Several groups per thread where that still leaves each multiprocessor two blocks.
  constexpr int kNumGroups = kIsGated ? (kGroupsInFlight + 1) / 2 : kGroupsInFlight;
  if (args.total_groups >= int64_t{2} * kThreads * kNumGroups * num_sms) {
    return launch<T, Scales, kIsGated, kHasPairs, kNumGroups>(args, num_sms, stream);
  }
  return launch<T, Scales, kIsGated, kHasPairs, 1>(args, num_sms, stream);
}

template <typename T, bool kIsGated>
cudaError_t launch_layout(const Args& args, int num_sms, cudaStream_t stream) {
  switch (args.quant.layout) {
    case ScaleLayout::kLinear:
      return launch_typed<T, LinearScales, kIsGated>(args, num_sms, stream);
    case ScaleLayout::kSwizzled:
      return launch_typed<T, SwizzledScales, kIsGated>(args, num_sms, stream);
    default:
      if constexpr (!kIsGated) {
        if (args.quant.pairs != nullptr) {
          return launch_typed<T, GroupedScales, false, true>(args, num_sms, stream);
        }
      }
      return launch_typed<T, GroupedScales, kIsGated>(args, num_sms, stream);
  }
}

template <typename T>
cudaError_t launch_gated(const Args& args, int num_sms, cudaStream_t stream) {
  return args.quant.is_gated ? launch_layout<T, true>(args, num_sms, stream)
                             : launch_layout<T, false>(args, num_sms, stream);
}

}  // namespace

cudaError_t launch_nvfp4_quant(const Nvfp4Quant& quant, int num_sms, cudaStream_t stream) {
  if (quant.m == 0) return cudaSuccess;
  const Args args{quant, Divisor(static_cast<uint32_t>(quant.num_groups)),
                  Divisor(static_cast<uint32_t>(quant.pairs != nullptr ? quant.top_k : 1)),
                  static_cast<uint32_t>(quant.m * quant.num_groups),
                  static_cast<uint32_t>(round_up(quant.num_groups, kTileColumns) / kTileColumns)};
  return quant.type == InputType::kBFloat16 ? launch_gated<__nv_bfloat16>(args, num_sms, stream)
                                            : launch_gated<__half>(args, num_sms, stream);
}

}  // namespace vllm::fp4
