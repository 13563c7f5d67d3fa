"""Rotary position embedding, with the frequencies of each variant."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import Decoder
from vllm.errors import CheckpointError
from vllm.model_executor.context import ModelContext
from vllm.ops.paged_attention import CacheTarget


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place. One per model, shared by its layers.

    cos_sin_cache: float32 [max_model_len, rotary_dim], cos in the first half. rotary_dim: how many
    columns of a head are rotated, the first ones (`partial_rotary_factor` of the config).
    """

    def __init__(self, ctx: ModelContext):
        super().__init__()
        self.ops = ctx.ops
        inv_freq, factor = _frequencies(ctx.decoder)
        angles = torch.outer(torch.arange(ctx.max_model_len, dtype=torch.float32), inv_freq)
        self.cos_sin_cache = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)

    def forward(
        self, positions: Tensor, q: Tensor, k: Tensor, target: CacheTarget | None = None
    ) -> None:
        """q [T, heads, head_dim], k [T, kv heads, head_dim]; may be views with strides. With a
        target K goes there instead, and V too."""
        if target is None:
            self.ops.rotary_embedding(positions, q, k, self.cos_sin_cache)
        else:
            self.ops.rotary_into_cache(positions, q, k, target, self.cos_sin_cache)


def _frequencies(decoder: Decoder) -> tuple[Tensor, float]:
    """float32 [rotary_dim / 2], and what cos and sin are multiplied by."""
    rope = decoder.rope
    kind = rope.get("rope_type", "default")
    if kind not in ("default", *_SCALED):
        raise CheckpointError(
            f"rope_type {kind!r} is not supported: config.json may ask for default, "
            f"{', '.join(_SCALED)}"
        )
    rotary_dim = int(decoder.rotary_head_dim * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    wide = rope["rope_theta"] ** exponents
    if kind == "default":
        return 1.0 / wide, 1.0
    original = rope.get("original_max_position_embeddings")
    return _SCALED[kind](wide, rope, original or decoder.max_position_embeddings)


def _linear(wide: Tensor, rope: Mapping[str, Any], original: int) -> tuple[Tensor, float]:
    return 1.0 / wide / rope["factor"], 1.0


def _llama3(wide: Tensor, rope: Mapping[str, Any], original: int) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are slowed down by `factor`, short ones are not, with a linear passage
    between them. https://github.com/meta-llama/llama-models, models/llama3/model.py"""
    low, high, factor = (rope[n] for n in ("low_freq_factor", "high_freq_factor", "factor"))
    inv_freq = 1.0 / wide
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slow = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, slow), 1.0


def _yarn(wide: Tensor, rope: Mapping[str, Any], original: int) -> tuple[Tensor, float]:
    """YaRN, https://arxiv.org/abs/2309.00071: dimensions that turn more than beta_fast times over
    `original` positions stay, those below beta_slow are slowed down by `factor`."""
    factor, half = rope["factor"], len(wide)
    dim = 2 * half

    def dimension(turns: float) -> float:
        ratio = original / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    kept = 1 - ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = (1.0 / (factor * wide)) * (1 - kept) + (1.0 / wide) * kept
    return inv_freq, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if numerator and denominator:
        return temperature(numerator) / temperature(denominator)
    return temperature(1.0)


# Variants whose frequencies do not change with the length of the sequence at hand.
_SCALED: dict[str, Callable[[Tensor, Mapping[str, Any], int], tuple[Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
