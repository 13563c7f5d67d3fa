// Requests that carry a state, as the exported recurrences take them.
#pragma once
#include "../cpu/dispatch.h"
#include "check.h"

namespace vllm {

// tensor: [tokens, heads, size of a head].
inline void check_head_size(const TensorView& tensor, const char* name) {
  VLLM_CHECK(
      tensor.size(2) >= 1 && tensor.size(2) <= cpu::kMaxHeadDim,
      name << ": given heads of " << tensor.size(2) << "; accepted: 1 to " << cpu::kMaxHeadDim);
}

// query_start_loc, seq_lens and state_slots, int32, with what they say checked.
inline cpu::StateRequests requests_of(const TensorView& query_start_loc, const TensorView& seq_lens,
                                      const TensorView& state_slots, int64_t num_tokens,
                                      int64_t num_slots) {
  cpu::StateRequests requests;
  check_cpu(state_slots, "state_slots", 1);
  requests.num_requests = state_slots.size(0);
  check_vector(state_slots, "state_slots", kDLInt, 32, requests.num_requests, "requests");
  check_vector(seq_lens, "seq_lens", kDLInt, 32, requests.num_requests, "size of state_slots");
  check_vector(query_start_loc, "query_start_loc", kDLInt, 32, requests.num_requests + 1,
               "size of state_slots + 1");
  requests.query_start = static_cast<const int32_t*>(data_of(query_start_loc));
  requests.seq_lens = static_cast<const int32_t*>(data_of(seq_lens));
  requests.slots = static_cast<const int32_t*>(data_of(state_slots));
  VLLM_CHECK(requests.query_start[0] == 0,
             "query_start_loc: given first element " << requests.query_start[0] << "; accepted: 0");
  for (int64_t r = 0; r < requests.num_requests; ++r) {
    const int64_t query_len = int64_t{requests.query_start[r + 1]} - requests.query_start[r];
    VLLM_CHECK(query_len >= 0,
               "query_start_loc: decreases after request " << r << "; accepted: ascending offsets");
    const int64_t seq_len = requests.seq_lens[r];
    VLLM_CHECK(seq_len >= query_len || seq_len == 0,
               "seq_lens: given " << seq_len << " for request " << r << " of " << query_len
                                  << " query tokens; accepted: at least as many, or 0 to fill up");
    VLLM_CHECK(requests.slots[r] >= 0 && requests.slots[r] < num_slots,
               "state_slots: given " << requests.slots[r] << " for request " << r
                                     << "; accepted: 0 to " << num_slots - 1
                                     << " (slots of state)");
  }
  VLLM_CHECK(requests.query_start[requests.num_requests] == num_tokens,
             "query_start_loc: given last element " << requests.query_start[requests.num_requests]
                                                    << "; accepted: " << num_tokens << " (tokens)");
  return requests;
}

}  // namespace vllm
