// One token per row of logits: the likeliest, or one drawn after temperature, top-k, top-p, min-p.
//
// Nothing is sorted. A filter keeps the weights at or above a threshold, and the threshold is found
// by walking down a histogram of the weights' bit patterns, refined three times to single values:
// positive floats order as their bits do.
#include "parallel.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {
namespace {

constexpr int64_t kBlock = 512;  // weights whose sum is one step of the inverted distribution
// Digits of a weight's bits, highest first; the first holds all patterns up to that of 1.0.
constexpr int kShifts[] = {20, 9, 0};
constexpr int kDigitBits[] = {12, 11, 9};
constexpr int kBuckets = 1 << 11;

uint32_t bits_of(float v) {
  uint32_t b;
  __builtin_memcpy(&b, &v, sizeof(b));
  return b;
}
float float_of(uint32_t b) {
  float v;
  __builtin_memcpy(&v, &b, sizeof(v));
  return v;
}

int lanes_left(int64_t size, int64_t at) {
  return size - at < kLanes ? static_cast<int>(size - at) : kLanes;
}

// The first of the largest logits; 0 where none is larger than minus infinity.
int64_t likeliest(const float* logits, int64_t n) {
  F32x16 top = set1(-__builtin_inff());
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = lanes_left(n, i);
    const F32x16 v = load_first<ElementType::kFloat32>(logits + i, count);
    top = max(keep_lanes(v, 0, count, -__builtin_inff()), top);
  }
  const float best = reduce_max(top);
  for (int64_t i = 0; i < n; ++i) {
    if (logits[i] == best) return i;
  }
  return 0;
}

// weights = e^((logits - best) / temperature): 1 for the likeliest, 0 for minus infinity.
void exponentiate(const float* logits, int64_t n, float best, float temperature, float* weights) {
  const F32x16 inverse = set1(1.0f / temperature);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = lanes_left(n, i);
    const F32x16 v = load_first<ElementType::kFloat32>(logits + i, count);
    store_first<ElementType::kFloat32>(weights + i, exp(mul(sub(v, set1(best)), inverse)), count);
  }
}

// The largest threshold such that the weights at or above it, `floor` and above alone counted,
// amount to at least `target`: in number, or in sum.
template <bool kBySum>
float threshold_for(const float* weights, int64_t n, float floor, double target) {
  double amounts[kBuckets];
  uint32_t prefix = 0;
  double above = 0;  // amount of all weights beyond the bucket being refined
  for (int level = 0; level < 3; ++level) {
    const int shift = kShifts[level], known = shift + kDigitBits[level];
    __builtin_memset(amounts, 0, sizeof(amounts));
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t b = bits_of(weights[i]);
      if (weights[i] < floor || (level > 0 && b >> known != prefix >> known)) continue;
      amounts[b >> shift & (kBuckets - 1)] += kBySum ? weights[i] : 1.0;
    }
    int bucket = kBuckets - 1;
    while (bucket > 0 && above + amounts[bucket] < target) above += amounts[bucket--];
    prefix |= static_cast<uint32_t>(bucket) << shift;
  }
  return float_of(prefix);
}

double sum_at_or_above(const float* weights, int64_t n, float threshold) {
  const F32x16 limit = set1(threshold);
  F32x16 sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 v = load_first<ElementType::kFloat32>(weights + i, lanes_left(n, i));
    sum = add(sum, select(less(v, limit), zero(), v));
  }
  return reduce_add(sum);
}

double sum_of_kept(const float* weights, int64_t n, float threshold, double* block_sums) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = n - begin < kBlock ? n - begin : kBlock;
    total += * block_sums++ = sum_at_or_above(weights + begin, size, threshold);
  }
  return total;
}

// Index i with probability weights[i] / sum over those at or above the threshold.
int64_t draw(const float* weights, int64_t n, float threshold, double uniform, double* block_sums) {
  double point = uniform * sum_of_kept(weights, n, threshold, block_sums);
  int64_t last = 0;  // where rounding carries the point past the end, the last kept one is it
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const double in_block = block_sums[begin / kBlock];
    if (in_block == 0) continue;
    if (point >= in_block && begin + kBlock < n) {
      point -= in_block;
      last = begin;
      continue;
    }
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    for (int64_t i = begin; i < end; ++i) {
      if (weights[i] < threshold || weights[i] == 0) continue;
      last = i;
      if (point < weights[i]) return i;
      point -= weights[i];
    }
    point = 0;
  }
  while (weights[last] < threshold || weights[last] == 0) ++last;
  return last;
}

int64_t sample_row(const SampleArgs& args, int64_t row) {
  const float* logits = args.logits + row * args.stride;
  const int64_t n = args.vocab;
  const int64_t best = likeliest(logits, n);
  if (args.temperature[row] == 0 || !(logits[best] > -__builtin_inff())) return best;
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  auto* block_sums = static_cast<double*>(
      thread_scratch(Scratch::kPrivate, num_blocks * sizeof(double) + n * sizeof(float)));
  auto* weights = reinterpret_cast<float*>(block_sums + num_blocks);
  exponentiate(logits, n, logits[best], args.temperature[row], weights);
  float threshold = 0;
  const int64_t top_k = args.top_k[row];
  if (top_k > 0 && top_k < n) {
    threshold = threshold_for<false>(weights, n, 0, static_cast<double>(top_k));
  }
  if (args.top_p[row] < 1) {
    const double mass = sum_of_kept(weights, n, threshold, block_sums);
    threshold = threshold_for<true>(weights, n, threshold, args.top_p[row] * mass);
  }
  if (args.min_p[row] > threshold) threshold = args.min_p[row];
  return draw(weights, n, threshold, args.uniforms[row], block_sums);
}

}  // namespace

void sample(const SampleArgs& args) {
  share_items(args.num_rows, true, [&](int64_t row) { args.tokens[row] = sample_row(args, row); });
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
