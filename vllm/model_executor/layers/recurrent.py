"""What layers with a recurrent state have in common: a causal convolution and one number a head."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import DeltaNet, Mamba2
from vllm.architectures.sharding import Dim, Part
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.problem import DeltaRuleProblem, Mamba2Problem
from vllm.model_executor.context import ModelContext
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter
from vllm.ops.paged_attention import zeros_on_demand


class RecurrentLayer(nn.Module):
    """Tensor-parallel ranks divide heads; all sizes here are those of this rank.

    conv_state: [slots, taps - 1, channels] in the type of activations. state: float32 [slots,
    heads, key_dim, value_dim]. Slot 0 is nobody's; the others belong to running requests.
    conv_weight: float32 [taps, channels]. decay_rate, dt_bias: float32 [heads].

    decision: of the recurrence, whose name is recurrence_name.
    """

    recurrence_name: str
    decision: Decision

    def __init__(self, ctx: ModelContext, prefix: str, spec: DeltaNet | Mamba2):
        super().__init__()
        self.group, self.ops = ctx.parallel.tensor, ctx.ops
        self.cache_spec = spec.cache
        self.prefix, self.dtype = prefix + spec.name, ctx.dtype
        self.eps = ctx.decoder.rms_norm_eps
        (_, channels), (num_heads, _, _) = spec.cache.shapes(self.group.size)
        self.taps = spec.cache.taps
        self.conv_weight = empty_parameter(self.taps, channels, dtype=torch.float32)
        self.decay_rate = empty_parameter(num_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(num_heads, dtype=torch.float32)
        self.conv_state = self.state = torch.empty(0)

    def choose(
        self, ctx: ModelContext, name: str, problem: DeltaRuleProblem | Mamba2Problem
    ) -> None:
        """After the projections, as the description lists what asks for a kernel."""
        self.recurrence_name = name
        self.decision = ctx.selection.choose(name, problem)

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Zeros; what a slot holds counts for nothing to a request that starts."""
        kept, state = self.cache_spec.shapes(self.group.size)
        self.conv_state = zeros_on_demand((num_slots, *kept), self.dtype, device)
        self.state = zeros_on_demand((num_slots, *state), torch.float32, device)

    def slots(self) -> dict[str, Slot]:
        return {
            f"{self.prefix}.conv1d.weight": self._conv_slot(
                (1, self.taps), lambda rows, weight: self.conv_weight.data[:, rows].copy_(weight.T)
            ),
            f"{self.prefix}.A_log": self._head_slot(self.decay_rate, torch.exp),
            f"{self.prefix}.dt_bias": self._head_slot(self.dt_bias),
        }

    def _conv_slot(
        self, columns: tuple[int, ...], write: Callable[[slice, Tensor], object]
    ) -> Slot:
        """[channels, *columns] in the checkpoint, cut like the rows of the projection. write: rows
        of this rank's, [channels, size of columns] or [channels]."""
        whole, start = None, 0
        part, group = Part("conv1d", self.cache_spec.channels), self.group
        for region in part.regions(Dim("", self.taps), "column", group.rank, group.size):
            rows = slice(start, start + region.shape[0])
            slot = Slot(
                (part.num_rows, *columns),
                FLOATS,
                lambda tensor, rows=rows: write(rows, tensor.flatten(1) if columns else tensor),
                () if group.size == 1 else (slice(*region.rows),),
            )
            whole, start = whole.with_other(slot) if whole else slot, rows.stop
        assert whole is not None
        return whole

    def _head_slot(
        self, target: nn.Parameter, change: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Slot:
        """As many numbers for each head as `target` has."""
        count, rank, size = target.numel(), self.group.rank, self.group.size
        return Slot(
            (count * size,),
            FLOATS,
            lambda tensor: target.data.copy_(change(tensor.float()).view_as(target)),
            () if size == 1 else (slice(rank * count, (rank + 1) * count),),
        )
