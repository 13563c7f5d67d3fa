// One token per row of logits: the likeliest, or one drawn after temperature, top-k, top-p, min-p.
//
// Nothing is sorted. With d = max - logit, a token weighs exp(-d / temperature), and a filter keeps
// the tokens with d up to a limit, equal ones together. A limit is found by walking down a
// histogram of d and refining the bucket it lies in: non-negative floats order as their bits do.
//
// Weights are integers, units of 2^-weight_bits of the likeliest's. Sums of integers are exact in
// any order: the token depends neither on the number of threads or blocks nor on who adds first,
// and equals what exact arithmetic gives for these weights.
//
// A cluster of kRanks blocks shares a row, each keeping its part of a row that is drawn from in
// shared memory: logits are read once from device memory.
#include <cfloat>
#include <climits>
#include <cmath>

#include "cluster.cuh"
#include "launch.cuh"

namespace vllm::layers {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kRanksOfCluster = 8;  // the largest cluster that every chip with clusters has
constexpr int kBins = kThreads;     // thread i looks after bin i
constexpr int kBinBits = 9;
constexpr float kBinsPerUnit = 8.0f;  // of d in the first look, a power of two
constexpr int kMassSlot = kBins;      // of a histogram: the sum of everything
static_assert(kBins == 1 << kBinBits);

struct Plan {
  int segment;      // logits per rank, a multiple of 16 / sizeof(T)
  bool is_staged;   // whether shared memory holds a segment as float32
  int weight_bits;  // vocab * 2^weight_bits <= 2^63
};

struct Best {
  float value;
  int index;
};

// NaN before everything, then the larger, then the first, as torch.argmax.
__device__ __forceinline__ bool is_better(const Best& a, const Best& b) {
  const bool is_a_nan = a.value != a.value, is_b_nan = b.value != b.value;
  if (is_a_nan != is_b_nan) return is_a_nan;
  if (is_a_nan || a.value == b.value) return a.index < b.index;
  return a.value > b.value;
}

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
  Best best;  // read by other ranks
  Found found;
};

// The pieces of a row whose sums are found on the way to a token, over all warps of all ranks: one
// for each thread of a block. This many fall to one warp.
template <int kRanks>
constexpr int kPieces = kThreads / (kRanks * kWarps);

// The part of a row that one rank, and in it one warp, looks after.
template <typename T>
struct Segment {
  const T* row;
  float* staged;  // segment in shared memory, or null
  int begin, end, warp_begin, warp_end, piece_size;

  __device__ __forceinline__ float at(int i) const {
    return staged != nullptr ? staged[i - begin] : to_float(row[i]);
  }
};

template <int kRanks, typename T>
__device__ __forceinline__ Segment<T> segment_of(const SampleArgs& args, const Plan& plan,
                                                 float* staged) {
  const int64_t row = blockIdx.x / kRanks;
  const int vocab = static_cast<int>(args.vocab);
  const int rank = Cluster<kRanks>::rank(), warp = threadIdx.x / 32;
  Segment<T> part;
  part.row = static_cast<const T*>(args.logits) + row * args.row_stride;
  part.staged = staged;
  part.begin = min(rank * plan.segment, vocab);
  part.end = min(part.begin + plan.segment, vocab);
  constexpr int kPiecesOfRank = kPieces<kRanks> * kWarps;
  part.piece_size = (plan.segment + kPiecesOfRank - 1) / kPiecesOfRank;
  const int per_warp = part.piece_size * kPieces<kRanks>;
  part.warp_begin = min(part.begin + warp * per_warp, part.end);
  part.warp_end = min(part.warp_begin + per_warp, part.end);
  return part;
}

// Of the first largest logit of the rank; the segment is staged on the way where it has room.
template <typename T>
__device__ __forceinline__ Best best_of_thread(const Segment<T>& part, bool is_vector) {
  constexpr int kPerAccess = 16 / sizeof(T);
  Best best = {-INFINITY, INT_MAX};
  const auto look_at = [&](float value, int index) {
    if (value > best.value || (value != value && best.value == best.value)) best = {value, index};
  };
  const int num_vectors = is_vector ? (part.end - part.begin) / kPerAccess : 0;
  const auto* vectors = reinterpret_cast<const Packed<T>*>(part.row + part.begin);
#pragma unroll 4
  for (int v = threadIdx.x; v < num_vectors; v += kThreads) {
    const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(vectors + v));
    const Packed<T> packed = *reinterpret_cast<const Packed<T>*>(&loaded);
#pragma unroll
    for (int i = 0; i < kPerAccess; ++i) {
      look_at(to_float(packed.values[i]), part.begin + v * kPerAccess + i);
    }
    if (part.staged != nullptr) {
#pragma unroll
      for (int i = 0; i < kPerAccess; i += 4) {
        *reinterpret_cast<float4*>(part.staged + v * kPerAccess + i) = {
            to_float(packed.values[i]), to_float(packed.values[i + 1]),
            to_float(packed.values[i + 2]), to_float(packed.values[i + 3])};
      }
    }
  }
#pragma unroll 4
  for (int i = part.begin + num_vectors * kPerAccess + threadIdx.x; i < part.end; i += kThreads) {
    const float value = to_float(part.row[i]);
    look_at(value, i);
    if (part.staged != nullptr) part.staged[i - part.begin] = value;
  }
  return best;
}

// Of the row, for all threads of all ranks.
template <int kRanks>
__device__ __forceinline__ Best best_of_row(Best best, Shared& shared) {
  const auto reduce_warp = [&best] {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const Best other = {__shfl_xor_sync(kAllLanes, best.value, lanes),
                          __shfl_xor_sync(kAllLanes, best.index, lanes)};
      if (is_better(other, best)) best = other;
    }
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  reduce_warp();
  if (lane == 0) shared.warp_best[warp] = best;
  __syncthreads();
  if (warp == 0) {
    best = shared.warp_best[lane % kWarps];
    reduce_warp();
    if (lane == 0) shared.best = best;
  }
  Cluster<kRanks>::sync();
  best = shared.best;
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank) {
    const Best other = *Cluster<kRanks>::of(&shared.best, rank);
    if (is_better(other, best)) best = other;
  }
  return best;
}

struct Weights {
  double minus_inverse_temperature, unit;
  float reach;  // weights of larger d round to zero

  __device__ __forceinline__ Weights(float temperature, int weight_bits) {
    minus_inverse_temperature = -1.0 / static_cast<double>(temperature);
    unit = static_cast<double>(uint64_t{1} << weight_bits);
    reach = static_cast<float>(weight_bits + 2) * 0.6931472f * temperature;
  }
  __device__ __forceinline__ uint64_t of(float d) const {
    if (d > reach) return 0;
    return __double2ull_rn(exp(static_cast<double>(d) * minus_inverse_temperature) * unit);
  }
};

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
template <bool kBySum, int kRanks, typename T>
__device__ __forceinline__ float find_limit(const Segment<T>& part, float max_logit, float most,
                                            const Weights& weights, uint64_t wanted, int& turn,
                                            Shared& shared) {
  Range range = {0, __float_as_uint(FLT_MAX) + 1, 0, true};
  uint64_t above = 0, target = wanted;
  while (true) {
    auto& histogram = shared.histograms[turn ^= 1];
    histogram.clear();
    __syncthreads();
    uint64_t mass = 0;
    for (int i = part.warp_begin + threadIdx.x % 32; i < part.warp_end; i += 32) {
      const float d = max_logit - part.at(i);
      if (!(d <= most)) continue;
      const uint32_t bin = range.bin_of(d);
      // What the bins before do not reach lies in the last one, which need not be counted: far
      // from the likeliest it may hold most of the row.
      const bool is_counted = bin < kBins - 1;
      if (!is_counted && !(kBySum && range.is_first)) continue;
      const uint64_t amount = kBySum ? weights.of(d) : 1;
      if (is_counted && amount > 0) histogram.add(bin, amount);
      mass += amount;
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
template <int kRanks, typename T>
__device__ __forceinline__ int draw(const Segment<T>& part, const Best& best, float limit,
                                    const Weights& weights, double uniform, Shared& shared) {
  constexpr int kPiecesOfRank = kPieces<kRanks> * kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = Cluster<kRanks>::rank();
  const auto weight_at = [&](int i, int end) -> uint64_t {
    if (i >= end) return 0;
    const float d = best.value - part.at(i);
    return d <= limit ? weights.of(d) : 0;
  };
  const auto begin_of = [&](int piece) {
    return min(part.warp_begin + piece * part.piece_size, part.warp_end);
  };
  for (int piece = 0; piece < kPieces<kRanks>; ++piece) {
    const int end = begin_of(piece + 1);
    uint64_t sum = 0;
    for (int i = begin_of(piece) + lane; i < end; i += 32) sum += weight_at(i, end);
    sum = sum_over_warp(sum);
    if (lane == 0) shared.piece_sums[warp * kPieces<kRanks> + piece] = sum;
  }
  Cluster<kRanks>::sync();
  // Thread i brings the sum of the row's i-th piece.
  const uint64_t amount = Cluster<kRanks>::of(
      shared.piece_sums, threadIdx.x / kPiecesOfRank)[threadIdx.x % kPiecesOfRank];
  const BlockSums sums = sums_over_block<kWarps>(amount, shared.scan);
  // The first token with which the sum exceeds this point.
  const uint64_t point = __umul64hi(fraction_of(uniform), sums.total);
  if (sums.up_to_here > point && sums.up_to_here - amount <= point) {
    shared.found = {static_cast<int>(threadIdx.x), sums.up_to_here - amount, false};
  }
  __syncthreads();
  if (sums.total == 0) return rank == 0 && threadIdx.x == 0 ? best.index : -1;
  const Found found = shared.found;
  if (found.bin / kPieces<kRanks> != rank * kWarps + warp) return -1;
  const int piece = found.bin % kPieces<kRanks>, end = begin_of(piece + 1);
  uint64_t rest = point - found.before;
  for (int first = begin_of(piece); first < end; first += 32) {
    const uint64_t up_to_here = inclusive_sum_over_warp(weight_at(first + lane, end));
    const unsigned beyond = __ballot_sync(kAllLanes, up_to_here > rest);
    if (beyond != 0) return lane == __ffs(beyond) - 1 ? first + lane : -1;
    rest -= __shfl_sync(kAllLanes, up_to_here, 31);
  }
  return -1;
}

// The largest d that min_p keeps.
__device__ __forceinline__ float min_p_limit(float min_p, float temperature) {
  if (!(min_p > 0)) return FLT_MAX;
  const double limit = -log(static_cast<double>(min_p)) * static_cast<double>(temperature);
  return fminf(FLT_MAX, __double2float_rd(limit));
}

template <typename T, int kRanks>
__global__ __launch_bounds__(kThreads, 2) void sample_kernel(SampleArgs args, Plan plan) {
  extern __shared__ float4 staged[];
  __shared__ Shared shared;
  wait_for_inputs();
  const int64_t row = blockIdx.x / kRanks;
  const float temperature = args.temperature[row];
  const bool is_greedy = !(temperature > 0);
  const bool is_staged = plan.is_staged && !is_greedy;
  const auto part =
      segment_of<kRanks, T>(args, plan, is_staged ? reinterpret_cast<float*>(staged) : nullptr);
  const Best best = best_of_row<kRanks>(best_of_thread(part, args.is_vector), shared);
  int token = -1;
  if (is_greedy || !(best.value > -INFINITY && best.value < INFINITY)) {
    // The index of a row of minus infinities was never set.
    if (Cluster<kRanks>::rank() == 0 && threadIdx.x == 0) {
      token = best.index == INT_MAX ? 0 : best.index;
    }
  } else {
    const Weights weights(temperature, plan.weight_bits);
    float limit = FLT_MAX;
    int turn = 0;
    const int64_t top_k = args.top_k[row];
    if (top_k > 0 && top_k < args.vocab) {
      limit = find_limit<false, kRanks>(part, best.value, limit, weights,
                                        static_cast<uint64_t>(top_k), turn, shared);
    }
    if (const float top_p = args.top_p[row]; top_p < 1) {
      limit = find_limit<true, kRanks>(part, best.value, limit, weights, fraction_of(top_p), turn,
                                       shared);
    }
    limit = fminf(limit, min_p_limit(args.min_p[row], temperature));
    token = draw<kRanks>(part, best, limit, weights, args.uniforms[row], shared);
  }
  if (token >= 0) args.tokens[row] = token;
  // Other ranks may still read this one's shared memory.
  __syncwarp();
  if constexpr (kRanks > 1) Cluster<kRanks>::sync();
}

template <typename T, int kRanks>
cudaError_t launch_typed(const SampleArgs& args, cudaStream_t stream) {
  constexpr int64_t kPerAccess = 16 / sizeof(T);
  const auto kernel = sample_kernel<T, kRanks>;
  int most_shared = 0;
  cudaError_t error = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&most_shared);
  if (error != cudaSuccess) return error;
  Plan plan;
  const int64_t per_rank = (args.vocab + kRanks - 1) / kRanks;
  plan.segment = static_cast<int>((per_rank + kPerAccess - 1) / kPerAccess * kPerAccess);
  plan.weight_bits = 63;
  for (int64_t size = 1; size < args.vocab; size *= 2) --plan.weight_bits;
  const int64_t needed = plan.segment * int64_t{sizeof(float)};
  const int64_t room = most_shared - (static_cast<int64_t>(sizeof(Shared)) + 1023) / 1024 * 1024;
  plan.is_staged = needed <= room;
  const size_t shared_bytes = plan.is_staged ? needed : 0;
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
