"""Rotary position embedding, with the frequencies of each variant."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import Rope
from vllm.errors import CheckpointError
from vllm.model_executor.context import ModelContext
from vllm.ops.paged_attention import CacheTarget

PROPORTIONAL = "proportional"


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place. One for each of the model's ropes, shared by its layers; rope None
    leaves them as they are. head_dim: of the columns that it may rotate.

    cos_sin_cache: float32 [max_model_len, rotary_dim], cos in the first half. rotary_dim: how many
    columns of a head are rotated, the first ones (`partial_rotary_factor` of the config).
    """

    def __init__(self, ctx: ModelContext, rope: Rope | None, head_dim: int):
        super().__init__()
        self.ops, self.is_neox = ctx.ops, ctx.decoder.is_neox
        # A model without data has a real table: to compute on `meta`, torch imports its compiler
        # and sympy, which takes ten seconds on a new machine.
        is_meta = torch.get_default_device().type == "meta"
        with torch.device("cpu") if is_meta else nullcontext():
            inv_freq, factor = _frequencies(ctx, rope, head_dim)
            angles = torch.outer(torch.arange(ctx.max_model_len, dtype=torch.float32), inv_freq)
            self.cos_sin_cache = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)

    def forward(
        self, positions: Tensor, q: Tensor, k: Tensor, target: CacheTarget | None = None
    ) -> None:
        """q [T, heads, head_dim], k [T, kv heads, head_dim]; may be views with strides. With a
        target K goes there instead, and V too."""
        if target is None:
            self.ops.rotary_embedding(positions, q, k, self.cos_sin_cache, self.is_neox)
        else:
            self.ops.rotary_into_cache(
                positions, q, k, target, self.cos_sin_cache, is_neox=self.is_neox
            )


def _frequencies(ctx: ModelContext, rope: Rope | None, head_dim: int) -> tuple[Tensor, float]:
    """float32 [rotary_dim / 2], and what cos and sin are multiplied by."""
    decoder = ctx.decoder
    if rope is None:  # angles of 0: a kernel that rotates K into the cache serves all layers
        return torch.zeros(head_dim // 2), 1.0
    kind = rope.get("rope_type", "default")
    if kind not in ("default", PROPORTIONAL, *_SCALED):
        raise CheckpointError(
            f"rope_type {kind!r} is not supported: config.json may ask for default, "
            f"{PROPORTIONAL}, {', '.join(_SCALED)}"
        )
    if kind == PROPORTIONAL:
        return _proportional(rope, head_dim), 1.0
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    wide = rope["rope_theta"] ** exponents
    if kind == "default":
        return 1.0 / wide, 1.0
    original = rope.get("original_max_position_embeddings") or decoder.max_position_embeddings
    lengths = _Lengths(original, decoder.max_position_embeddings, ctx.max_model_len)
    return _SCALED[kind](wide, rope, lengths)


def _proportional(rope: Rope, head_dim: int) -> Tensor:
    """Frequencies of whole heads, of which partial_rotary_factor turn and the others are 0: pairs
    are half a head apart, however few of them turn."""
    inv_freq = torch.zeros(head_dim // 2)
    num_turning = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    exponents = torch.arange(0, 2 * num_turning, 2, dtype=torch.float32) / head_dim
    inv_freq[:num_turning] = 1.0 / rope["rope_theta"] ** exponents / rope.get("factor", 1.0)
    return inv_freq


class _Lengths(NamedTuple):
    """Positions of pre-training, of the model, and to be served."""

    original: int
    trained: int
    served: int


def _linear(wide: Tensor, rope: Rope, lengths: _Lengths) -> tuple[Tensor, float]:
    return 1.0 / wide / rope["factor"], 1.0


def _llama3(wide: Tensor, rope: Rope, lengths: _Lengths) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are slowed down by `factor`, short ones are not, with a linear passage
    between them. https://github.com/meta-llama/llama-models, models/llama3/model.py"""
    low, high, factor = (rope[n] for n in ("low_freq_factor", "high_freq_factor", "factor"))
    inv_freq, original = 1.0 / wide, lengths.original
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slow = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, slow), 1.0


def _yarn(wide: Tensor, rope: Rope, lengths: _Lengths) -> tuple[Tensor, float]:
    """YaRN, https://arxiv.org/abs/2309.00071: dimensions that turn more than beta_fast times over
    `original` positions stay, those below beta_slow are slowed down by `factor`."""
    factor, half, original = rope["factor"], len(wide), lengths.original
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


def _yarn_attention_factor(rope: Rope) -> float:
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if numerator and denominator:
        return temperature(numerator) / temperature(denominator)
    return temperature(1.0)


def _dynamic(wide: Tensor, rope: Rope, lengths: _Lengths) -> tuple[Tensor, float]:
    """NTK-aware scaling by the length of the sequence. Keys are cached as they were rotated, so the
    length is that of the longest request to serve, for all requests."""
    if lengths.served <= lengths.trained or len(wide) < 2:
        return 1.0 / wide, 1.0
    factor, dim = rope["factor"], 2 * len(wide)
    growth = (factor * lengths.served / lengths.trained - (factor - 1)) ** (dim / (dim - 2))
    base = rope["rope_theta"] * growth
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / base**exponents, 1.0


def _longrope(wide: Tensor, rope: Rope, lengths: _Lengths) -> tuple[Tensor, float]:
    """LongRoPE, https://arxiv.org/abs/2402.13753: a factor for each frequency, `short_factor` up to
    the original length and `long_factor` beyond. Keys are cached as they were rotated, so which of
    them is decided by the longest request to serve, for all requests."""
    name = "long_factor" if lengths.served > lengths.original else "short_factor"
    inv_freq = 1.0 / (torch.tensor(rope[name], dtype=torch.float32) * wide)
    if (given := rope.get("attention_factor")) is not None:
        return inv_freq, float(given)
    factor = rope.get("factor") or lengths.trained / lengths.original
    if factor <= 1:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(lengths.original))


_SCALED: dict[str, Callable[[Tensor, Rope, _Lengths], tuple[Tensor, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
