// Memory that GPUs share, as exported functions take it.
#pragma once
#include "../layers/peers.h"
#include "cuda_check.h"

namespace vllm {

// inboxes: int64 [ranks] on the CPU, addresses. rounds: int32 [most rows] on x's GPU.
inline layers::Peers peers_of(const TensorView& x, const TensorView& inboxes, int64_t rank,
                              const TensorView& rounds) {
  layers::Peers peers;
  check_cpu(inboxes, "inboxes", 1);
  check_type(inboxes, "inboxes", kDLInt, 64);
  check_cuda(rounds, "rounds", 1, x, "x");
  check_type(rounds, "rounds", kDLInt, 32);
  peers.max_rows = rounds.size(0);
  peers.num_ranks = static_cast<int>(inboxes.size(0)), peers.rank = static_cast<int>(rank);
  VLLM_CHECK(x.size(0) <= peers.max_rows, "x: given " << x.size(0) << " rows; accepted: up to "
                                                      << peers.max_rows << ", as rounds has");
  VLLM_CHECK(peers.num_ranks <= layers::kMaxPeers && rank >= 0 && rank < peers.num_ranks,
             "rank: given " << rank << " of " << peers.num_ranks << "; accepted: one of up to "
                            << layers::kMaxPeers);
  for (int i = 0; i < peers.num_ranks; ++i) {
    peers.inboxes[i] = reinterpret_cast<void*>(static_cast<const int64_t*>(data_of(inboxes))[i]);
  }
  peers.rounds = static_cast<uint32_t*>(data_of(rounds));
  return peers;
}

}  // namespace vllm
