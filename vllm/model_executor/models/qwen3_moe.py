"""Qwen3 mixture of experts: Qwen3's attention, and in most layers routed experts for the MLP."""

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from vllm.distributed.groups import Addend
from vllm.kernels.activations import Activation, source_of
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.router import Routing
from vllm.model_executor.layers.linear import merged_linear
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaMLP
from vllm.model_executor.models.qwen3 import Qwen3Attention


class Qwen3MoeAttention(Qwen3Attention):
    @staticmethod
    def sliding_window(config: object, layer: int) -> int:
        """All layers slide or none does."""
        is_used = getattr(config, "use_sliding_window", False)
        return int(getattr(config, "sliding_window", None) or 0) if is_used else 0


class Qwen3MoeExperts(nn.Module):
    # Beside the router, whose product they are part of: checkpoint name, rows.
    other_gates: ClassVar[tuple[tuple[str, int], ...]] = ()

    def __init__(self, ctx: ModelContext, prefix: str):
        super().__init__()
        config, self.ops = ctx.hf_config, ctx.ops
        num_experts, top_k = config.num_experts, config.num_experts_per_tok
        self.routing = Routing(num_experts, top_k, self.renormalises(config))
        # Checkpoints keep routers as they are whether they list them as not quantised or not.
        plain = dataclasses.replace(ctx, quant_config=None)
        gates = [("gate", num_experts), *self.other_gates]
        self.gate = merged_linear(plain, f"{prefix}.gate", config.hidden_size, gates)
        self.experts = FusedMoE(
            ctx,
            f"{prefix}.experts",
            num_experts,
            top_k,
            config.hidden_size,
            config.moe_intermediate_size,
        )

    @staticmethod
    def renormalises(config: object) -> bool:
        """Whether the weights of a token's experts add up to one."""
        return bool(getattr(config, "norm_topk_prob", True))

    @property
    def reader(self) -> FusedMoE:
        """Which may want the input quantised; all that read it besides take floats."""
        return self.experts

    def choose(self, x: Activation) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and ids of experts, and the logits of `other_gates`, a column for each row."""
        return self.ops.choose_experts(source_of(x), self.gate.kernel, self.routing)

    def forward(self, x: Activation) -> Addend:
        weights, ids, _ = self.choose(x)
        return self.experts(x, weights, ids)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    attention = Qwen3MoeAttention

    @staticmethod
    def feed_forward(ctx: ModelContext, prefix: str, layer: int) -> nn.Module:
        config = ctx.hf_config
        is_sparse = (layer + 1) % config.decoder_sparse_step == 0
        if layer in config.mlp_only_layers or not is_sparse:
            return LlamaMLP(ctx, prefix)
        return Qwen3MoeExperts(ctx, prefix)
