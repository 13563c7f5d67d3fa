// Sharing work with the other threads, as a lambda.
#pragma once
#include "../simd.h"
#include "../thread_pool.h"

namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE {

// Calls f(item) once for every item in [0, num_items), in this thread alone where the work is not
// worth waking others for.
template <class F>
void share_items(int64_t num_items, bool is_worth_sharing, const F& f) {
  if (is_worth_sharing && num_items > 1) {
    run_items(
        num_items,
        [](const void* context, int64_t item) { (*static_cast<const F*>(context))(item); }, &f);
  } else {
    for (int64_t item = 0; item < num_items; ++item) f(item);
  }
}

}  // namespace vllm::cpu::VLLM_CPU_ISA_NAMESPACE
