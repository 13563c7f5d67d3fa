// How a row reaches all GPUs.
//
// Every GPU writes its row into the inboxes of all others and adds up what comes into its own. Each
// word of data travels with the number of its round, in one access, so nothing else has to be
// waited for: the time is that of one write over NVLink. This is how the LL protocol of NCCL passes
// data (Hu et al., "Demystifying NCCL", arXiv 2507.04786), and it doubles the bytes: for short
// messages.
//
// A row has two places in an inbox, taken in turn. Who writes into one for round n + 2 has read its
// peer's row of round n + 1, which the peer wrote after its kernel of round n had ended, and so
// after it had read what is overwritten.
#pragma once
#include "peers.h"

namespace vllm::layers {

__device__ __forceinline__ void send(uint4* to, uint32_t a, uint32_t b, uint32_t round) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(a), "r"(round),
               "r"(b)
               : "memory");
}

__device__ __forceinline__ void receive(const uint4* from, uint32_t round, uint32_t* words) {
  uint32_t first, second;
  do {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(first), "=r"(words[1]), "=r"(second)
                 : "l"(from)
                 : "memory");
  } while (first != round || second != round);
}

// A row in its round. Threads hold pieces of it, as words: two to a packet with their round, {word,
// round, word, round}.
struct PeerRow {
  const Peers& peers;
  const int64_t row, row_packets;
  const uint32_t round;

  __device__ __forceinline__ PeerRow(const Peers& peers, int64_t row, int64_t row_packets)
      : peers(peers), row(row), row_packets(row_packets), round(peers.rounds[row] + 1) {}

  __device__ __forceinline__ uint4* place(int reader, int writer) const {
    const int64_t turn = static_cast<int64_t>(round % 2) * peers.num_ranks;
    return static_cast<uint4*>(peers.inboxes[reader]) +
           ((turn + writer) * peers.max_rows + row) * row_packets;
  }

  // To all others, piece `piece` of num_pieces: neighbours in a warp write side by side.
  template <int kWords>
  __device__ __forceinline__ void send_piece(const uint32_t (&words)[kWords], int64_t piece,
                                             int64_t num_pieces) const {
    for (int peer = 0; peer < peers.num_ranks; ++peer) {
      if (peer == peers.rank) continue;
      uint4* to = place(peer, peers.rank) + piece;
#pragma unroll
      for (int p = 0; p < kWords / 2; ++p) {
        send(to + p * num_pieces, words[2 * p], words[2 * p + 1], round);
      }
    }
  }

  // Once it is there.
  template <int kWords>
  __device__ __forceinline__ void receive_piece(int peer, uint32_t (&words)[kWords], int64_t piece,
                                                int64_t num_pieces) const {
    const uint4* from = place(peers.rank, peer) + piece;
#pragma unroll
    for (int p = 0; p < kWords / 2; ++p) receive(from + p * num_pieces, round, &words[2 * p]);
  }

  // By one thread, when all of the block have read the number of the round.
  __device__ __forceinline__ void end() const { peers.rounds[row] = round; }
};

}  // namespace vllm::layers
