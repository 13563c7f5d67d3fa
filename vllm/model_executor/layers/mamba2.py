"""Mamba2: a state space model with one decay for each head (arXiv 2405.21060)."""

import torch
from torch import Tensor

from vllm.architectures.decoder import Mamba2
from vllm.kernels import registry
from vllm.kernels.activations import Activation
from vllm.kernels.interface import Mamba2Scan
from vllm.kernels.problems import mamba2_problem
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.linear import Linear, linear_layer
from vllm.model_executor.layers.recurrent import RecurrentLayer
from vllm.model_executor.weights import Slot, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES


class Mamba2Mixer(RecurrentLayer):
    """x [T, hidden] -> [T, heads * head_dim]: x, B and C through a short causal convolution, then
    the recurrence per head and a gated norm per group; `out_proj` goes back to [T, hidden].
    Formulas: `mamba2_scan` and `silu_mul_rms_norm` in vllm.ops.

    skip: float32 [heads]. norm_weight: float32 [groups, columns of a group]. conv_bias: float32
    [channels], or None.
    """

    def __init__(self, ctx: ModelContext, prefix: str, spec: Mamba2):
        size = ctx.parallel.tensor.size
        problem = mamba2_problem(spec.scan, size, SHORT_NAMES[ctx.dtype])
        super().__init__(ctx, prefix, spec)
        self.num_heads, self.num_groups = problem.num_heads, problem.num_groups
        self.head_dim, self.state_size = problem.head_dim, problem.state_size
        self.in_proj = linear_layer(ctx, prefix, spec.in_proj)
        self.out_proj = linear_layer(ctx, prefix, spec.out_proj)
        self.skip = empty_parameter(self.num_heads, dtype=torch.float32)
        columns = self.num_heads * self.head_dim // self.num_groups
        self.norm_weight = empty_parameter(self.num_groups, columns, dtype=torch.float32)
        channels = self.conv_weight.shape[1] if spec.has_conv_bias else 0
        self.conv_bias = empty_parameter(channels, dtype=torch.float32) if channels else None
        self.choose(ctx, prefix + spec.scan.name, problem)

    def make_kernel(self) -> None:
        self.scan: Mamba2Scan = registry.maker(self.decision).mamba2(self.decision.problem)

    def slots(self) -> dict[str, Slot]:
        slots = super().slots() | {
            f"{self.prefix}.D": self._head_slot(self.skip),
            f"{self.prefix}.norm.weight": self._head_slot(self.norm_weight),
        }
        if (bias := self.conv_bias) is not None:
            slots[f"{self.prefix}.conv1d.bias"] = self._conv_slot(
                (), lambda rows, own: bias.data[rows].copy_(own)
            )
        return slots

    @property
    def reader(self) -> Linear:
        """The layer that reads the input, and alone does."""
        return self.in_proj

    @property
    def writer(self) -> Linear:
        """The layer that reads the output, and whose own is to be added to the residual."""
        return self.out_proj

    def forward(self, x: Activation, batch: ForwardBatch) -> Tensor:
        at = batch.attention
        requests = at.state_slots, at.query_start_loc, at.seq_lens
        options = {"draft_slots": at.draft_slots, "max_query_len": at.max_query_len}
        size, of_groups = self.num_heads * self.head_dim, self.num_groups * self.state_size
        projected = self.in_proj(x)
        gate, channels, dt = projected.split((size, size + 2 * of_groups, self.num_heads), 1)
        channels = self.ops.causal_conv1d(
            channels,
            self.conv_weight,
            self.conv_state,
            *requests,
            bias=self.conv_bias,
            **options,
        )
        values, b, c = channels.split((size, of_groups, of_groups), 1)
        y = self.scan(
            values.unflatten(1, (self.num_heads, self.head_dim)),
            dt,
            b.unflatten(1, (self.num_groups, self.state_size)),
            c.unflatten(1, (self.num_groups, self.state_size)),
            self.decay_rate,
            self.dt_bias,
            self.skip,
            self.state,
            *requests,
            **options,
        )
        y, gate = (one.reshape(-1, self.num_groups, size // self.num_groups) for one in (y, gate))
        return self.ops.silu_mul_rms_norm(y, gate, self.norm_weight, self.eps).flatten(1)
