#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace vllm::cpu {

#define VLLM_DECLARE_KERNELS(isa)                                                                 \
  namespace isa {                                                                                 \
  void linear(const LinearArgs&);                                                                 \
  void attention(const AttentionArgs&);                                                           \
  void cache_write(const CacheWriteArgs&);                                                        \
  void rms_norm(const NormArgs&);                                                                 \
  void rotary(const RotaryArgs&);                                                                 \
  void silu_and_mul(const SiluArgs&);                                                             \
  void gelu_and_mul(const GeluArgs&);                                                             \
  void soft_cap(const SoftCapArgs&);                                                              \
  void mul_sigmoid(const SigmoidArgs&);                                                           \
  void causal_conv1d(const ConvArgs&);                                                            \
  void gated_delta_rule(const DeltaRuleArgs&);                                                    \
  void sample(const SampleArgs&);                                                                 \
  constexpr KernelTable kTable{                                                                   \
      #isa,         linear,   attention,   cache_write,   rms_norm,         rotary, silu_and_mul, \
      gelu_and_mul, soft_cap, mul_sigmoid, causal_conv1d, gated_delta_rule, sample};              \
  }

#ifdef VLLM_BUILD_X86
VLLM_DECLARE_KERNELS(avx512)
VLLM_DECLARE_KERNELS(avx2)
// Those of avx512 but one.
namespace avx512_bf16 {
void linear(const LinearArgs&);
bool adds_in_order();
constexpr KernelTable kTable = [] {
  KernelTable table = avx512::kTable;
  table.name = "avx512_bf16";
  table.linear = linear;
  return table;
}();
}  // namespace avx512_bf16
#endif
VLLM_DECLARE_KERNELS(portable)

namespace {

struct Candidate {
  const KernelTable* table;
  bool (*runs_here)();
};

#ifdef VLLM_BUILD_X86
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Fastest first; the portable kernels run anywhere.
const Candidate kCandidates[] = {
#ifdef VLLM_BUILD_X86
    {&avx512_bf16::kTable,
     [] {
       return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
              __builtin_cpu_supports("avx512vbmi") && avx512_bf16::adds_in_order();
     }},
    {&avx512::kTable, has_avx512},
    {&avx2::kTable,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {&portable::kTable, [] { return true; }},
};

const KernelTable* best_table() {
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here()) return candidate.table;
  }
  return nullptr;
}

std::atomic<const KernelTable*>& active_table() {
  static std::atomic<const KernelTable*> table{best_table()};
  return table;
}

const KernelTable* find_table(const std::string& name) {
  for (const Candidate& candidate : kCandidates) {
    if (name == candidate.table->name && candidate.runs_here()) return candidate.table;
  }
  return nullptr;
}

constexpr size_t kAlignment = 64;

class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  void* reserve(size_t num_bytes) {
    if (num_bytes <= capacity_) return data_;
    const size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::free(data_);
    capacity_ = 0;
    data_ = std::aligned_alloc(kAlignment, rounded);
    if (data_ == nullptr) throw std::bad_alloc();
    capacity_ = rounded;
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace

const KernelTable& kernels() { return *active_table().load(std::memory_order_relaxed); }

bool is_isa_available(const std::string& name) { return find_table(name) != nullptr; }

std::string built_isas() {
  std::string names;
  for (const Candidate& candidate : kCandidates) {
    if (!names.empty()) names += ", ";
    names += candidate.table->name;
  }
  return names;
}

void set_isa(const std::string& name) { active_table().store(find_table(name)); }

void* thread_scratch(Scratch which, size_t num_bytes) {
  thread_local Buffer buffers[3];
  return buffers[static_cast<int>(which)].reserve(num_bytes);
}

}  // namespace vllm::cpu
