"""Linear layers own parameters; the kernel the selector chose owns their layout and compute."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vllm.architectures.sharding import LinearSpec, ParallelStyle
from vllm.distributed.groups import Addend, Group, PartialSum
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.activations import Activation, InputQuant, input_quant
from vllm.kernels.interface import LinearKernel, LinearTensors
from vllm.kernels.make_kernel import make_linear
from vllm.kernels.problems import linear_problem
from vllm.kernels.select.decision import Decision
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.sharding import Place
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES, dtype_of


class StorageMethod:
    """How the weights of a layer are stored; one instance serves one layer.

    act_schemes: the activation schemes the checkpoint allows, best liked first.
    """

    def __init__(
        self, weight: WeightFormat, act_schemes: tuple[ActScheme, ...] = (ActScheme.NONE,)
    ):
        self.format = weight
        self.act_schemes = act_schemes


class LinearMethod(StorageMethod, ABC):
    """How the weight of a linear layer is stored."""

    @abstractmethod
    def create_weights(self, layer: "StoredWeight") -> None:
        """Registers the parameters on `layer`."""

    @abstractmethod
    def shard_slots(self, layer: "StoredWeight", index: int, rows: slice) -> dict[str, Slot]:
        """Slots of shard `index`, by the last part of their checkpoint names (`weight`, ...).
        Writers check values."""

    @abstractmethod
    def tensors(self, layer: "StoredWeight") -> LinearTensors:
        """The loaded weight, as backends take it."""


class UnquantizedLinearMethod(LinearMethod):
    """A weight in a floating point type, kept as the checkpoint stores it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(WeightFormat(SHORT_NAMES[dtype]))
        self.dtype = dtype

    def create_weights(self, layer: "StoredWeight") -> None:
        layer.weight = empty_parameter(sum(layer.shard_rows), layer.input_size, dtype=self.dtype)

    def shard_slots(self, layer: "StoredWeight", index: int, rows: slice) -> dict[str, Slot]:
        write = copy_into(layer.weight.data[rows])
        return {"weight": layer.places[index].slot((1, 1), FLOATS, write)}

    def tensors(self, layer: "StoredWeight") -> LinearTensors:
        return LinearTensors(self.format, layer.weight.data, layer.shard_rows)


class StoredWeight(nn.Module):
    """The parameters of one weight, which a LinearMethod makes, fills and reads.

    shards: checkpoint names of what is merged into it (shard_names), with what this rank holds of
    each (places); input_size, shard_rows: as they are on this rank.
    """

    weight: nn.Parameter

    def __init__(self, prefix: str, shards: Sequence[tuple[str, Place]], group: Group):
        super().__init__()
        self.prefix = prefix
        self.group = group
        self.shard_names = tuple(name for name, _ in shards)
        self.places = tuple(place for _, place in shards)
        self.shard_rows = tuple(place.shape[0] for place in self.places)
        self.input_size = self.places[0].shape[1]

    @property
    def per_rank(self) -> str:
        """For messages about sizes: ` on each of 2 tensor-parallel ranks`, if there are several."""
        size = self.group.size
        return f" on each of {size} tensor-parallel ranks" if size > 1 else ""


class Linear(StoredWeight):
    """y = x @ W.T + b for x [T, input_size]: what one tensor-parallel rank has of `spec`.

    prefix: of the decoder layer, with its dot. A shard is a part of the spec, or a piece of one.
    """

    def __init__(self, ctx: ModelContext, prefix: str, spec: LinearSpec):
        group = ctx.parallel.tensor
        shards = spec.shards(prefix, group.rank, group.size)
        places = [(name, Place.of(region)) for name, region in shards]
        super().__init__(prefix + spec.name, places, group)
        self.method: LinearMethod = (
            spec.may_quantize and ctx.quant_methods.linear_method(self.shard_names)
        ) or UnquantizedLinearMethod(ctx.weight_dtype)
        output_size = sum(self.shard_rows)
        self.bias = empty_parameter(output_size, dtype=torch.float32) if spec.bias else None
        self.method.create_weights(self)
        self.problem = linear_problem(
            spec,
            self.prefix,
            list(self.places),
            group.size,
            self.method.format,
            self.method.act_schemes,
            SHORT_NAMES[ctx.dtype],
        )
        self.selection = ctx.selection
        self.decision = ctx.selection.choose(self.prefix, self.problem)
        self.kernel: LinearKernel | None = None

    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        start = 0
        for index, (name, place) in enumerate(zip(self.shard_names, self.places)):
            rows = slice(start, start + place.shape[0])
            shard = self.method.shard_slots(self, index, rows)
            if self.bias is not None:
                shard["bias"] = self._bias_slot(place, self.bias.data[rows])
            for part, slot in shard.items():
                known = slots.get(f"{name}.{part}")
                slots[f"{name}.{part}"] = known.with_other(slot) if known else slot
            start = rows.stop
        return slots

    def _bias_slot(self, place: Place, bias: Tensor) -> Slot:
        slot = place.slot((1, place.num_columns), FLOATS, copy_into(bias))
        return dataclasses.replace(slot, shape=slot.shape[:1], region=slot.region[:1])

    def make_kernel(self) -> None:
        """Hands the weight to the chosen backend, which lays it out; the parameters go."""
        tensors = self.method.tensors(self)
        tensors.bias = None if self.bias is None else self.bias.data
        self.decision = self._final_decision(tensors)
        for name in list(self._parameters):
            delattr(self, name)
        self.kernel = make_linear(self.decision, tensors)

    def _final_decision(self, tensors: LinearTensors) -> Decision:
        """Before a weight is re-quantised, what that costs is measured and judged."""
        if not self.decision.winner.rescales:
            return self.decision
        from vllm.ops.scale_rounding import requant_error

        decision = self.decision
        error = requant_error(tensors, decision.winner.scales, dtype_of(self.problem.dtype))
        # All ranks of the layer take the same kernel.
        worst = self.group.greatest(error.relative)
        if self.selection.is_refuted(decision.winner, worst):
            problem = dataclasses.replace(self.problem, requant_error=worst)
            decision = self.selection.replace(self.prefix, decision, problem)
        if decision.winner.rescales:
            transform = f"{self.problem.weight} float32 -> {decision.winner.scales}"
            self.selection.ledger.record(
                self.prefix, transform, error.relative, error.max_abs, error.is_exact
            )
        return decision

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """How the kernel wants that many rows quantised; None for one that takes floats."""
        return input_quant(self.kernel, num_tokens)

    def multiply(self, x: Activation) -> Tensor:
        """What this rank computes of the output."""
        assert self.kernel is not None
        return self.kernel(x)

    def forward(self, x: Activation) -> Addend:
        return self.multiply(x)


class ColumnParallelLinear(Linear):
    """Each rank computes some of the outputs."""


class ReplicatedLinear(Linear):
    """Every rank computes all outputs."""


class RowParallelLinear(Linear):
    """Each rank is given some of the inputs, and all get the sum of the outputs; without
    `reduce_results` whoever reads the output adds it up (PartialSum)."""

    reduce_results = True

    def _bias_slot(self, place: Place, bias: Tensor) -> Slot:
        """The sum over the ranks gets the bias of the first rank alone."""
        if not self.group.is_first:
            return Slot((place.num_rows,), FLOATS, lambda _: bias.zero_())
        return super()._bias_slot(place, bias)

    def forward(self, x: Activation) -> Addend:
        y = self.multiply(x)
        if self.group.size == 1:
            return y
        return self.group.all_reduce(y) if self.reduce_results else PartialSum(y, self.group)


_STYLES: dict[ParallelStyle, type[Linear]] = {
    "column": ColumnParallelLinear,
    "row": RowParallelLinear,
    "replicated": ReplicatedLinear,
}


def linear_layer(ctx: ModelContext, prefix: str, spec: LinearSpec) -> Linear:
    """The layer of the spec's parallel style."""
    return _STYLES[spec.style](ctx, prefix, spec)
