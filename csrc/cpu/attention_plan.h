// Who computes what in one attention call. Plans change speed, never results.
#pragma once
#include <vector>

#include "types.h"

namespace vllm::cpu {

struct AttentionPlan {
  std::vector<QueryTile> query_tiles;
  std::vector<AttentionUnit> units;  // largest first
  int64_t num_partials = 0;
};

// Fills `plan` from the lengths in `args` for `num_threads` threads.
void plan_attention(const AttentionArgs& args, int num_threads, AttentionPlan& plan);

}  // namespace vllm::cpu
