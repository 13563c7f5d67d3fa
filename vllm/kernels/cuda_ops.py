"""Model operations on the native CUDA kernels (contract: `vllm.ops`).

The functions of `torch_ops` but those of attention and the KV cache, which its backends own, and
three more. Tensors are on one GPU. Every call is one launch on torch's current stream, waits for
nothing and can be captured in a CUDA graph: tvm-ffi asks torch for the stream of the first tensor
at every call. The router, gates and the gated delta-net are Triton kernels, the first two launches,
the last several for steps with more than one token of a request; without Triton they are those of
`torch_ops`, of which such steps wait for the device.

Importing this module loads the library and raises `NativeLibraryError` if it cannot. Wrong
arguments raise ValueError naming the argument, what was given and what is accepted; values on the
GPU (positions, ids) cannot be refused, and turn to NaN what they would have read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.paged_attention import CacheTarget
from vllm.platforms import native

try:
    from vllm.kernels.triton.delta_rule import causal_conv1d, gated_delta_rule
    from vllm.kernels.triton.gates import mul_sigmoid, rms_norm_gated
    from vllm.kernels.triton.moe_router import choose_experts
except ImportError:
    from vllm.ops.torch_ops import (
        causal_conv1d,
        choose_experts,
        gated_delta_rule,
        mul_sigmoid,
        rms_norm_gated,
    )

__all__ = ["causal_conv1d", "choose_experts", "gated_delta_rule", "mul_sigmoid", "rms_norm_gated"]

_library = native.load()
_rms_norm = _library.cuda_rms_norm
_fused_add_rms_norm = _library.cuda_fused_add_rms_norm
_rotary_embedding = _library.cuda_rotary_embedding
_qk_norm_rotary = _library.cuda_qk_norm_rotary
_rotary_into_cache = _library.cuda_rotary_into_cache
_silu_and_mul = _library.cuda_silu_and_mul
_embedding = _library.cuda_embedding
_sample_tokens = _library.cuda_sample_tokens

USES_TORCH_THREADS = False
LOGIT_DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    `x` is [tokens, dim] or [tokens, heads, dim], possibly strided, dim up to 16384; `weight`
    float32 [dim]; `out` may be `x`.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm(x, weight, out, eps)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place: residual += x (rounded to its type), then x = rms_norm(residual, weight, eps)."""
    _fused_add_rms_norm(x, residual, weight, eps)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotates the first `rotary_dim` columns of every head of query and key, in place.

    `positions` int64 [tokens]; `query` [tokens, num_heads, head_dim] and `key` [tokens,
    num_kv_heads, head_dim], possibly strided; `cos_sin_cache` float32 [max_position, rotary_dim],
    cosines in the first half of a row, rotary_dim up to 256. Pairs are (i, i + rotary_dim / 2)
    where `is_neox`, else (2 i, 2 i + 1). A position outside the cache rotates by NaN.
    """
    _rotary_embedding(positions, query, key, cos_sin_cache, is_neox)


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

    Bit for bit what the two give one after the other. Weights float32 [head_dim], head_dim up to
    256; the rest as in `rotary_embedding`.
    """
    _qk_norm_rotary(
        positions, query, key, query_weight, key_weight, cos_sin_cache, eps, is_neox
    )  # fmt: skip


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
    _rotary_into_cache(
        positions,
        query,
        key,
        target.value,
        target.k_cache,
        target.v_cache,
        target.slot_mapping,
        cos_sin_cache,
        *(norms or (None, None)),
        eps,
        target.k_scale,
        target.v_scale,
        is_neox,
    )


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [tokens, 2 n] -> [tokens, n] = silu(x[:, :n]) * x[:, n:]."""
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
    _silu_and_mul(x, out)
    return out


def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """weight[ids] [tokens, n] in the weight's type; ids int64 [tokens], weight [vocab, n].

    An id outside the vocabulary gives a row of NaN.
    """
    if out is None:
        out = weight.new_empty((ids.shape[0], weight.shape[1]))
    _embedding(ids, weight, out)
    return out


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """One token for each row of logits [rows, vocab] (float32 or bfloat16): int64 [rows].

    Arguments, all on the GPU, and meaning are those of `cpu_ops.sample_tokens`. Exact sums of
    rounded weights: with d = max - logit in float32, a token weighs exp(-d / temperature), computed
    in float32 to 2^-21 of itself and rounded to an integer number of units of 2^-b of the
    likeliest's weight, b = min(51, 63 - ceil(log2(vocab))) (45 for 151,936 tokens). All sums are of
    integers, so a row's token is a function of that row alone. It equals the reference's unless a
    sum that decides lies within vocab * 2^-b of the likeliest's weight, or 2^-20 of itself, of the
    point or limit it is compared with; tokens less than 2^-b-1 times as likely as the likeliest are
    never drawn. Temperatures above 0 and below 2^-125 count as 2^-125.
    Equally likely means equal d. Rows whose largest logit is not finite give torch.argmax.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _sample_tokens(logits, temperature, top_k, top_p, min_p, uniforms, tokens)
    return tokens
