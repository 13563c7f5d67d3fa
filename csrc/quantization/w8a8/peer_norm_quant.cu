// A sum over GPUs, the norm that follows and its quantisation, in one kernel.
#include "../../launch.cuh"
#include "../../layers/peer_exchange.cuh"
#include "dispatch.cuh"
#include "row_norm.cuh"

namespace vllm::w8a8 {
namespace {

// x and what peers send, added in float32 in the order of the ranks and rounded once.
template <typename T>
__device__ __forceinline__ Chunk<T> sum_of_peers(const layers::PeerRow& row, const Chunk<T>& own,
                                                 int64_t piece, int64_t num_pieces) {
  float2 sums[kChunk / 2] = {};
  for (int peer = 0; peer < row.peers.num_ranks; ++peer) {
    Chunk<T> x = own;
    if (peer != row.peers.rank) row.receive_piece(peer, x.words, piece, num_pieces);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 pair = x.pair(i);
      sums[i].x += pair.x, sums[i].y += pair.y;
    }
  }
  Chunk<T> sum;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) sum.set_pair(i, sums[i]);
  return sum;
}

// A block for each row; rows from matrix.m on are filling.
template <typename T>
__global__ __launch_bounds__(kMaxPeerNormColumns / kChunk) void peer_norm_quant_kernel(
    Matrix matrix, RmsNorm norm, GroupScales scales, float inverse_k, layers::Peers peers) {
  __shared__ float shared[32];
  wait_for_inputs();
  const int64_t row = blockIdx.x, column = column_of(threadIdx.x, 0), k = matrix.k;
  const int valid = num_valid(column, k);
  Chunk<T> chunks[1] = {};
  if (row < matrix.m) {  // the same for the whole block
    const int64_t piece = column / kChunk, num_pieces = k / kChunk;
    const layers::PeerRow peer_row(peers, row, num_pieces * (Chunk<T>::kWords / 2));
    T* residual = static_cast<T*>(norm.residual) + row * norm.residual_stride + column;
    Chunk<T> before = {};
    Chunk<float> weight = {};
    if (valid > 0) {
      chunks[0] =
          load_chunk<true>(static_cast<const T*>(matrix.x) + row * matrix.x_stride + column, valid);
      peer_row.send_piece(chunks[0].words, piece, num_pieces);
      // What the norm reads is fetched while the rows of peers are on their way.
      before = load_chunk<true>(residual, valid);
      weight = load_chunk<true>(norm.weight + column, valid);
      chunks[0] = sum_of(sum_of_peers(peer_row, chunks[0], piece, num_pieces), before);
      store_chunk<true>(residual, chunks[0], valid);
    }
    const float sum =
        block_reduce(sum_of_squares(chunks[0]), shared, [](float a, float b) { return a + b; });
    scale_chunk(chunks[0], weight, rsqrtf(__fmul_rn(sum, inverse_k) + norm.eps));
    if (norm.normed != nullptr) {
      store_chunk<true>(static_cast<T*>(norm.normed) + row * k + column, chunks[0], valid);
    }
    if (threadIdx.x == 0) peer_row.end();
  }
  quantise_row<true>(chunks, matrix, scales, row, threadIdx.x);
}

}  // namespace

cudaError_t launch_peer_norm_quant(const Matrix& matrix, const RmsNorm& norm,
                                   const GroupScales& scales, const layers::Peers& peers,
                                   cudaStream_t stream) {
  if (scales.num_rows == 0) return cudaSuccess;
  // Whole groups lie within warps.
  const int threads = static_cast<int>((matrix.k / kChunk + 31) / 32 * 32);
  if (!matrix.is_vector || matrix.k > kMaxPeerNormColumns || matrix.m > peers.max_rows ||
      norm.residual == nullptr) {
    return cudaErrorInvalidValue;
  }
  const LaunchShape shape = {dim3(static_cast<unsigned>(scales.num_rows)), threads};
  const float inverse_k = 1.0f / static_cast<float>(matrix.k);
  return dispatch(matrix.type, [&]<typename T>() {
    return launch(peer_norm_quant_kernel<T>, shape, stream, matrix, norm, scales, inverse_k, peers);
  });
}

}  // namespace vllm::w8a8
