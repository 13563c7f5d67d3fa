#include "thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>

namespace vllm::cpu {
namespace {

// A waiting thread polls this often, then lets others have its core while polling, then sleeps.
constexpr int kPolls = 2000;
constexpr std::chrono::microseconds kAwake{1000};

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns the first value other than `old`.
uint32_t wait_for_change(std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kPolls; ++i) {
    const uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    pause_core();
  }
  const auto deadline = std::chrono::steady_clock::now() + kAwake;
  while (std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t now = word.load(std::memory_order_acquire);
      if (now != old) return now;
      std::this_thread::yield();
    }
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

// Items still to be taken, as (generation << 32) | next. A claim is a compare-and-swap of that
// whole word, so it succeeds only for the call that the claiming thread knows: a thread that wakes
// up late, with the function and context of a finished call, can claim nothing of the next one.
struct alignas(64) Run {
  std::atomic<uint64_t> next{0};
  std::atomic<uint32_t> end{0};
};

class ThreadPool {
 public:
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
  void set_num_threads(int count) { num_threads_.store(count, std::memory_order_relaxed); }

  void run(int64_t num_items, void (*call)(const void*, int64_t), const void* context) {
    const int threads = num_threads();
    std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
    if (num_items < 2 || threads < 2 || !lock.try_lock()) {
      for (int64_t item = 0; item < num_items; ++item) call(context, item);
      return;
    }
    for (; num_workers_ < threads - 1; ++num_workers_) {
      std::thread([this, id = num_workers_ + 1] { work(id); }).detach();
    }
    const uint32_t generation = publish(num_items, threads, call, context);
    take_items(generation, 0, threads, call, context);
    for (uint32_t left; (left = pending_.load(std::memory_order_acquire)) != 0;) {
      wait_for_change(pending_, left);
    }
  }

  // After fork() the child has no workers; locks and counters may be in any state.
  void forget_workers() {
    num_workers_ = 0;
    new (&busy_) std::mutex;
  }

 private:
  uint32_t publish(int64_t num_items, int threads, void (*call)(const void*, int64_t),
                   const void* context) {
    const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
    const uint64_t tag = uint64_t{generation} << 32;
    // Close every run in use before its end moves: a late thread that sees a new end, function or
    // context sees this too.
    if (threads > num_runs_) num_runs_ = threads;
    for (int i = 0; i < num_runs_; ++i) {
      runs_[i].next.store(tag | UINT32_MAX, std::memory_order_relaxed);
    }
    std::atomic_thread_fence(std::memory_order_release);
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    active_threads_.store(threads, std::memory_order_relaxed);
    pending_.store(static_cast<uint32_t>(num_items), std::memory_order_relaxed);
    for (int i = 0; i < threads; ++i) {
      runs_[i].end.store(static_cast<uint32_t>(num_items * (i + 1) / threads),
                         std::memory_order_release);
    }
    for (int i = 0; i < threads; ++i) {
      runs_[i].next.store(tag | static_cast<uint32_t>(num_items * i / threads),
                          std::memory_order_release);
    }
    generation_.store(generation, std::memory_order_release);
    generation_.notify_all();
    return generation;
  }

  void take_items(uint32_t generation, int first, int threads, void (*call)(const void*, int64_t),
                  const void* context) {
    uint32_t num_done = 0;
    for (int i = 0; i < threads; ++i) {
      Run& run = runs_[(first + i) % threads];
      uint64_t next = run.next.load(std::memory_order_acquire);
      while (next >> 32 == generation) {
        const uint32_t item = static_cast<uint32_t>(next);
        if (item >= run.end.load(std::memory_order_acquire)) break;
        if (!run.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
        call(context, item);
        ++num_done;
        next = run.next.load(std::memory_order_acquire);
      }
    }
    if (num_done == 0) return;  // perhaps not even this generation's: touch nothing
    if (pending_.fetch_sub(num_done, std::memory_order_acq_rel) == num_done) pending_.notify_all();
  }

  void work(int id) {
    uint32_t generation = 0;
    while (true) {
      generation = wait_for_change(generation_, generation);
      const auto call = call_.load(std::memory_order_acquire);
      const void* context = context_.load(std::memory_order_acquire);
      const int threads = active_threads_.load(std::memory_order_relaxed);
      if (id < threads) take_items(generation, id, threads, call, context);
    }
  }

  std::mutex busy_;  // held by the caller whose items are being shared
  int num_workers_ = 0;
  int num_runs_ = 0;  // most threads of any call so far
  std::atomic<int> num_threads_{1};
  // A call, on the one cache line that waiting workers poll.
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> active_threads_{0};
  std::atomic<void (*)(const void*, int64_t)> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  alignas(64) std::atomic<uint32_t> pending_{0};
  Run runs_[kMaxThreads];
};

// Never destroyed: detached workers use it until the process is gone.
ThreadPool& pool() {
  static ThreadPool* const instance = [] {
    auto* created = new ThreadPool;
    pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
    return created;
  }();
  return *instance;
}

}  // namespace

int num_threads() { return pool().num_threads(); }

void set_num_threads(int count) { pool().set_num_threads(count); }

void run_items(int64_t num_items, void (*call)(const void*, int64_t), const void* context) {
  pool().run(num_items, call, context);
}

}  // namespace vllm::cpu
