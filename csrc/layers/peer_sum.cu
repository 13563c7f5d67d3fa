// Sums over GPUs (peer_exchange.cuh), alone or with the norm that follows.
#include "launch.cuh"
#include "peer_exchange.cuh"
#include "peer_sum.h"
#include "vector.cuh"

namespace vllm::layers {
namespace {

constexpr int kManyChunks = 4;
template <int kChunks>
constexpr int kMaxThreads = kChunks == 1 ? 1024 : kMaxNormDim / kWidth / kManyChunks;

template <typename T>
__device__ __forceinline__ void add(const Stored<T>& words, float (&values)[kWidth]) {
  const T* elements = reinterpret_cast<const T*>(words.words);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] += to_float(elements[i]);
}

template <typename T, int kChunks, bool kIsNormed>
__global__ __launch_bounds__(kMaxThreads<kChunks>) void peer_sum_kernel(PeerSumArgs args) {
  __shared__ float shared[32];
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  const int64_t num_pieces = args.dim / kWidth;
  const PeerRow peer_row(args.peers, row, num_pieces * (Stored<T>::kWords / 2));

  Stored<T> own[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * blockDim.x + threadIdx.x) * kWidth;
    if (column >= args.dim) continue;
    own[c] = *reinterpret_cast<const Stored<T>*>(static_cast<const T*>(args.x) + row * args.dim +
                                                 column);
    peer_row.send_piece(own[c].words, column / kWidth, num_pieces);
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
    for (int peer = 0; peer < args.peers.num_ranks; ++peer) {
      Stored<T> words = own[c];
      if (peer != args.peers.rank) {
        peer_row.receive_piece(peer, words.words, column / kWidth, num_pieces);
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
  if (threadIdx.x == 0) peer_row.end();
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
  if (args.dim % kWidth != 0 || args.dim > kMaxNormDim || args.num_rows > args.peers.max_rows ||
      args.peers.num_ranks > kMaxPeers) {
    return cudaErrorInvalidValue;
  }
  return dispatch(args.type, [&]<typename T>() {
    return args.dim <= 1024 * kWidth ? launch_chunks<T, 1>(args, stream)
                                     : launch_chunks<T, kManyChunks>(args, stream);
  });
}

}  // namespace vllm::layers
