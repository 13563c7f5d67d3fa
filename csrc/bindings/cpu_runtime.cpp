#include "../cpu/dispatch.h"
#include "../cpu/thread_pool.h"
#include "check.h"

namespace vllm {
namespace {

std::string cpu_isa() { return cpu::kernels().name; }

void cpu_set_isa(std::string name) {
  VLLM_CHECK(cpu::is_isa_available(name), "name: given '" << name << "'; accepted: one of "
                                                          << cpu::built_isas()
                                                          << " that this chip executes");
  cpu::set_isa(name);
}

int64_t cpu_num_threads() { return cpu::num_threads(); }

void cpu_set_num_threads(int64_t count) {
  VLLM_CHECK(count >= 1 && count <= cpu::kMaxThreads,
             "count: given " << count << "; accepted: 1 to " << cpu::kMaxThreads);
  cpu::set_num_threads(static_cast<int>(count));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_isa, cpu_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_set_isa, cpu_set_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_num_threads, cpu_num_threads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_set_num_threads, cpu_set_num_threads);

}  // namespace vllm
