// Many short calls in a row, each with its own function and context: every item must be done once,
// by the function and with the context of its own call. Arguments: threads, calls.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/cpu/thread_pool.h"

namespace {

struct Call {
  int kind;
  std::vector<int> times_done;
};

template <int kKind>
void do_item(const void* context, int64_t item) {
  auto* call = const_cast<Call*>(static_cast<const Call*>(context));
  if (call->kind != kKind) {
    std::fprintf(stderr, "an item was done by the function of another call\n");
    std::_Exit(2);
  }
  ++call->times_done[item];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  void (*const functions[])(const void*, int64_t) = {do_item<0>, do_item<1>, do_item<2>};
  vllm::cpu::set_num_threads(std::atoi(argv[1]));
  std::minstd_rand random(1);
  for (int i = 0; i < std::atoi(argv[2]); ++i) {
    const int num_items = 2 + static_cast<int>(random() % (i % 50 == 0 ? 3000 : 9));
    Call call{i % 3, std::vector<int>(num_items)};
    vllm::cpu::run_items(num_items, functions[call.kind], &call);
    for (const int times : call.times_done) {
      if (times == 1) continue;
      std::fprintf(stderr, "call %d: an item was done %d times\n", i, times);
      return 1;
    }
    // Now and then long enough for the workers to fall asleep.
    if (i % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
}
