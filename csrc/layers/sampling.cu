// One token per row of logits: the likeliest, or one drawn after temperature, top-k, top-p, min-p.
//
// Nothing is sorted. With d = max - logit, a token weighs exp(-d / temperature), and a filter keeps
// the tokens with d up to a limit, equal ones together. A limit is found by walking down a
// histogram of d and refining the bucket it lies in: non-negative floats order as their bits do.
//
// A weight is a float32, to 2^-21 of itself, rounded to an integer number of units of
// 2^-weight_bits of the likeliest's. Sums of integers are exact in any order: the token depends
// neither on the number of threads or blocks nor on who adds first, and equals what exact
// arithmetic gives for these weights.
//
// A cluster of kRanks blocks shares a row, each keeping its part in shared memory as it is stored:
// logits are read once from device memory.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <type_traits>

#include "cluster.cuh"
#include "launch.cuh"
#include "sampling_weights.cuh"

namespace vllm::layers {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kRanksOfCluster = 8;  // the largest cluster that every chip with clusters has
constexpr int kBins = kThreads;     // thread i looks after bin i
constexpr int kBinBits = 9;
constexpr float kBinsPerUnit = 8.0f;  // of d in the first look, a power of two
constexpr int kMaxWeightBits = 51;    // a weight is rounded in the mantissa of a double
constexpr int kVectors = 5;  // 16-byte loads of a thread in flight: 2 rounds for 151,936 logits
constexpr int kMassSlot = kBins;  // of a histogram: the sum of everything
static_assert(kBins == 1 << kBinBits);
// Of a multiprocessor: while some wait, for logits or each other, others compute.
template <typename T, bool kIsStaged>
constexpr int kMinBlocks = kIsStaged && sizeof(T) == 2 ? 3 : 2;
template <typename T>
constexpr int kPerAccess = 16 / sizeof(T);  // logits of 16 bytes

struct Plan {
  int segment;      // logits per rank, a multiple of 8
  int weight_bits;  // vocab * 2^weight_bits <= 2^63, at most kMaxWeightBits
};

struct Best {
  float value;
  int index;  // of the first logit of its access, until index_of
};

// Its index if `largest`, of several of which NaN is the largest, is its value.
__device__ __forceinline__ int index_if(const Best& best, float largest) {
  const bool is_nan = best.value != best.value && largest != largest;
  return is_nan || best.value == largest ? best.index : INT_MAX;
}

// How a row is drawn from.
struct Settings {
  int64_t top_k;
  double uniform;
  float top_p, min_p;
};

// The bin in which a sum reaches its target, and the sum of the bins before it.
struct Found {
  int bin;
  uint64_t before;
  bool is_exact;  // the sum with the bin is the target
};

struct Shared {
  // Two in turn: one is cleared while other ranks may still read the other.
  Histogram<kBins + 1> histograms[2];
  uint64_t piece_sums[kThreads];  // of the rank's pieces, read by other ranks
  uint64_t scan[kWarps];
  Best warp_best[kWarps];
  Best rank_best[kRanksOfCluster];  // written by those ranks
  Found found;
  Settings settings;
};

// kSize logits that lie at a multiple of their size, in one access.
template <typename T, int kSize>
__device__ __forceinline__ void load_aligned(const T* source, float (&values)[kSize]) {
  using Vector = std::conditional_t<kSize * sizeof(T) == 16, uint4, uint2>;
  static_assert(kSize * sizeof(T) == sizeof(Vector));
  const Vector loaded = *reinterpret_cast<const Vector*>(source);
  uint32_t words[sizeof(Vector) / 4] = {loaded.x, loaded.y};
  if constexpr (sizeof(Vector) == 16) words[2] = loaded.z, words[3] = loaded.w;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = __uint_as_float(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
}

// NaN if there is one.
template <typename T>
__device__ __forceinline__ float largest_of(const uint4& access) {
  if constexpr (sizeof(T) == 4) {
    return max_or_nan(max_or_nan(__uint_as_float(access.x), __uint_as_float(access.y)),
                      max_or_nan(__uint_as_float(access.z), __uint_as_float(access.w)));
  } else {
    const auto pair = [](const uint32_t& word) {
      return *reinterpret_cast<const __nv_bfloat162*>(&word);
    };
    const __nv_bfloat162 largest = __hmax2_nan(__hmax2_nan(pair(access.x), pair(access.y)),
                                               __hmax2_nan(pair(access.z), pair(access.w)));
    return max_or_nan(__bfloat162float(largest.x), __bfloat162float(largest.y));
  }
}

// The part of a row that one rank looks after: logits [begin, begin + size), counted from 0 below.
// kIsStaged: shared memory holds it.
template <typename T, bool kIsStaged>
struct Segment {
  const T* row;  // at begin
  T* staged;     // filled with minus infinity to a whole access
  int begin, size;

  // max_logit - logit of kSize logits from i on, a multiple of kSize: an access or half of one.
  // Infinity beyond the segment.
  template <int kSize>
  __device__ __forceinline__ void load(int i, float max_logit, float (&d)[kSize]) const {
    if constexpr (kIsStaged) {
      load_aligned(staged + i, d);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) d[j] = i + j < size ? to_float(row[i + j]) : -INFINITY;
    }
#pragma unroll
    for (float& value : d) value = max_logit - value;
  }
};

template <int kRanks, bool kIsStaged, typename T>
__device__ __forceinline__ Segment<T, kIsStaged> segment_of(const SampleArgs& args,
                                                            const Plan& plan, T* staged) {
  const int64_t row = blockIdx.x / kRanks;
  const int vocab = static_cast<int>(args.vocab);
  Segment<T, kIsStaged> part;
  part.begin = min(Cluster<kRanks>::rank() * plan.segment, vocab);
  part.size = min(plan.segment, vocab - part.begin);
  part.row = static_cast<const T*>(args.logits) + row * args.row_stride + part.begin;
  part.staged = staged;
  return part;
}

// Of the first largest logit that the thread sees; the segment is staged on the way.
template <bool kIsStaged, typename T>
__device__ __forceinline__ Best best_of_thread(const Segment<T, kIsStaged>& part, bool is_vector) {
  Best best = {-INFINITY, INT_MAX};
  const auto look_at = [&](float value, int index) {
    // Larger, or the first NaN.
    if (!(value <= best.value) && best.value == best.value) best = {value, index};
  };
  const int num_vectors = is_vector ? part.size / kPerAccess<T> : 0;
  for (int first = threadIdx.x; first < num_vectors; first += kVectors * kThreads) {
    uint4 loaded[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int v = first + j * kThreads;
      if (v < num_vectors) loaded[j] = __ldg(reinterpret_cast<const uint4*>(part.row) + v);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int v = first + j * kThreads;
      if (v >= num_vectors) continue;
      look_at(largest_of<T>(loaded[j]), part.begin + v * kPerAccess<T>);
      if constexpr (kIsStaged) reinterpret_cast<uint4*>(part.staged)[v] = loaded[j];
    }
  }
  const int padded = (part.size + kPerAccess<T> - 1) / kPerAccess<T> * kPerAccess<T>;
#pragma unroll 4
  for (int i = num_vectors * kPerAccess<T> + threadIdx.x; i < padded; i += kThreads) {
    const T value = i < part.size ? part.row[i] : from_float<T>(-INFINITY);
    look_at(to_float(value), part.begin + i);
    if constexpr (kIsStaged) part.staged[i] = value;
  }
  return best;
}

// Of the first of the largest logits in the access that begins at best.index, for a whole warp.
template <bool kIsStaged, typename T>
__device__ __forceinline__ int index_of(const Best& best, const Segment<T, kIsStaged>& part) {
  if (best.index == INT_MAX) return INT_MAX;
  const int lane = threadIdx.x % 32, i = best.index - part.begin + lane;
  const bool is_inside = lane < kPerAccess<T> && i < part.size;
  const float value = is_inside ? to_float(part.row[i]) : -INFINITY;
  const bool is_nan = value != value && best.value != best.value;
  return best.index + __ffs(__ballot_sync(kAllLanes, is_nan || value == best.value)) - 1;
}

// NaN before everything, then the larger, then the first, as torch.argmax.
__device__ __forceinline__ Best best_of_warp(const Best& best) {
  float largest = best.value;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    largest = max_or_nan(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
  }
  int index = index_if(best, largest);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    index = min(index, __shfl_xor_sync(kAllLanes, index, lanes));
  }
  return {largest, index};
}

// Tells the ranks that need it, the first alone where is_greedy, the best of this one; the barrier
// of the cluster makes it known. Its index is right where it may be the token.
template <int kRanks, bool kIsStaged, typename T>
__device__ __forceinline__ void share_best(Best best, const Segment<T, kIsStaged>& part,
                                           bool is_greedy, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  best = best_of_warp(best);
  if (lane == 0) shared.warp_best[warp] = best;
  __syncthreads();
  if (warp == 0) {
    best = best_of_warp(shared.warp_best[lane % kWarps]);
    if (is_greedy || !(best.value < INFINITY)) best.index = index_of(best, part);
  }
  Cluster<kRanks>::wait();  // for all ranks to have started
  if (threadIdx.x < (is_greedy ? 1 : kRanks)) {
    *Cluster<kRanks>::of(&shared.rank_best[Cluster<kRanks>::rank()], threadIdx.x) = best;
  }
}

// floor(x * 2^64) for x in [0, 1), exact where x has no bits below 2^-64.
__device__ __forceinline__ uint64_t fraction_of(double x) { return __double2ull_rz(x * 0x1p64); }

// For all threads: the first of kThreads bins, of which each thread brings one, with which `above`
// and the bins so far reach `target` > above; the last one where none does.
__device__ __forceinline__ Found find_bin(uint64_t amount, uint64_t above, uint64_t target,
                                          Shared& shared) {
  const BlockSums sums = sums_over_block<kWarps>(amount, shared.scan);
  const uint64_t up_to_here = above + sums.up_to_here, before = up_to_here - amount;
  const bool is_last = threadIdx.x == kThreads - 1;
  if (before < target && (up_to_here >= target || is_last)) {
    shared.found = {static_cast<int>(threadIdx.x), before, up_to_here == target};
  }
  __syncthreads();
  return shared.found;
}

// Bits of d from `low` to below `high`, in bins of 2^shift; `first` for the first look at all d,
// whose bins are even.
struct Range {
  uint32_t low, high;
  int shift;
  bool is_first;

  // kBins and beyond where d lies outside.
  __device__ __forceinline__ uint32_t bin_of(float d) const {
    const uint32_t bits = __float_as_uint(d);
    if (is_first) return static_cast<uint32_t>(fminf(d * kBinsPerUnit, kBins - 1));
    return bits < low || bits >= high ? kBins : (bits - low) >> shift;
  }
  __device__ __forceinline__ Range refined(int bin) const {
    // Where nothing reaches the target, the last bin may lie beyond `high`.
    Range next = {min(low + (static_cast<uint32_t>(bin) << shift), high - 1), 0, 0, false};
    next.high = min(high, next.low + (1u << shift));
    if (is_first) {
      next.low = __float_as_uint(bin / kBinsPerUnit);
      next.high = bin == kBins - 1 ? high : __float_as_uint((bin + 1) / kBinsPerUnit);
    }
    next.shift = max(0, 32 - __clz(next.high - next.low - 1) - kBinBits);
    return next;
  }
};

// The smallest limit such that the tokens with d <= limit reach a target: `wanted` of them, or
// (kBySum) the fraction wanted / 2^64 of the sum of the weights with d <= `most`. At most `most`.
template <bool kBySum, int kRanks, bool kIsStaged, typename T>
__device__ __forceinline__ float find_limit(const Segment<T, kIsStaged>& part, float max_logit,
                                            float most, const Weights& weights, uint64_t wanted,
                                            int& turn, Shared& shared) {
  constexpr int kSize = 4;
  const float weighed = fminf(most, weights.reach);
  Range range = {0, __float_as_uint(FLT_MAX) + 1, 0, true};
  uint64_t above = 0, target = wanted;
  while (true) {
    auto& histogram = shared.histograms[turn ^= 1];
    histogram.clear();
    __syncthreads();
    uint64_t mass = 0;
    for (int i = kSize * threadIdx.x; i < part.size; i += kSize * kThreads) {
      float d[kSize];
      part.load(i, max_logit, d);
      uint32_t bins[kSize];
      bool is_needed = false;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        bins[j] = d[j] <= most ? range.bin_of(d[j]) : kBins;
        is_needed |= bins[j] < kBins - 1 || (kBySum && range.is_first && d[j] <= most);
      }
      if (!is_needed) continue;
      uint64_t amounts[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) amounts[j] = kBySum ? weights.of(d[j], weighed) : 0;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        mass += amounts[j];
        // What the bins before do not reach lies in the last one, which need not be counted: far
        // from the likeliest it may hold most of the row.
        if (bins[j] >= kBins - 1) continue;
        if (!kBySum) histogram.count(bins[j]);
        if (amounts[j] > 0) histogram.add(bins[j], amounts[j]);
      }
    }
    if (kBySum && range.is_first) {
      mass = sum_over_warp(mass);
      if (threadIdx.x % 32 == 0) histogram.add(kMassSlot, mass);
    }
    Cluster<kRanks>::sync();
    uint64_t amount = 0;
    mass = 0;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto* other = Cluster<kRanks>::of(&histogram, rank);
      amount += other->get(threadIdx.x);
      if (kBySum && range.is_first) mass += other->get(kMassSlot);
    }
    if (kBySum && range.is_first) {
      const bool has_rest = wanted * mass != 0;  // the low half of the product
      target = __umul64hi(wanted, mass) + has_rest;
      target = target > 0 ? target : 1;
    }
    const Found found = find_bin(amount, above, target, shared);
    range = range.refined(found.bin);
    above = found.before;
    const bool is_whole = found.is_exact && found.bin < kBins - 1;
    if (is_whole || range.high - range.low == 1) break;
  }
  return fminf(most, __uint_as_float(range.high - 1));
}

// The token at `uniform` of the cumulated weights with d <= limit; -1 in all threads but one.
//
// A row is cut into kThreads pieces; kLanes threads sum one up.
template <int kRanks, bool kIsStaged, typename T>
__device__ __forceinline__ int draw(const Segment<T, kIsStaged>& part, const Plan& plan,
                                    float max_logit, float limit, const Weights& weights,
                                    double uniform, Shared& shared) {
  constexpr int kLanes = kRanks, kPieces = kThreads / kLanes, kSize = kPerAccess<T>;
  const int piece_size = (plan.segment / kSize + kPieces - 1) / kPieces * kSize;
  limit = fminf(limit, weights.reach);
  // Of an access, those with d > limit left out.
  const auto load_weights = [&](int i, uint64_t (&amounts)[kSize]) {
    float d[kSize];
    part.load(i, max_logit, d);
    float least = d[0];
#pragma unroll
    for (int j = 1; j < kSize; ++j) least = fminf(least, d[j]);
#pragma unroll
    for (uint64_t& amount : amounts) amount = 0;
    if (least > limit) return uint64_t{0};
    uint64_t all = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const uint64_t amount = weights.beyond_zero(d[j], limit);
      all += amount;
      amounts[j] = amount - Weights::kZero;
    }
    return all - kSize * Weights::kZero;
  };
  uint64_t sum = 0;
  const int begin = threadIdx.x / kLanes * piece_size;
  const int end = min(begin + piece_size, part.size);
  for (int i = begin + kSize * (threadIdx.x % kLanes); i < end; i += kSize * kLanes) {
    uint64_t unused[kSize];
    sum += load_weights(i, unused);
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  }
  if (threadIdx.x % kLanes == 0) shared.piece_sums[threadIdx.x / kLanes] = sum;
  Cluster<kRanks>::sync();
  // Thread i brings the sum of the row's i-th piece.
  const uint64_t amount =
      Cluster<kRanks>::of(shared.piece_sums, threadIdx.x / kPieces)[threadIdx.x % kPieces];
  const BlockSums sums = sums_over_block<kWarps>(amount, shared.scan);
  Cluster<kRanks>::arrive_relaxed();  // this one has read what others keep
  // The first token with which the sum exceeds this point.
  const uint64_t point = __umul64hi(fraction_of(uniform), sums.total);
  if (sums.up_to_here > point && sums.up_to_here - amount <= point) {
    shared.found = {static_cast<int>(threadIdx.x), sums.up_to_here - amount, false};
  }
  __syncthreads();
  const int rank = Cluster<kRanks>::rank(), lane = threadIdx.x % 32;
  const Found found = shared.found;
  if (found.bin / kPieces != rank || threadIdx.x >= 32) return -1;
  uint64_t rest = point - found.before;
  const int found_begin = found.bin % kPieces * piece_size;
  const int found_end = min(found_begin + piece_size, part.size);
  for (int first = found_begin; first < found_end; first += kSize * 32) {
    const int i = first + kSize * lane;
    uint64_t amounts[kSize] = {};
    sum = i < found_end ? load_weights(i, amounts) : 0;
    uint64_t up_to_here = inclusive_sum_over_warp(sum);
    const unsigned beyond = __ballot_sync(kAllLanes, up_to_here > rest);
    if (beyond == 0) {
      rest -= __shfl_sync(kAllLanes, up_to_here, 31);
      continue;
    }
    if (lane != __ffs(beyond) - 1) return -1;
    // Back from the last one: the first whose predecessors do not exceed the point.
    int back = 0;
#pragma unroll
    for (int j = kSize - 1; j > 0; --j) {
      up_to_here -= amounts[j];
      back += up_to_here > rest;
    }
    return part.begin + i + kSize - 1 - back;
  }
  return -1;
}

template <typename T, int kRanks, bool kIsStaged>
__global__ __launch_bounds__(kThreads, kMinBlocks<T, kIsStaged>) void sample_kernel(SampleArgs args,
                                                                                    Plan plan) {
  extern __shared__ float4 staged[];
  __shared__ Shared shared;
  Cluster<kRanks>::arrive_relaxed();
  wait_for_inputs();
  const int64_t row = blockIdx.x / kRanks;
  const bool is_first = Cluster<kRanks>::rank() == 0 && threadIdx.x == 0;
  const float temperature = args.temperature[row];  // not looked at before logits are asked for
  const auto part = segment_of<kRanks, kIsStaged, T>(args, plan, reinterpret_cast<T*>(staged));
  const Best own = best_of_thread(part, args.is_vector);
  const bool is_greedy = !(temperature > 0);
  // Asked for before it is needed, by a warp that has nothing else to do.
  const bool is_reader = threadIdx.x == kThreads - 1;
  Settings settings;
  if (is_reader) {
    settings = {args.top_k[row], args.uniforms[row], args.top_p[row], args.min_p[row]};
  }
  share_best<kRanks>(own, part, is_greedy, shared);
  if (is_reader) shared.settings = settings;
  Cluster<kRanks>::arrive();
  // Nobody reads or writes what is here.
  if (is_greedy && Cluster<kRanks>::rank() > 0) return;
  const Weights weights(temperature, plan.weight_bits);
  Cluster<kRanks>::wait();
  float max_logit = shared.rank_best[0].value;
#pragma unroll
  for (int rank = 1; rank < kRanks; ++rank) {
    max_logit = max_or_nan(max_logit, shared.rank_best[rank].value);
  }
  if (is_greedy || !(max_logit > -INFINITY && max_logit < INFINITY)) {
    if (!is_first) return;
    int token = INT_MAX;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      token = min(token, index_if(shared.rank_best[rank], max_logit));
    }
    // Minus infinity is never larger: its index was never set.
    args.tokens[row] = token == INT_MAX ? 0 : token;
    return;
  }
  float limit = FLT_MAX;
  int turn = 0;
  if (const int64_t top_k = shared.settings.top_k; top_k > 0 && top_k < args.vocab) {
    limit = find_limit<false, kRanks>(part, max_logit, limit, weights, static_cast<uint64_t>(top_k),
                                      turn, shared);
  }
  if (const float top_p = shared.settings.top_p; top_p < 1) {
    limit =
        find_limit<true, kRanks>(part, max_logit, limit, weights, fraction_of(top_p), turn, shared);
  }
  limit = fminf(limit, min_p_limit(shared.settings.min_p, temperature));
  const int token =
      draw<kRanks>(part, plan, max_logit, limit, weights, shared.settings.uniform, shared);
  if (token >= 0) args.tokens[row] = token;
  // Other ranks may still read this one's shared memory.
  __syncwarp();
  if constexpr (kRanks > 1) Cluster<kRanks>::wait();
}

template <typename T, int kRanks>
cudaError_t launch_typed(const SampleArgs& args, cudaStream_t stream) {
  int most_shared = 0;
  cudaError_t error = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&most_shared);
  if (error != cudaSuccess) return error;
  Plan plan;
  const int64_t per_rank = (args.vocab + kRanks - 1) / kRanks;
  plan.segment = static_cast<int>((per_rank + 7) / 8 * 8);
  plan.weight_bits = 63;
  for (int64_t size = 1; size < args.vocab; size *= 2) --plan.weight_bits;
  plan.weight_bits = std::min(plan.weight_bits, kMaxWeightBits);
  const int64_t needed = plan.segment * int64_t{sizeof(T)};
  const int64_t room = most_shared - (static_cast<int64_t>(sizeof(Shared)) + 1023) / 1024 * 1024;
  const bool is_staged = needed <= room;
  const auto kernel = is_staged ? sample_kernel<T, kRanks, true> : sample_kernel<T, kRanks, false>;
  const size_t shared_bytes = is_staged ? needed : 0;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(room));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(args.num_rows * kRanks));
  return launch(kernel, {grid, kThreads, shared_bytes, kRanks}, stream, args, plan);
}

}  // namespace

cudaError_t launch_sample(const SampleArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  if (args.num_rows > INT32_MAX / kRanksOfCluster) return cudaErrorInvalidValue;
  bool can_share = false;
  const cudaError_t error = has_clusters(&can_share);
  if (error != cudaSuccess) return error;
  const auto run = [&]<typename T>() {
    return can_share ? launch_typed<T, kRanksOfCluster>(args, stream)
                     : launch_typed<T, 1>(args, stream);
  };
  return args.type == FloatType::kFloat32 ? run.template operator()<float>()
                                          : run.template operator()<__nv_bfloat16>();
}

}  // namespace vllm::layers
