"""Model operations on the native CUDA kernels (contract: `vllm.ops`).

The functions of `torch_ops` but those of attention, the KV cache and recurrences, which backends
own, and three more. Tensors are on one GPU. Every call is one launch on torch's current stream,
waits for nothing and can be captured in a CUDA graph: tvm-ffi asks torch for the stream of the
first tensor at every call. The router, gates and the convolution are Triton kernels, the first two
launches, the last several for steps with more than one token of a request; without Triton they are
those of `torch_ops`, of which such steps wait for the device.

Importing this module loads the library and raises `NativeLibraryError` if it cannot. Wrong
arguments raise ValueError naming the argument, what was given and what is accepted; values on the
GPU (positions, ids) cannot be refused, and turn to NaN what they would have read.
"""

import torch
from torch import Tensor

from vllm.ops import torch_ops
from vllm.ops.native_ops import NativeOps
from vllm.ops.paged_attention import CacheTarget
from vllm.ops.torch_ops import linear_heads, pack_heads, soft_cap
from vllm.platforms import native

try:
    from vllm.kernels.triton.delta_rule import causal_conv1d
    from vllm.kernels.triton.gates import (
        gelu_and_mul,
        mul_sigmoid,
        relu2,
        rms_norm_gated,
        silu_mul_rms_norm,
    )
    from vllm.kernels.triton.moe_router import choose_experts
except ImportError:
    from vllm.ops.torch_ops import (
        causal_conv1d,
        choose_experts,
        gelu_and_mul,
        mul_sigmoid,
        relu2,
        rms_norm_gated,
        silu_mul_rms_norm,
    )

__all__ = [
    "causal_conv1d", "choose_experts", "gelu_and_mul", "linear_heads", "mul_sigmoid", "pack_heads",
    "relu2", "rms_norm_gated", "silu_mul_rms_norm", "soft_cap",
]  # fmt: skip

_ops = NativeOps("cuda_")
rms_norm, fused_add_rms_norm = _ops.rms_norm, _ops.fused_add_rms_norm
rotary_embedding, silu_and_mul = _ops.rotary_embedding, _ops.silu_and_mul
sample_tokens = _ops.sample_tokens
_library = native.load()
_qk_norm_rotary = _library.cuda_qk_norm_rotary
_rotary_into_cache = _library.cuda_rotary_into_cache
_embedding = _library.cuda_embedding

USES_TORCH_THREADS = False
LOGIT_DTYPES = (torch.float32, torch.bfloat16)


def qk_norm_rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    is_neox: bool = True,
) -> None:
    """rms_norm of every head of query and of key in place, then rotary_embedding, in one launch.

    Bit for bit what the two give one after the other. Weights float32 [head_dim]; the rest as in
    `rotary_embedding`. Heads of more than 256 columns are torch's.
    """
    if query.shape[-1] > 256:
        norms_and_cache = query_weight, key_weight, cos_sin_cache
        torch_ops.qk_norm_rotary(positions, query, key, *norms_and_cache, eps, is_neox)
        return
    norms = query_weight, key_weight
    _qk_norm_rotary(positions, query, key, *norms, cos_sin_cache, eps, is_neox)


def rotary_into_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    target: CacheTarget,
    cos_sin_cache: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    is_neox: bool = True,
) -> None:
    """`rotary_embedding` (with norms, of query and key: `qk_norm_rotary`) and the write of key and
    value to the cache, in one launch; key is left as it was.

    Bit for bit what the two give one after the other. Caches are of the key's type, or
    float8_e4m3fn. Heads up to 256; tokens of negative slots are not written.
    """
    cache = target.value, target.k_cache, target.v_cache, target.slot_mapping
    weights, scales = norms or (None, None), (target.k_scale, target.v_scale)
    _rotary_into_cache(
        positions, query, key, *cache, cos_sin_cache, *weights, eps, *scales, is_neox
    )


def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """weight[ids] [tokens, n] in the weight's type; ids int64 [tokens], weight [vocab, n].

    An id outside the vocabulary gives a row of NaN.
    """
    if out is None:
        out = weight.new_empty((ids.shape[0], weight.shape[1]))
    _embedding(ids, weight, out)
    return out
