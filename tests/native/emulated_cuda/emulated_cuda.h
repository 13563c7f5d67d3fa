// CUDA kernels run on a CPU, function by function as they are written: every thread of a thread
// block is a fiber, every thread block of a cluster a thread of the system. For checking numbers
// and indices; nothing of it is fast, and races that a GPU would lose go unseen.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#undef __shared__
#define __shared__ thread_local  // static in a function, and may be extern
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define __CUDA_ARCH__ 900  // after CUDA's own headers, which would take it for a device's compiler

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 gridDim;
using std::max, std::min;

namespace emulated {

// Where `expected` fibers meet.
struct Meeting {
  int expected = 0, arrived = 0, generation = 0;
};

struct Warp {
  Meeting meeting;
  uint32_t a[32][4], b[32][2];
  // What lanes tell each other (warp.h), by whether the number of times is odd.
  uint64_t said[2][32];
  int num_times[32] = {};
};

struct Cluster {
  explicit Cluster(int size) : barrier(size), thread_pointers(size) {}
  std::barrier<> barrier;
  std::vector<char*> thread_pointers;
};

// The thread block that this system thread runs.
struct Block {
  std::vector<ucontext_t> fibers;  // how each begins; then jumps go on, without system calls
  std::vector<bool> has_begun;
  std::unique_ptr<jmp_buf[]> places;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<bool> is_done;
  ucontext_t at_start;
  jmp_buf scheduler;
  int current = 0;
  Meeting meeting, cluster_meeting;
  std::vector<Warp> warps;
  Cluster* cluster = nullptr;
  // Of the cluster's barrier in two steps: fibers since the last arrival of all, arrivals of all,
  // the last one while nobody has waited for it, and waits of each fiber.
  int num_arrived = 0, num_arrivals = 0;
  std::optional<std::barrier<>::arrival_token> arrival;
  std::vector<int> num_waits;
  std::function<void()> body;
};

inline thread_local Block* block = nullptr;
inline std::function<void()> before_block = [] {};  // what a program does to its shared memory

inline void yield() {
  if (_setjmp(block->places[block->current]) == 0) _longjmp(block->scheduler, 1);
}

// Until it yields.
inline void run_fiber(Block& own, int i) {
  own.current = i;
  threadIdx = {static_cast<unsigned>(i), 0, 0};
  if (_setjmp(own.scheduler) != 0) return;
  if (own.has_begun[i]) _longjmp(own.places[i], 1);
  own.has_begun[i] = true;
  swapcontext(&own.at_start, &own.fibers[i]);
}

template <typename Last>
void meet(Meeting& meeting, Last last) {
  const int generation = meeting.generation;
  if (++meeting.arrived == meeting.expected) {
    last();
    meeting.arrived = 0;
    ++meeting.generation;
  } else {
    while (meeting.generation == generation) yield();
  }
}
inline void meet(Meeting& meeting) {
  meet(meeting, [] {});
}

inline void enter_fiber() {
  block->body();
  block->is_done[block->current] = true;
  yield();
}

inline void run_block(int num_threads, const std::function<void()>& body, Cluster* cluster) {
  constexpr size_t kStackBytes = 64 << 10;
  Block own;
  own.cluster = cluster;
  own.body = body;
  own.meeting.expected = own.cluster_meeting.expected = num_threads;
  own.warps.resize(num_threads / 32);
  for (Warp& warp : own.warps) warp.meeting.expected = 32;
  own.fibers.resize(num_threads);
  own.is_done.resize(num_threads);
  own.has_begun.resize(num_threads);
  own.places = std::make_unique<jmp_buf[]>(num_threads);
  own.num_waits.resize(num_threads);
  block = &own;
  before_block();
  for (ucontext_t& fiber : own.fibers) {
    own.stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
    getcontext(&fiber);
    fiber.uc_stack = {own.stacks.back().get(), 0, kStackBytes};
    makecontext(&fiber, enter_fiber, 0);
  }
  for (int running = num_threads; running > 0;) {
    running = 0;
    for (int i = 0; i < num_threads; ++i) {
      if (own.is_done[i]) continue;
      run_fiber(own, i);
      running += !own.is_done[i];
    }
  }
  block = nullptr;
}

// A launch whose clusters lie along x and are as long as the grid.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  const dim3 grid = config->gridDim;
  unsigned cluster_size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster_size = config->attrs[i].val.clusterDim.x;
    }
  }
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster_size) {
        Cluster cluster(cluster_size);
        std::vector<std::thread> blocks;
        for (unsigned rank = 0; rank < cluster_size; ++rank) {
          blocks.emplace_back([&, rank] {
            cluster.thread_pointers[rank] = static_cast<char*>(__builtin_thread_pointer());
            cluster.barrier.arrive_and_wait();
            blockIdx = {x + rank, y, z};
            gridDim = grid;
            run_block(config->blockDim.x, [&] { kernel(arguments...); }, &cluster);
          });
        }
        for (std::thread& one : blocks) one.join();
      }
    }
  }
  return cudaSuccess;
}

}  // namespace emulated

#define cudaLaunchKernelEx emulated::launch

inline void __syncthreads() { emulated::meet(emulated::block->meeting); }
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline float __uint_as_float(uint32_t v) {
  float number;
  std::memcpy(&number, &v, 4);
  return number;
}
