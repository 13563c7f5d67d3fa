"""Rotary position embedding; the frequencies of each variant come from transformers."""

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm.errors import CheckpointError
from vllm.model_executor.context import ModelContext

# Variants whose frequencies do not change with the length of the sequence at hand.
_SCALED = ("linear", "llama3", "yarn")


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place. One per model, shared by its layers.

    cos_sin_cache: float32 [max_model_len, rotary_dim], cos in the first half. rotary_dim: how many
    columns of a head are rotated, the first ones (`partial_rotary_factor` of the config).
    """

    def __init__(self, ctx: ModelContext, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.ops = ctx.ops
        inv_freq, factor = _frequencies(ctx, head_dim)
        angles = torch.outer(torch.arange(ctx.max_model_len, dtype=torch.float32), inv_freq)
        self.cos_sin_cache = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> None:
        """q [T, heads, head_dim], k [T, kv heads, head_dim]; may be views with strides."""
        self.ops.rotary_embedding(positions, q, k, self.cos_sin_cache)


def _frequencies(ctx: ModelContext, head_dim: int) -> tuple[Tensor, float]:
    rope = ctx.hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    if kind not in _SCALED:
        raise CheckpointError(
            f"rope_type {kind!r} is not supported: config.json may ask for default, "
            f"{', '.join(_SCALED)}"
        )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](ctx.hf_config, None)
    return inv_freq.float(), float(factor)
