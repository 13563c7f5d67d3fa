"""Qwen3 dense: no QKV bias, but an RMSNorm over each head of q and k before the rotation."""

from typing import Any, ClassVar

from torch import Tensor

from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.ops.paged_attention import CacheTarget


class Qwen3Attention(LlamaAttention):
    """Relatives override `head_norm`."""

    head_norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, ctx: ModelContext, prefix: str, layer: int, rotary: RotaryEmbedding):
        super().__init__(ctx, prefix, layer, rotary)
        self.q_norm = self.head_norm(ctx, f"{prefix}.q_norm", self.head_dim)
        self.k_norm = self.head_norm(ctx, f"{prefix}.k_norm", self.head_dim)
        self.ops = ctx.ops

    @staticmethod
    def sliding_window(config: Any, layer: int) -> int:
        return Qwen2Attention.sliding_window(config, layer)

    def shape_qk(
        self, q: Tensor, k: Tensor, positions: Tensor, target: CacheTarget | None
    ) -> tuple[Tensor, Tensor]:
        norms, cache = (self.q_norm.weight, self.k_norm.weight), self.rotary.cos_sin_cache
        if target is None:
            self.ops.qk_norm_rotary(positions, q, k, *norms, cache, self.q_norm.eps)
        else:
            self.ops.rotary_into_cache(positions, q, k, target, cache, norms, self.q_norm.eps)
        return q, k


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention = Qwen3Attention
