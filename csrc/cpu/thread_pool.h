// The threads that kernels share their work with.
//
// A call ends when its items are done, not when every thread has come: a thread that the system
// has taken off its core holds nobody up unless it is in the middle of an item. OpenMP's regions
// end in a barrier of all threads instead, and with one other busy process on the machine each of
// them costs a time slice (8 ms for 0.1 ms of work, measured on two cores).
#pragma once
#include <stdint.h>

namespace vllm::cpu {

inline constexpr int kMaxThreads = 256;

// How many threads work on a call, the caller among them. set_num_threads takes 1 to kMaxThreads.
int num_threads();
void set_num_threads(int count);

// Calls call(context, item) once for every item in [0, num_items), num_items < 2^31, from this
// thread and the others. Each starts on its own run of consecutive items, so that hardware
// prefetchers follow one stream of memory per thread, and takes single items from the others' runs
// when its own is done. A call made while another is running does its items alone.
void run_items(int64_t num_items, void (*call)(const void* context, int64_t item),
               const void* context);

}  // namespace vllm::cpu
