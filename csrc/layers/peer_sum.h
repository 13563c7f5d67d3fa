// Sums over the GPUs of one machine, each of which can write the memory of all others.
#pragma once
#include "layers.h"
#include "peers.h"

namespace vllm::layers {

// out [rows, dim] = the sum of x over the ranks, added in float32 in the order of the ranks and
// rounded once, so that all have the same bits. With a weight, residual + that sum, rounded,
// replaces residual, and out is the RMSNorm of it: bit for bit launch_rms_norm of the sum. x and
// out may be the same memory.
struct PeerSumArgs {
  FloatType type;
  int64_t num_rows = 0, dim = 0;  // dim: a multiple of kWidth, up to kMaxNormDim
  const void* x = nullptr;
  void *out = nullptr, *residual = nullptr;
  const float* weight = nullptr;
  float eps = 0;
  Peers peers;
};
cudaError_t launch_peer_sum(const PeerSumArgs& args, cudaStream_t stream);

}  // namespace vllm::layers
