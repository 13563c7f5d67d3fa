"""Model operations that the native library has for CPUs and for GPUs (contract: `vllm.ops`)."""

import torch
from torch import Tensor

from vllm.platforms import native


class NativeOps:
    """prefix: of the names of the library's functions. Where a kernel for GPUs takes less than one
    for CPUs, or gives another result, that is said as "on a GPU"."""

    def __init__(self, prefix: str):
        library = native.load()
        self._rms_norm = getattr(library, prefix + "rms_norm")
        self._rotary_embedding = getattr(library, prefix + "rotary_embedding")
        self._fused_add_rms_norm = getattr(library, prefix + "fused_add_rms_norm")
        self._silu_and_mul = getattr(library, prefix + "silu_and_mul")
        self._sample_tokens = getattr(library, prefix + "sample_tokens")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

        `x` is [tokens, dim] or [tokens, heads, dim], possibly strided, on a GPU with dim up to
        16384; `weight` float32 [dim]; `out` may be `x`.
        """
        if out is None:
            out = x.new_empty(x.shape)
        self._rms_norm(x, weight, out, eps)
        return out

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """In place: residual += x (rounded to its type), then x = rms_norm(residual, weight)."""
        self._fused_add_rms_norm(x, residual, weight, eps)

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> None:
        """Rotates the first `rotary_dim` columns of every head of query and key, in place.

        `positions` int64 [tokens]; `query` [tokens, num_heads, head_dim] and `key` [tokens,
        num_kv_heads, head_dim], possibly strided; `cos_sin_cache` float32 [max_position,
        rotary_dim], cosines in the first half of a row. Pairs are (i, i + rotary_dim / 2) where
        `is_neox`, else (2 i, 2 i + 1). On a GPU rotary_dim is up to 256, and a position outside
        the cache rotates by NaN.
        """
        self._rotary_embedding(positions, query, key, cos_sin_cache, is_neox)

    def silu_and_mul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [tokens, 2 n] -> [tokens, n] = silu(x[:, :n]) * x[:, n:]."""
        if out is None:
            out = x.new_empty((x.shape[0], x.shape[1] // 2))
        self._silu_and_mul(x, out)
        return out

    def sample_tokens(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniforms: Tensor,
    ) -> Tensor:
        """One token for each row of logits float32 [rows, vocab], on a GPU bfloat16 too: int64
        [rows].

        The largest logit where `temperature` (float32 [rows]) is 0. Else the token at `uniforms`
        (float64 [rows], in [0, 1)) of the cumulated softmax(logits / temperature), of which only
        some tokens are kept: the `top_k` likeliest (int64, 0 for all); of their mass, the fewest
        that hold `top_p` of it (float32, 1 for all); and those at least `min_p` (float32) times as
        likely as the likeliest. Equally likely tokens are kept or dropped together.

        On a GPU: exact sums of rounded weights. With d = max - logit in float32, a token weighs
        exp(-d / temperature), computed in float32 to 2^-21 of itself and rounded to an integer
        number of units of 2^-b of the likeliest's weight, b = min(51, 63 - ceil(log2(vocab))) (45
        for 151,936 tokens). All sums are of integers, so a row's token is a function of that row
        alone. It equals the reference's unless a sum that decides lies within vocab * 2^-b of the
        likeliest's weight, or 2^-20 of itself, of the point or limit it is compared with; tokens
        less than 2^-b-1 times as likely as the likeliest are never drawn. Temperatures above 0 and
        below 2^-125 count as 2^-125. Equally likely means equal d. Rows whose largest logit is not
        finite give torch.argmax.
        """
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        self._sample_tokens(logits, temperature, top_k, top_p, min_p, uniforms, tokens)
        return tokens
