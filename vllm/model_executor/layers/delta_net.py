"""Gated delta-net: linear attention whose memory of a request is one state of a fixed size."""

import dataclasses

import torch
from torch import Tensor

from vllm.architectures.decoder import DeltaNet
from vllm.kernels import registry
from vllm.kernels.activations import Activation, InputQuant
from vllm.kernels.interface import DeltaRule
from vllm.kernels.problems import delta_rule_problem
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.linear import Linear, linear_layer
from vllm.model_executor.layers.recurrent import RecurrentLayer
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES


class GatedDeltaNet(RecurrentLayer):
    """x [T, hidden] -> [T, value heads * value_dim]: q, k and v through a short causal convolution,
    then the gated delta rule per head and a gated norm; `out_proj` goes back to [T, hidden].
    Formulas: `gated_delta_rule` in vllm.ops."""

    def __init__(self, ctx: ModelContext, prefix: str, spec: DeltaNet):
        size = ctx.parallel.tensor.size
        problem = delta_rule_problem(spec.rule, size, SHORT_NAMES[ctx.dtype])
        super().__init__(ctx, prefix, spec)
        self.num_key_heads, self.num_value_heads = problem.num_key_heads, problem.num_value_heads
        self.key_dim, self.value_dim = problem.key_dim, problem.value_dim
        self.in_proj_qkvz = linear_layer(ctx, prefix, spec.in_proj_qkvz)
        self.in_proj_ba = linear_layer(ctx, prefix, spec.in_proj_ba)
        self.out_proj = linear_layer(ctx, prefix, spec.out_proj)
        self.norm_weight = empty_parameter(self.value_dim, dtype=torch.float32)
        self.choose(ctx, prefix + spec.rule.name, problem)

    def make_kernel(self) -> None:
        self.rule: DeltaRule = registry.maker(self.decision).delta_rule(self.decision.problem)

    def slots(self) -> dict[str, Slot]:
        norm = Slot((self.value_dim,), FLOATS, self.norm_weight.data.copy_)
        return super().slots() | {f"{self.prefix}.norm.weight": norm}

    @property
    def reader(self) -> "GatedDeltaNet":
        """Both projections read the input."""
        return self

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """How the large projection wants it quantised; floats stay beside unless the small one
        wants it likewise."""
        quant = self.in_proj_qkvz.input_quant(num_tokens)
        if quant is None or quant == self.in_proj_ba.input_quant(num_tokens):
            return quant
        return dataclasses.replace(quant, keeps_source=True)

    @property
    def writer(self) -> Linear:
        """The layer that reads the output, and whose own is to be added to the residual."""
        return self.out_proj

    def forward(self, x: Activation, batch: ForwardBatch) -> Tensor:
        at = batch.attention
        requests = at.state_slots, at.query_start_loc, at.seq_lens
        options = {"draft_slots": at.draft_slots, "max_query_len": at.max_query_len}
        key_size = self.num_key_heads * self.key_dim
        channels, value_size = self.conv_weight.shape[1], self.num_value_heads * self.value_dim
        qkv, z = self.in_proj_qkvz(x).split((channels, value_size), 1)
        gates = x if isinstance(x, Tensor) or x.source is None else x.source
        b, a = self.in_proj_ba(gates).chunk(2, 1)
        qkv = self.ops.causal_conv1d(qkv, self.conv_weight, self.conv_state, *requests, **options)
        q, k, v = qkv.split((key_size, key_size, value_size), 1)
        y = self.rule(
            q.unflatten(1, (self.num_key_heads, self.key_dim)),
            k.unflatten(1, (self.num_key_heads, self.key_dim)),
            v.unflatten(1, (self.num_value_heads, self.value_dim)),
            a,
            b,
            self.decay_rate,
            self.dt_bias,
            self.state,
            *requests,
            **options,
        )
        z = z.unflatten(1, (self.num_value_heads, self.value_dim))
        return self.ops.rms_norm_gated(y, z, self.norm_weight, self.eps).flatten(1)
