// Clusters of thread blocks, emulated.
#pragma once
#include "emulated_cuda.h"

namespace cooperative_groups {

struct EmulatedCluster {
  void sync() const {
    emulated::Block& block = *emulated::block;
    emulated::meet(block.cluster_meeting, [&] { block.cluster->barrier.arrive_and_wait(); });
  }
  void barrier_arrive() const {
    emulated::Block& block = *emulated::block;
    if (++block.num_arrived < static_cast<int>(block.fibers.size())) return;
    block.num_arrived = 0;
    ++block.num_arrivals;
    block.arrival.emplace(block.cluster->barrier.arrive());
  }
  // Every fiber arrives before it waits: at most one arrival is waited for.
  void barrier_wait() const {
    emulated::Block& block = *emulated::block;
    const int wanted = ++block.num_waits[block.current];
    while (block.num_arrivals < wanted) emulated::yield();
    if (block.arrival) {
      block.cluster->barrier.wait(*std::move(block.arrival));
      block.arrival.reset();
    }
  }
  // Shared memory is thread-local: it lies as far from the thread's pointer in every thread.
  template <typename T>
  T* map_shared_rank(T* address, int rank) const {
    auto* own = static_cast<char*>(__builtin_thread_pointer());
    char* other = emulated::block->cluster->thread_pointers[rank];
    return reinterpret_cast<T*>(other + (reinterpret_cast<char*>(address) - own));
  }
};

inline EmulatedCluster this_cluster() { return {}; }

}  // namespace cooperative_groups

inline void __cluster_barrier_arrive_relaxed() {
  cooperative_groups::this_cluster().barrier_arrive();
}
