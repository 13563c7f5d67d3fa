// Exports of the kernels that write the memory of other GPUs.
#include <tvm/ffi/optional.h>

#include <cmath>

#include "../layers/peer_sum.h"
#include "cuda_float.h"
#include "cuda_peers.h"

namespace vllm {
namespace {

using tvm::ffi::Optional;

void check_like(const TensorView& tensor, const char* name, const TensorView& x) {
  check_cuda(tensor, name, 2, x, "x");
  check_contiguous(tensor, name);
  check_aligned(tensor, name, kVectorBytes);
  for (int i = 0; i < 2; ++i) check_size(tensor, name, i, x.size(i), "as in x");
  check_same_type(float_type(tensor, name), tensor, name, float_type(x, "x"), "x");
}

layers::PeerSumArgs args_of(const TensorView& x, const TensorView& out, const TensorView& inboxes,
                            int64_t rank, const TensorView& rounds) {
  layers::PeerSumArgs args;
  check_like(x, "x", x);
  check_like(out, "out", x);
  args.type = type_of(x, "x");
  args.num_rows = x.size(0), args.dim = x.size(1);
  args.peers = peers_of(x, inboxes, rank, rounds);
  VLLM_CHECK(args.dim % layers::kWidth == 0 && args.dim <= layers::kMaxNormDim,
             "x: given rows of " << args.dim << "; accepted: multiples of " << layers::kWidth
                                 << " up to " << layers::kMaxNormDim);
  args.x = data_of(x), args.out = data_of(out);
  return args;
}

// out = the sum of x over the ranks; out may be x.
void cuda_peer_sum(TensorView x, TensorView out, TensorView inboxes, int64_t rank,
                   TensorView rounds) {
  const layers::PeerSumArgs args = args_of(x, out, inboxes, rank, rounds);
  const DeviceGuard guard(x);
  check_launch(layers::launch_peer_sum(args, stream_of(x)), "cuda_peer_sum");
}

// residual += the sum of x over the ranks, then x = rms_norm(residual).
void cuda_peer_sum_add_rms_norm(TensorView x, TensorView residual, TensorView weight, double eps,
                                TensorView inboxes, int64_t rank, TensorView rounds) {
  layers::PeerSumArgs args = args_of(x, x, inboxes, rank, rounds);
  check_like(residual, "residual", x);
  check_cuda(weight, "weight", 1, x, "x");
  check_type(weight, "weight", kDLFloat, 32);
  check_size(weight, "weight", 0, args.dim, "columns of x");
  check_contiguous(weight, "weight");
  check_aligned(weight, "weight", kVectorBytes);
  VLLM_CHECK(std::isfinite(eps) && eps >= 0, "eps: given " << eps << "; accepted: 0 or more");
  args.residual = data_of(residual);
  args.weight = static_cast<const float*>(data_of(weight)), args.eps = static_cast<float>(eps);
  const DeviceGuard guard(x);
  check_launch(layers::launch_peer_sum(args, stream_of(x)), "cuda_peer_sum_add_rms_norm");
}

// Bytes of the inbox of each of num_ranks ranks.
int64_t cuda_peer_inbox_bytes(int64_t num_ranks, int64_t max_rows, int64_t dim,
                              int64_t type_bytes) {
  return layers::peer_inbox_bytes(static_cast<int>(num_ranks), max_rows, dim, type_bytes);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_peer_sum, cuda_peer_sum);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_peer_sum_add_rms_norm, cuda_peer_sum_add_rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_peer_inbox_bytes, cuda_peer_inbox_bytes);

}  // namespace vllm
