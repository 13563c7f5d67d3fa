"""What follows attention in a decoder layer: an MLP, or a mixture of experts."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import GatedMLP, MoE
from vllm.architectures.decoder import MLPBesideExperts as MLPBesideExpertsSpec
from vllm.architectures.decoder import UngatedMLP as UngatedMLPSpec
from vllm.distributed.groups import Addend, add, own_part, total
from vllm.kernels.activations import Activation, InputQuant, source_of
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.layernorm import NORMS, RouterNorm
from vllm.model_executor.layers.linear import Linear, linear_layer
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter, finite_into
from vllm.platforms.streams import beside


class MLP(nn.Module):
    """x [T, hidden] -> [T, hidden]. prefix: of the decoder layer."""

    reads_residual = False

    def __init__(self, ctx: ModelContext, prefix: str, spec: GatedMLP):
        super().__init__()
        self.gate_up_proj = linear_layer(ctx, prefix, spec.gate_up_proj)
        self.act_and_mul = _act_and_mul(ctx.ops, spec.activation)
        self.is_silu = spec.activation == "silu"
        self.down_proj = linear_layer(ctx, prefix, spec.down_proj)

    @property
    def reader(self) -> Linear:
        """The layer that reads the input, and alone does."""
        return self.gate_up_proj

    @property
    def writer(self) -> Linear:
        """The layer whose output is that of this one."""
        return self.down_proj

    def forward(self, x: Activation) -> Addend:
        y = self.gate_up_proj(x)
        # Which alone reads the product. A layer that is given floats quantises them itself.
        quant = self.down_proj.input_quant(y.shape[0]) if self.is_silu else None
        return self.down_proj(quant.silu_and_mul(y) if quant else self.act_and_mul(y))


class UngatedMLP(nn.Module):
    """x [T, hidden] -> [T, hidden]: two products with squared ReLU between them."""

    reads_residual = False

    def __init__(self, ctx: ModelContext, prefix: str, spec: UngatedMLPSpec):
        super().__init__()
        self.ops = ctx.ops
        self.up_proj = linear_layer(ctx, prefix, spec.up_proj)
        self.down_proj = linear_layer(ctx, prefix, spec.down_proj)

    @property
    def reader(self) -> Linear:
        """The layer that reads the input, and alone does."""
        return self.up_proj

    @property
    def writer(self) -> Linear:
        """The layer whose output is that of this one."""
        return self.down_proj

    def forward(self, x: Activation) -> Addend:
        return self.down_proj(self.ops.relu2(self.up_proj(x)))


def _act_and_mul(ops: ModuleType, activation: str) -> Callable[[Tensor], Tensor]:
    """x [T, 2 n] -> [T, n]: the activation of the first half times the second."""
    made: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": ops.silu_and_mul,
        "gelu": ops.gelu_and_mul,
        "gelu_tanh": partial(ops.gelu_and_mul, approximate="tanh"),
    }
    return made[activation]


class SparseMoE(nn.Module):
    """Routed experts, and beside them one for all tokens if the spec has it. to_latent and
    from_latent: around the routed experts, where these read latents."""

    reads_residual = False

    def __init__(self, ctx: ModelContext, prefix: str, spec: MoE):
        super().__init__()
        self.ops, self.router = ctx.ops, spec.experts.router
        self.is_shared_gated = spec.is_shared_gated
        self.gate = linear_layer(ctx, prefix, spec.gate)
        self.correction_bias: nn.Parameter | None = None
        if spec.correction_bias is not None:
            name, self.bias_shape = spec.correction_bias
            self.bias_name = prefix + name
            self.correction_bias = empty_parameter(self.router.num_experts, dtype=torch.float32)
        self.to_latent: Linear | None = None
        if spec.latent_projs is not None:
            self.to_latent = linear_layer(ctx, prefix, spec.latent_projs[0])
        self.experts = FusedMoE(ctx, prefix, spec.experts)
        if spec.latent_projs is not None:
            self.from_latent = linear_layer(ctx, prefix, spec.latent_projs[1])
        self.shared_expert: MLP | UngatedMLP | None = None
        if (shared := spec.shared_expert) is not None:
            kind = MLP if isinstance(shared, GatedMLP) else UngatedMLP
            self.shared_expert = kind(ctx, prefix, shared)
            # Its sum over the ranks is computed together with that of the routed experts.
            self.shared_expert.writer.reduce_results = False

    def slots(self) -> dict[str, Slot]:
        if self.correction_bias is None:
            return {}
        write = finite_into(self.correction_bias.data, "correction biases of a router")
        return {self.bias_name: Slot(self.bias_shape, FLOATS, write)}

    @property
    def reader(self) -> "FusedMoE | SparseMoE":
        """Which may want the input quantised; all that read it besides take floats. This module,
        which does not want it, where experts read something else."""
        reads_another = self.router.scales_inputs or self.to_latent is not None
        return self if reads_another else self.experts

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """Of readers that are all given floats."""
        return None

    def forward(self, x: Activation) -> Addend:
        # Of the gate of the shared expert: logits [T, 1].
        weights, ids, gate = self.ops.choose_experts(
            source_of(x), self.gate.kernel, self.router, self.correction_bias
        )
        if self.router.scales_inputs:
            return self._of_scaled(source_of(x), weights, ids)
        if (shared := self.shared_expert) is None:
            return self._routed(x, weights, ids)
        return add(
            *beside(
                source_of(x),
                lambda _: self._routed(x, weights, ids),
                lambda floats: self._gated(shared(floats), gate),
            )
        )

    def _of_scaled(self, x: Tensor, weights: Tensor, ids: Tensor) -> Addend:
        """The weight [T, 1] multiplies the input before any kernel quantises it, so that every
        kernel of experts serves: none of them need do it."""
        scaled, ones = x * weights.to(x.dtype), torch.ones_like(weights)
        if (shared := self.shared_expert) is None:
            return self.experts(scaled, ones, ids)
        return add(*beside(x, lambda _: self.experts(scaled, ones, ids), shared))

    def _routed(self, x: Activation, weights: Tensor, ids: Tensor) -> Addend:
        if self.to_latent is None:
            return self.experts(x, weights, ids)
        latents = self.to_latent(x)
        return self.from_latent(total(self.experts(latents, weights, ids)))

    def _gated(self, shared: Addend, gate: Tensor) -> Addend:
        if self.is_shared_gated:
            # A factor of the sum over the ranks, which may as well be one of its parts.
            self.ops.mul_sigmoid(own_part(shared)[:, None], gate[:, None])
        return shared


class MLPBesideExperts(nn.Module):
    """x [T, hidden], the normed residual, and residual -> [T, hidden]: what an MLP makes of the one
    and experts of the other. prefix: of the decoder layer."""

    reads_residual = True

    def __init__(self, ctx: ModelContext, prefix: str, spec: MLPBesideExpertsSpec):
        super().__init__()
        self.ops, self.router = ctx.ops, spec.experts.router
        hidden, norm = spec.experts.hidden, NORMS[ctx.decoder.norm]
        self.mlp = MLP(ctx, prefix, spec.mlp)
        self.after_mlp = norm(ctx, prefix + spec.after_mlp, hidden)
        self.router_norm = RouterNorm(ctx, prefix + spec.router_norm, hidden)
        self.gate = linear_layer(ctx, prefix, spec.gate)
        self.expert_scale = empty_parameter(self.router.num_experts, dtype=torch.float32)
        self.scale_name = prefix + spec.expert_scale
        self.before_experts = norm(ctx, prefix + spec.before_experts, hidden)
        self.experts = FusedMoE(ctx, prefix, spec.experts)
        self.after_experts = norm(ctx, prefix + spec.after_experts, hidden)

    def slots(self) -> dict[str, Slot]:
        write = finite_into(self.expert_scale.data, "scales of experts")
        return {self.scale_name: Slot(tuple(self.expert_scale.shape), FLOATS, write)}

    @property
    def reader(self) -> Linear:
        """The layer that reads the normed residual, and alone does."""
        return self.mlp.reader

    def forward(self, x: Activation, residual: Tensor) -> Tensor:
        weights, ids, _ = self.ops.choose_experts(
            self.router_norm(residual), self.gate.kernel, self.router, None
        )
        read = self.before_experts(residual)
        routed = self.experts(read, weights * self.expert_scale[ids], ids)
        return self.after_experts(total(routed)) + self.after_mlp(total(self.mlp(x)))
