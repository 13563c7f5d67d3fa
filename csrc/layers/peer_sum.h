// Sums over the GPUs of one machine, each of which can write the memory of all others.
#pragma once
#include "layers.h"

namespace vllm::layers {

inline constexpr int kMaxPeers = 8;

// out [rows, dim] = the sum of x over the ranks, added in float32 in the order of the ranks and
// rounded once, so that all have the same bits. With a weight, residual + that sum, rounded,
// replaces residual, and out is the RMSNorm of it: bit for bit launch_rms_norm of the sum. x and
// out may be the same memory.
//
// inboxes: of each rank, as mapped here; zeros at first, then written by these kernels alone.
// rounds [max_rows]: zeros at first, on this GPU. Ranks must make the same calls in the same order,
// and a rank whose peers do not come waits for ever.
struct PeerSumArgs {
  FloatType type;
  int64_t num_rows = 0, dim = 0, max_rows = 0;  // dim: a multiple of kWidth, up to kMaxNormDim
  const void* x = nullptr;
  void *out = nullptr, *residual = nullptr;
  const float* weight = nullptr;
  float eps = 0;
  int rank = 0, num_ranks = 0;
  void* inboxes[kMaxPeers] = {};
  uint32_t* rounds = nullptr;
};
cudaError_t launch_peer_sum(const PeerSumArgs& args, cudaStream_t stream);

// Bytes of an inbox.
inline int64_t peer_inbox_bytes(int num_ranks, int64_t max_rows, int64_t dim, int64_t type_bytes) {
  return 4 * num_ranks * max_rows * dim * type_bytes;  // two rounds, a flag beside every word
}

}  // namespace vllm::layers
