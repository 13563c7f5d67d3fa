"""Qwen3.5 mixture of experts: Qwen3.5's layers, with routed experts and one that is for all."""

import dataclasses

from torch import Tensor, nn

from vllm.distributed.groups import Addend, add, own_part
from vllm.kernels.activations import Activation, source_of
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import plain_linear
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, log_what_is_skipped
from vllm.model_executor.models.qwen3_moe import Qwen3MoeExperts
from vllm.platforms.streams import beside


class Qwen3_5MoeExperts(Qwen3MoeExperts):
    """Adds to the routed experts one for all tokens, times the sigmoid of a gate of each token."""

    def __init__(self, ctx: ModelContext, prefix: str):
        super().__init__(ctx, prefix)
        config = ctx.hf_config
        self.ops = ctx.ops
        self.shared_expert = LlamaMLP(
            ctx, f"{prefix}.shared_expert", config.shared_expert_intermediate_size
        )
        # One row, which checkpoints keep as it is, like the router.
        plain = dataclasses.replace(ctx, quant_config=None)
        name = f"{prefix}.shared_expert_gate"
        self.shared_expert_gate = plain_linear(plain, name, config.hidden_size, 1)
        self.shared_expert.writer.leaves_sum = True  # together with that of the routed experts

    def forward(self, x: Activation) -> Addend:
        routed = super().forward
        return add(*beside(source_of(x), lambda _: routed(x), self.gated_shared_expert))

    def gated_shared_expert(self, x: Tensor) -> Addend:
        shared = self.shared_expert(x)
        # A factor of the sum, which may as well be one of its parts.
        part = own_part(shared)
        self.ops.mul_sigmoid(part[:, None], self.shared_expert_gate(x)[:, None])
        return shared


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    @staticmethod
    def feed_forward(ctx: ModelContext, prefix: str, layer: int) -> nn.Module:
        return Qwen3_5MoeExperts(ctx, prefix)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    def __init__(self, ctx: ModelContext):
        super().__init__(ctx)
        log_what_is_skipped()
