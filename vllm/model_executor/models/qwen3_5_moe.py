"""Qwen3.5 mixture of experts: Qwen3.5's layers, with routed experts and one that is for all."""

from typing import ClassVar

from torch import Tensor, nn

from vllm.distributed.groups import Addend, add, own_part
from vllm.kernels.activations import Activation, source_of
from vllm.model_executor.context import ModelContext
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, log_what_is_skipped
from vllm.model_executor.models.qwen3_moe import Qwen3MoeExperts
from vllm.platforms.streams import beside


class Qwen3_5MoeExperts(Qwen3MoeExperts):
    """Adds to the routed experts one for all tokens, times the sigmoid of a gate of each token."""

    other_gates: ClassVar[tuple[tuple[str, int], ...]] = (("shared_expert_gate", 1),)

    def __init__(self, ctx: ModelContext, prefix: str):
        super().__init__(ctx, prefix)
        config = ctx.hf_config
        self.shared_expert = LlamaMLP(
            ctx, f"{prefix}.shared_expert", config.shared_expert_intermediate_size
        )
        self.shared_expert.writer.leaves_sum = True  # together with that of the routed experts

    @staticmethod
    def renormalises(config: object) -> bool:
        """Always: this architecture has no such field, whatever a config.json says."""
        return True

    def forward(self, x: Activation) -> Addend:
        weights, ids, gate = self.choose(x)
        return add(
            *beside(
                source_of(x),
                lambda _: self.experts(x, weights, ids),
                lambda floats: self.gated_shared_expert(floats, gate),
            )
        )

    def gated_shared_expert(self, x: Tensor, gate: Tensor) -> Addend:
        """gate: logits [T, 1]."""
        shared = self.shared_expert(x)
        # A factor of the sum, which may as well be one of its parts.
        part = own_part(shared)
        self.ops.mul_sigmoid(part[:, None], gate[:, None])
        return shared


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    @staticmethod
    def feed_forward(ctx: ModelContext, prefix: str, layer: int) -> nn.Module:
        return Qwen3_5MoeExperts(ctx, prefix)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    def __init__(self, ctx: ModelContext):
        super().__init__(ctx)
        log_what_is_skipped()
