"""Gated delta-net: linear attention whose memory of a request is one state of a fixed size."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import DeltaNet
from vllm.architectures.sharding import Dim, Part
from vllm.kernels import registry
from vllm.kernels.activations import Activation, InputQuant
from vllm.kernels.interface import DeltaRule
from vllm.kernels.problems import delta_rule_problem
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.linear import Linear, linear_layer
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter
from vllm.ops.paged_attention import zeros_on_demand
from vllm.utils.torch_utils import SHORT_NAMES


class GatedDeltaNet(nn.Module):
    """x [T, hidden] -> [T, value heads * value_dim]: q, k and v through a short causal convolution,
    then the gated delta rule per head and a gated norm; `out_proj` goes back to [T, hidden].
    Formulas: `gated_delta_rule` in vllm.ops.

    Tensor-parallel ranks divide key and value heads; all sizes here are those of this rank.

    conv_state: [slots, taps - 1, channels] in the type of activations. state: float32 [slots,
    value heads, key_dim, value_dim]. Slot 0 is nobody's; the others belong to running requests.
    """

    def __init__(self, ctx: ModelContext, prefix: str, spec: DeltaNet):
        super().__init__()
        self.group, self.ops = ctx.parallel.tensor, ctx.ops
        self.spec, self.cache_spec = spec, spec.cache
        self.prefix, self.dtype = prefix + spec.name, ctx.dtype
        self.num_key_heads, self.num_value_heads = spec.rule.per_rank(self.group.size)
        self.key_dim, self.value_dim = spec.cache.key_dim, spec.cache.value_dim
        self.taps = spec.cache.taps
        self.eps = ctx.decoder.rms_norm_eps
        self.in_proj_qkvz = linear_layer(ctx, prefix, spec.in_proj_qkvz)
        self.in_proj_ba = linear_layer(ctx, prefix, spec.in_proj_ba)
        self.out_proj = linear_layer(ctx, prefix, spec.out_proj)
        (_, channels), _ = spec.cache.shapes(self.group.size)
        self.conv_weight = empty_parameter(self.taps, channels, dtype=torch.float32)
        self.decay_rate = empty_parameter(self.num_value_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(self.num_value_heads, dtype=torch.float32)
        self.norm_weight = empty_parameter(self.value_dim, dtype=torch.float32)
        self.conv_state = self.state = torch.empty(0)
        self.rule_name = prefix + spec.rule.name
        problem = delta_rule_problem(spec.rule, self.group.size, SHORT_NAMES[ctx.dtype])
        self.decision = ctx.selection.choose(self.rule_name, problem)

    def make_kernel(self) -> None:
        self.rule: DeltaRule = registry.maker(self.decision).delta_rule(self.decision.problem)

    def slots(self) -> dict[str, Slot]:
        return {
            f"{self.prefix}.conv1d.weight": self._conv_slot(),
            f"{self.prefix}.A_log": self._head_slot(self.decay_rate, torch.exp),
            f"{self.prefix}.dt_bias": self._head_slot(self.dt_bias),
            f"{self.prefix}.norm.weight": Slot(
                (self.value_dim,), FLOATS, self.norm_weight.data.copy_
            ),
        }

    def _conv_slot(self) -> Slot:
        """[channels, 1, taps] in the checkpoint, sharded like q, k and v."""
        whole, start = None, 0
        qkv, group = Part("conv1d", self.cache_spec.channels), self.group
        for region in qkv.regions(Dim("", self.taps), "column", group.rank, group.size):
            end = start + region.shape[0]
            columns = self.conv_weight.data[:, start:end]
            slot = Slot(
                (qkv.num_rows, 1, self.taps),
                FLOATS,
                lambda tensor, columns=columns: columns.copy_(tensor.squeeze(1).T),
                () if group.size == 1 else (slice(*region.rows),),
            )
            whole, start = whole.with_other(slot) if whole else slot, end
        assert whole is not None
        return whole

    def _head_slot(
        self, target: nn.Parameter, change: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Slot:
        """One number for each value head."""
        count, rank, size = self.num_value_heads, self.group.rank, self.group.size
        return Slot(
            (count * size,),
            FLOATS,
            lambda tensor: target.data.copy_(change(tensor.float())),
            () if size == 1 else (slice(rank * count, (rank + 1) * count),),
        )

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Zeros; what a slot holds counts for nothing to a request that starts."""
        kept, state = self.cache_spec.shapes(self.group.size)
        self.conv_state = zeros_on_demand((num_slots, *kept), self.dtype, device)
        self.state = zeros_on_demand((num_slots, *state), torch.float32, device)

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
        key_size = self.num_key_heads * self.key_dim
        channels, value_size = self.conv_weight.shape[1], self.num_value_heads * self.value_dim
        qkv, z = self.in_proj_qkvz(x).split((channels, value_size), 1)
        gates = x if isinstance(x, Tensor) or x.source is None else x.source
        b, a = self.in_proj_ba(gates).chunk(2, 1)
        qkv = self.ops.causal_conv1d(qkv, self.conv_weight, self.conv_state, *requests)
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
        )
        z = z.unflatten(1, (self.num_value_heads, self.value_dim))
        return self.ops.rms_norm_gated(y, z, self.norm_weight, self.eps).flatten(1)
