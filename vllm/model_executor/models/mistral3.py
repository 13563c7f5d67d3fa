"""Mistral3 (Devstral Small 2, Mistral Small 3.x): its text model; vision weights are skipped."""

import torch
from torch import Tensor

from vllm.logger import get_logger
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralAttention
from vllm.ops.paged_attention import CacheTarget

logger = get_logger(__name__)

_VISION = ("vision_tower.", "multi_modal_projector.")
# The text model's place in checkpoints written before and after transformers 5.
_TEXT = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


class Ministral3Attention(MistralAttention):
    """Queries far out in the context are scaled up: q *= 1 + beta * ln(1 + floor(pos / L)).

    L is the context length of pre-training; the formula is that of Llama 4.
    """

    def __init__(self, ctx: ModelContext, prefix: str, layer: int, rotary: RotaryEmbedding):
        super().__init__(ctx, prefix, layer, rotary)
        rope = ctx.hf_config.rope_parameters
        self.beta = rope.get("llama_4_scaling_beta") or 0.0
        self.original_length = rope.get("original_max_position_embeddings") or 0
        # No position reaches the first step of the formula: the scale is 1 everywhere.
        self.is_scaled = bool(self.beta) and ctx.max_model_len > self.original_length

    def shape_qk(
        self, q: Tensor, k: Tensor, positions: Tensor, target: CacheTarget | None
    ) -> tuple[Tensor, Tensor]:
        q, k = super().shape_qk(q, k, positions, target)
        if self.is_scaled:
            steps = torch.floor(positions / self.original_length)
            q = q * (1 + self.beta * torch.log1p(steps)).to(q.dtype)[:, None, None]
        return q, k


class Ministral3ForCausalLM(LlamaForCausalLM):
    attention = Ministral3Attention


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Serves text only. The text config is of type mistral or ministral3."""

    def __init__(self, ctx: ModelContext):
        super().__init__(ctx)
        logger.info("Mistral3: serving the text model; images are not supported")

    @staticmethod
    def slot_name(name: str) -> str | None:
        if name.removeprefix("model.").startswith(_VISION):
            return None
        for stored, ours in _TEXT:
            if name.startswith(stored):
                return ours + name.removeprefix(stored)
        return name
