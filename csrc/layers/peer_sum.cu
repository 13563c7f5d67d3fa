// Every GPU writes its row into the inboxes of all others and adds up what comes into its own. Each
// word of data travels with the number of its round, in one access, so nothing else has to be
// waited for: the time is that of one write over NVLink. This is how the LL protocol of NCCL passes
// data (Hu et al., "Demystifying NCCL", arXiv 2507.04786), and it doubles the bytes: for short
// messages.
//
// A row has two places in an inbox, taken in turn. Who writes into one for round n + 2 has read its
// peer's row of round n + 1, which the peer wrote after its kernel of round n had ended, and so
// after it had read what is overwritten.
#include "launch.cuh"
#include "peer_sum.h"
#include "vector.cuh"

namespace vllm::layers {
namespace {

constexpr int kManyChunks = 4;
template <int kChunks>
constexpr int kMaxThreads = kChunks == 1 ? 1024 : kMaxNormDim / kWidth / kManyChunks;

// kWidth elements as words, two to a packet with their round: {word, round, word, round}.
template <typename T>
constexpr int kPackets = kWidth * sizeof(T) / 8;

template <typename T>
struct alignas(16) Words {
  uint32_t words[2 * kPackets<T>];
};

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

template <typename T>
__device__ __forceinline__ void add(const Words<T>& words, float (&values)[kWidth]) {
  const T* elements = reinterpret_cast<const T*>(words.words);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] += to_float(elements[i]);
}

template <typename T, int kChunks, bool kIsNormed>
__global__ __launch_bounds__(kMaxThreads<kChunks>) void peer_sum_kernel(PeerSumArgs args) {
  __shared__ float shared[32];
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  const int64_t row_packets = args.dim / kWidth * kPackets<T>;
  const uint32_t round = args.rounds[row] + 1;
  const int64_t turn = static_cast<int64_t>(round % 2) * args.num_ranks;
  const auto place = [&](int reader, int writer) {
    return static_cast<uint4*>(args.inboxes[reader]) +
           ((turn + writer) * args.max_rows + row) * row_packets;
  };
  // Packet p of the elements from `column` on; neighbours in a warp write side by side.
  const auto packet = [&](int column, int p) { return p * (args.dim / kWidth) + column / kWidth; };

  Words<T> own[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * blockDim.x + threadIdx.x) * kWidth;
    if (column >= args.dim) continue;
    own[c] =
        *reinterpret_cast<const Words<T>*>(static_cast<const T*>(args.x) + row * args.dim + column);
    for (int peer = 0; peer < args.num_ranks; ++peer) {
      if (peer == args.rank) continue;
      uint4* to = place(peer, args.rank);
#pragma unroll
      for (int p = 0; p < kPackets<T>; ++p) {
        send(to + packet(column, p), own[c].words[2 * p], own[c].words[2 * p + 1], round);
      }
    }
  }

  // What the norm reads is fetched while the rows of peers are on their way.
  [[maybe_unused]] Stored<T> before[kChunks];
  [[maybe_unused]] float weight[kChunks][kWidth];
  if constexpr (kIsNormed) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * blockDim.x + threadIdx.x) * kWidth;
      if (column >= args.dim) continue;
      before[c] = *reinterpret_cast<const Stored<T>*>(static_cast<const T*>(args.residual) +
                                                      row * args.dim + column);
      load<true>(args.weight + column, kWidth, weight[c]);
    }
  }

  float values[kChunks][kWidth];
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * blockDim.x + threadIdx.x) * kWidth;
#pragma unroll
    for (float& value : values[c]) value = 0.0f;
    if (column >= args.dim) continue;
    for (int peer = 0; peer < args.num_ranks; ++peer) {
      Words<T> words = own[c];
      if (peer != args.rank) {
        const uint4* from = place(args.rank, peer);
#pragma unroll
        for (int p = 0; p < kPackets<T>; ++p) {
          receive(from + packet(column, p), round, &words.words[2 * p]);
        }
      }
      add<T>(words, values[c]);
    }
    round_to<T>(values[c]);
    const int64_t at = row * args.dim + column;
    if constexpr (kIsNormed) {
      float residual[kWidth];
      unpack(before[c], residual);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[c][i] += residual[i];
      round_to<T>(values[c]);
      store<true>(static_cast<T*>(args.residual) + at, kWidth, values[c]);
      squares = sum_of_squares(values[c], squares);
    } else {
      store<true>(static_cast<T*>(args.out) + at, kWidth, values[c]);
    }
  }
  if constexpr (kIsNormed) {
    const float factor = inverse_rms(sum_over_block(squares, shared), args.dim, args.eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * blockDim.x + threadIdx.x) * kWidth;
      if (column >= args.dim) continue;
      scale(values[c], factor, weight[c]);
      store<true>(static_cast<T*>(args.out) + row * args.dim + column, kWidth, values[c]);
    }
  } else {
    __syncthreads();  // all have read the number of the round
  }
  if (threadIdx.x == 0) args.rounds[row] = round;
}

template <typename T, int kChunks>
cudaError_t launch_chunks(const PeerSumArgs& args, cudaStream_t stream) {
  const int64_t lanes = (args.dim / kWidth + kChunks - 1) / kChunks;
  const LaunchShape shape = {static_cast<unsigned>(args.num_rows),
                             static_cast<int>((lanes + 31) / 32 * 32)};
  return args.weight != nullptr ? launch(peer_sum_kernel<T, kChunks, true>, shape, stream, args)
                                : launch(peer_sum_kernel<T, kChunks, false>, shape, stream, args);
}

}  // namespace

cudaError_t launch_peer_sum(const PeerSumArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  if (args.dim % kWidth != 0 || args.dim > kMaxNormDim || args.num_rows > args.max_rows ||
      args.num_ranks > kMaxPeers) {
    return cudaErrorInvalidValue;
  }
  return dispatch(args.type, [&]<typename T>() {
    return args.dim <= 1024 * kWidth ? launch_chunks<T, 1>(args, stream)
                                     : launch_chunks<T, kManyChunks>(args, stream);
  });
}

}  // namespace vllm::layers
