// Memory that all GPUs of one machine can write.
#pragma once
#include <cstdint>

namespace vllm::layers {

inline constexpr int kMaxPeers = 8;

// inboxes: of each rank, as mapped here; zeros at first, then written by these kernels alone.
// rounds [max_rows]: zeros at first, on this GPU. Ranks must make the same calls in the same order,
// and a rank whose peers do not come waits for ever.
struct Peers {
  int rank = 0, num_ranks = 0;
  int64_t max_rows = 0;
  void* inboxes[kMaxPeers] = {};
  uint32_t* rounds = nullptr;
};

// Bytes of an inbox.
inline int64_t peer_inbox_bytes(int num_ranks, int64_t max_rows, int64_t dim, int64_t type_bytes) {
  return 4 * num_ranks * max_rows * dim * type_bytes;  // two rounds, a flag beside every word
}

}  // namespace vllm::layers
