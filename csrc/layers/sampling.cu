// One token per row of logits: the likeliest, or one drawn after temperature, top-k, top-p, min-p.
//
// Nothing is sorted. With d = max - logit, a token weighs exp(-d / temperature), and a filter keeps
// the tokens with d up to a limit, equal ones together. A limit is found by walking down a
// histogram of d and refining the bucket it lies in: non-negative floats order as their bits do.
//
// Weights are integers, units of 2^-weight_bits of the likeliest's, computed in double precision
// without branches, since most of the time goes into them. Sums of integers are exact in any order:
// the token depends neither on the number of threads or blocks nor on who adds first, and equals
// what exact arithmetic gives for these weights.
//
// A cluster of kRanks blocks shares a row, each keeping its part of a row that is drawn from in
// shared memory: logits are read once from device memory.
#include <algorithm>
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
constexpr int kMaxWeightBits = 51;    // a weight is rounded in the mantissa of a double
constexpr int kVectors = 5;  // 16-byte loads of a thread in flight: 2 rounds for 151,936 logits
constexpr int kMassSlot = kBins;  // of a histogram: the sum of everything
static_assert(kBins == 1 << kBinBits);

struct Plan {
  int segment;      // logits per rank, a multiple of 8
  bool is_staged;   // whether shared memory holds a segment as float32
  int weight_bits;  // vocab * 2^weight_bits <= 2^63, at most kMaxWeightBits
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
  Best rank_best[kRanksOfCluster];  // written by those ranks
  Found found;
};

// The part of a row that one rank looks after: logits [begin, begin + size), counted from 0 below.
template <typename T>
struct Segment {
  const T* row;   // at begin
  float* staged;  // the segment in shared memory, filled with minus infinity to a multiple of 4;
                  // null where it is not there
  int begin, size;

  // max_logit - logit of four logits from i on, a multiple of 4; infinity beyond the segment.
  __device__ __forceinline__ void load_four(int i, float max_logit, float (&d)[4]) const {
    if (staged != nullptr) {
      const float4 four = *reinterpret_cast<const float4*>(staged + i);
      d[0] = four.x, d[1] = four.y, d[2] = four.z, d[3] = four.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) d[j] = i + j < size ? to_float(row[i + j]) : -INFINITY;
    }
#pragma unroll
    for (float& value : d) value = max_logit - value;
  }
};

template <int kRanks, typename T>
__device__ __forceinline__ Segment<T> segment_of(const SampleArgs& args, const Plan& plan,
                                                 float* staged) {
  const int64_t row = blockIdx.x / kRanks;
  const int vocab = static_cast<int>(args.vocab);
  Segment<T> part;
  part.begin = min(Cluster<kRanks>::rank() * plan.segment, vocab);
  part.size = min(plan.segment, vocab - part.begin);
  part.row = static_cast<const T*>(args.logits) + row * args.row_stride + part.begin;
  part.staged = staged;
  return part;
}

// Of the first largest logit that the thread sees; the segment is staged on the way.
template <typename T>
__device__ __forceinline__ Best best_of_thread(const Segment<T>& part, bool is_vector) {
  constexpr int kPerAccess = 16 / sizeof(T);
  Best best = {-INFINITY, INT_MAX};
  const auto look_at = [&](float value, int index) {
    // Larger, or the first NaN.
    if (!(value <= best.value) && best.value == best.value) best = {value, index};
  };
  const int num_vectors = is_vector ? part.size / kPerAccess : 0;
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
      const Packed<T> packed = *reinterpret_cast<const Packed<T>*>(&loaded[j]);
      float values[kPerAccess];
#pragma unroll
      for (int i = 0; i < kPerAccess; ++i) {
        values[i] = to_float(packed.values[i]);
        look_at(values[i], part.begin + v * kPerAccess + i);
      }
      if (part.staged == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kPerAccess; i += 4) {
        *reinterpret_cast<float4*>(part.staged + v * kPerAccess + i) = {
            values[i], values[i + 1], values[i + 2], values[i + 3]};
      }
    }
  }
  const int padded = (part.size + 3) / 4 * 4;
#pragma unroll 4
  for (int i = num_vectors * kPerAccess + threadIdx.x; i < padded; i += kThreads) {
    const float value = i < part.size ? to_float(part.row[i]) : -INFINITY;
    look_at(value, part.begin + i);
    if (part.staged != nullptr) part.staged[i] = value;
  }
  return best;
}

__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Best other = {__shfl_xor_sync(kAllLanes, best.value, lanes),
                        __shfl_xor_sync(kAllLanes, best.index, lanes)};
    if (is_better(other, best)) best = other;
  }
  return best;
}

// Tells the first `num_readers` ranks the best of this one; the barrier of the cluster makes it
// known.
template <int kRanks>
__device__ __forceinline__ void share_best(Best best, int num_readers, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  best = best_of_warp(best);
  if (lane == 0) shared.warp_best[warp] = best;
  __syncthreads();
  if (warp == 0) best = best_of_warp(shared.warp_best[lane % kWarps]);
  Cluster<kRanks>::wait();  // for all ranks to have started
  if (threadIdx.x < num_readers) {
    *Cluster<kRanks>::of(&shared.rank_best[Cluster<kRanks>::rank()], threadIdx.x) = best;
  }
}

// 2^x for |x| <= 1/2 by its Taylor series, to 2^-46.
__device__ __forceinline__ double small_power_of_two(double x) {
  constexpr double kCoefficients[] = {
      // ln(2)^k / k!
      4.4455382718708116e-10, 7.0549116208011233e-9, 1.0178086009239699e-7, 1.3215486790144309e-6,
      1.5252733804059840e-5,  1.5403530393381609e-4, 1.3333558146428443e-3, 9.6181291076284772e-3,
      5.5504108664821580e-2,  2.4022650695910071e-1, 6.9314718055994531e-1};
  double result = kCoefficients[0];
#pragma unroll
  for (int i = 1; i < 11; ++i) result = fma(result, x, kCoefficients[i]);
  return fma(result, x, 1.0);
}

// Branchless, so that several weights are computed at once.
struct Weights {
  double slope;  // of the exponent of 2
  float reach;   // weights of larger d round to zero
  int bits;

  __device__ __forceinline__ Weights(float temperature, int weight_bits) : bits(weight_bits) {
    constexpr double kLog2E = 1.4426950408889634;
    slope = -kLog2E / static_cast<double>(temperature);
    reach = static_cast<float>(weight_bits + 2) * 0.6931472f * temperature;
  }
  __device__ __forceinline__ uint64_t of(float d) const {
    // Adding rounds to an integer, which is then the low bits of the sum.
    constexpr double kToInteger = 0x1.8p52, kToUnsigned = 0x1p52;
    const double wide = fmin(d, reach);
    const double rounded = fma(wide, slope, kToInteger);
    const double rest = fma(wide, slope, kToInteger - rounded);
    const int exponent = bits + __double2loint(rounded);
    const double scale = __hiloint2double((exponent + 1023) << 20, 0);
    const double sum = fma(small_power_of_two(rest), scale, kToUnsigned);
    return __double_as_longlong(sum) - __double_as_longlong(kToUnsigned);
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
    for (int i = 4 * threadIdx.x; i < part.size; i += 4 * kThreads) {
      float d[4];
      part.load_four(i, max_logit, d);
      uint32_t bins[4];
      bool is_needed = false;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bins[j] = d[j] <= most ? range.bin_of(d[j]) : kBins;
        is_needed |= bins[j] < kBins - 1 || (kBySum && range.is_first && d[j] <= most);
      }
      if (!is_needed) continue;
      uint64_t amounts[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) amounts[j] = kBySum && d[j] <= most ? weights.of(d[j]) : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
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
template <int kRanks, typename T>
__device__ __forceinline__ int draw(const Segment<T>& part, const Plan& plan, const Best& best,
                                    float limit, const Weights& weights, double uniform,
                                    Shared& shared) {
  constexpr int kLanes = kRanks, kPieces = kThreads / kLanes;
  const int piece_size = (plan.segment / 4 + kPieces - 1) / kPieces * 4;
  // Of four tokens, those with d > limit left out.
  const auto load_weights = [&](int i, uint64_t (&amounts)[4]) {
    float d[4];
    part.load_four(i, best.value, d);
    const bool is_any = fminf(fminf(d[0], d[1]), fminf(d[2], d[3])) <= fminf(limit, weights.reach);
#pragma unroll
    for (int j = 0; j < 4; ++j) amounts[j] = is_any && d[j] <= limit ? weights.of(d[j]) : 0;
    return amounts[0] + amounts[1] + amounts[2] + amounts[3];
  };
  uint64_t sum = 0, amounts[4];
  const int begin = threadIdx.x / kLanes * piece_size;
  const int end = min(begin + piece_size, part.size);
  for (int i = begin + 4 * (threadIdx.x % kLanes); i < end; i += 4 * kLanes) {
    sum += load_weights(i, amounts);
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
  // The first token with which the sum exceeds this point.
  const uint64_t point = __umul64hi(fraction_of(uniform), sums.total);
  if (sums.up_to_here > point && sums.up_to_here - amount <= point) {
    shared.found = {static_cast<int>(threadIdx.x), sums.up_to_here - amount, false};
  }
  __syncthreads();
  const int rank = Cluster<kRanks>::rank(), lane = threadIdx.x % 32;
  if (sums.total == 0) return rank == 0 && threadIdx.x == 0 ? best.index : -1;
  const Found found = shared.found;
  if (found.bin / kPieces != rank || threadIdx.x >= 32) return -1;
  uint64_t rest = point - found.before;
  const int found_begin = found.bin % kPieces * piece_size;
  const int found_end = min(found_begin + piece_size, part.size);
  for (int first = found_begin; first < found_end; first += 4 * 32) {
    const int i = first + 4 * lane;
    sum = i < found_end ? load_weights(i, amounts) : 0;
    uint64_t up_to_here = inclusive_sum_over_warp(sum);
    const unsigned beyond = __ballot_sync(kAllLanes, up_to_here > rest);
    if (beyond == 0) {
      rest -= __shfl_sync(kAllLanes, up_to_here, 31);
      continue;
    }
    if (lane != __ffs(beyond) - 1) return -1;
    // Back from the last of the four: the first whose predecessors do not exceed the point.
    int j = 3;
    while (j > 0 && up_to_here - amounts[j] > rest) up_to_here -= amounts[j--];
    return part.begin + i + j;
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
  Cluster<kRanks>::arrive();
  wait_for_inputs();
  const int64_t row = blockIdx.x / kRanks;
  const bool is_first = Cluster<kRanks>::rank() == 0 && threadIdx.x == 0;
  const float temperature = args.temperature[row];
  const bool is_greedy = !(temperature > 0);
  const bool is_staged = plan.is_staged && !is_greedy;
  const auto part =
      segment_of<kRanks, T>(args, plan, is_staged ? reinterpret_cast<float*>(staged) : nullptr);
  share_best<kRanks>(best_of_thread(part, args.is_vector), is_greedy ? 1 : kRanks, shared);
  Cluster<kRanks>::arrive();
  // Nobody reads or writes what is here.
  if (is_greedy && Cluster<kRanks>::rank() > 0) return;
  Cluster<kRanks>::wait();
  Best best = shared.rank_best[0];
#pragma unroll
  for (int rank = 1; rank < kRanks; ++rank) {
    if (is_better(shared.rank_best[rank], best)) best = shared.rank_best[rank];
  }
  if (is_greedy || !(best.value > -INFINITY && best.value < INFINITY)) {
    // Minus infinity is never larger: its index was never set.
    if (is_first) args.tokens[row] = best.index == INT_MAX ? 0 : best.index;
    return;
  }
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
  const int token = draw<kRanks>(part, plan, best, limit, weights, args.uniforms[row], shared);
  if (token >= 0) args.tokens[row] = token;
  // Other ranks may still read this one's shared memory.
  __syncwarp();
  if constexpr (kRanks > 1) Cluster<kRanks>::sync();
}

template <typename T, int kRanks>
cudaError_t launch_typed(const SampleArgs& args, cudaStream_t stream) {
  const auto kernel = sample_kernel<T, kRanks>;
  int most_shared = 0;
  cudaError_t error = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&most_shared);
  if (error != cudaSuccess) return error;
  Plan plan;
  const int64_t per_rank = (args.vocab + kRanks - 1) / kRanks;
  plan.segment = static_cast<int>((per_rank + 7) / 8 * 8);
  plan.weight_bits = 63;
  for (int64_t size = 1; size < args.vocab; size *= 2) --plan.weight_bits;
  plan.weight_bits = std::min(plan.weight_bits, kMaxWeightBits);
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
