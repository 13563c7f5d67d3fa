"""Linear layers own parameters; the kernel the selector chose owns their layout and compute."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
from vllm.kernels.select.problem import LinearProblem, WeightProblem
from vllm.kernels.selection import Selection
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.sharding import Place
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES, dtype_of


class LinearMethod(ABC):
    """How the weight of a linear layer, or of each expert, is stored; one instance serves one
    layer. Parameters are named as the fields of LinearTensors.

    act_schemes: the activation schemes the checkpoint allows, best liked first. optional: which of
    the format's optional tensors it has.
    """

    def __init__(
        self,
        weight: WeightFormat,
        act_schemes: tuple[ActScheme, ...] = (ActScheme.NONE,),
        optional: Collection[str] = (),
    ):
        self.format = weight
        self.act_schemes = act_schemes
        self.optional = optional

    def create_weights(self, layer: "StoredWeight") -> None:
        """Registers the tensors of the format on `layer`; each shard has an input scale."""
        shapes = self.format.shapes(layer.shard_rows, layer.input_size)
        scales = layer.scale_shapes()
        shapes["scales"] = sum(num_rows for num_rows, _ in scales), scales[0][1]
        shapes["input_scale"] = (len(scales),)
        for tensor in self.format.description.tensors:
            if not tensor.is_optional or tensor.name in self.optional:
                dtype = getattr(torch, tensor.dtype)
                made = empty_parameter(*shapes[tensor.name], dtype=dtype)
                layer.register_parameter(tensor.name, made)

    @abstractmethod
    def shard_slots(self, layer: "StoredWeight", index: int, rows: slice) -> dict[str, Slot]:
        """Slots of shard `index`, by the last part of their checkpoint names (`weight`, ...).
        Writers check values."""

    def tensors(self, layer: "StoredWeight") -> LinearTensors:
        """The loaded weight, as backends take it."""
        stored: dict[str, Any] = {name: p.data for name, p in layer.named_parameters(recurse=False)}
        if "input_scale" in stored:
            stored["input_scale"] = stored["input_scale"].max()
        row_offsets, column_offset = layer.block_offsets()
        return LinearTensors(
            self.format,
            shard_rows=layer.shard_rows,
            row_offsets=row_offsets,
            column_offset=column_offset,
            **stored,
        )


class UnquantizedLinearMethod(LinearMethod):
    """A weight in a floating point type, kept as the checkpoint stores it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(WeightFormat(SHORT_NAMES[dtype]))

    def shard_slots(self, layer: "StoredWeight", index: int, rows: slice) -> dict[str, Slot]:
        write = copy_into(layer.weight.data[rows])
        return {"weight": layer.places[index].slot((1, 1), FLOATS, write)}


class StoredWeight(nn.Module):
    """The parameters of one weight, which `method` makes, fills and reads.

    shards: checkpoint names of what is merged into it (shard_names), with what this rank holds of
    each (places); input_size, shard_rows: as they are on this rank.
    """

    weight: nn.Parameter
    scales: nn.Parameter
    global_scales: nn.Parameter
    zero_points: nn.Parameter
    group_index: nn.Parameter
    input_scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, prefix: str, shards: Sequence[tuple[str, Place]], group: Group, method: LinearMethod
    ):
        super().__init__()
        self.register_parameter("bias", None)
        self.prefix, self.group, self.method = prefix, group, method
        self.shard_names = tuple(name for name, _ in shards)
        self.places = tuple(place for _, place in shards)
        self.shard_rows = tuple(place.shape[0] for place in self.places)
        self.input_size = self.places[0].shape[1]

    @property
    def per_rank(self) -> str:
        """For messages about sizes: ` on each of 2 tensor-parallel ranks`, if there are several."""
        size = self.group.size
        return f" on each of {size} tensor-parallel ranks" if size > 1 else ""

    def scale_shapes(self) -> list[tuple[int, int]]:
        """Of the scales of each shard: those of every block that it touches."""
        stored = self.method.format
        if stored.scale == "block":
            return [place.num_blocks(stored.block) for place in self.places]
        return [stored.scale_shape((rows,), self.input_size) for rows in self.shard_rows]

    def scale_rows(self, index: int) -> slice:
        """Which rows of the scales belong to shard `index`."""
        rows = [num_rows for num_rows, _ in self.scale_shapes()]
        return slice(sum(rows[:index]), sum(rows[: index + 1]))

    def block_offsets(self) -> tuple[tuple[int, ...], int]:
        """As LinearTensors.row_offsets and column_offset."""
        stored = self.method.format
        if stored.scale != "block":
            return (), 0
        offsets = [place.offsets(stored.block) for place in self.places]
        rows = tuple(row for row, _ in offsets)
        return rows if any(rows) else (), offsets[0][1]

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


class ChosenKernel:
    """What layers have in common whose kernel the selector chose for `problem`."""

    prefix: str
    problem: WeightProblem
    selection: Selection
    decision: Decision

    def final_decision(self, weights: Mapping[str, LinearTensors], ranks: Group) -> Decision:
        """Before weights are re-quantised, what that costs is measured and judged.

        weights: by their names in the ledger. ranks: those that share the layer, which all take
        the same kernel.
        """
        decision = self.decision
        if not decision.winner.rescales:
            return decision
        from vllm.ops.scale_rounding import requant_error

        scales, dtype = decision.winner.scales, dtype_of(self.problem.dtype)
        errors = {name: requant_error(weight, scales, dtype) for name, weight in weights.items()}
        worst = ranks.greatest(max(error.relative for error in errors.values()))
        if self.selection.is_refuted(decision.winner, worst):
            problem = dataclasses.replace(self.problem, requant_error=worst)
            decision = self.selection.replace(self.prefix, decision, problem)
        if decision.winner.rescales:
            transform = f"{self.problem.weight} float32 -> {decision.winner.scales}"
            for name, error in errors.items():
                self.selection.ledger.record(
                    self.selection.prefix + name,
                    transform,
                    error.relative,
                    error.max_abs,
                    error.is_exact,
                )
        return decision


class Linear(StoredWeight, ChosenKernel):
    """y = x @ W.T + b for x [T, input_size]: what one tensor-parallel rank has of `spec`.

    prefix: of the decoder layer, with its dot. A shard is a part of the spec, or a piece of one.
    """

    problem: LinearProblem

    def __init__(self, ctx: ModelContext, prefix: str, spec: LinearSpec):
        group = ctx.parallel.tensor
        shards = spec.shards(prefix, group.rank, group.size)
        names = [name for name, _ in shards]
        method = spec.may_quantize and ctx.quant_methods.linear_method(names)
        super().__init__(
            prefix + spec.name,
            [(name, Place.of(region)) for name, region in shards],
            group,
            method or UnquantizedLinearMethod(ctx.weight_dtype),
        )
        if spec.bias:
            self.bias = empty_parameter(sum(self.shard_rows), dtype=torch.float32)
        self.method.create_weights(self)
        self.problem = linear_problem(
            spec,
            self.prefix,
            list(self.places),
            group.size,
            self.method.format,
            self.method.act_schemes,
            SHORT_NAMES[ctx.dtype],
            ctx.quant_methods.requant_error(self.method.format),
        )
        self.selection = ctx.selection
        self.decision = ctx.selection.choose(self.prefix, self.problem)
        self.kernel: LinearKernel | None = None

    def make_kernel(self) -> None:
        """Hands the weight to the chosen backend, which lays it out; the parameters go."""
        tensors = self.method.tensors(self)
        self.decision = self.final_decision({self.prefix: tensors}, self.group)
        for name in list(self._parameters):
            delattr(self, name)
        self.kernel = make_linear(self.decision, tensors)

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


class RowParallelWeight(StoredWeight):
    """A weight whose columns ranks share: the sum over them gets the bias of the first alone."""

    def _bias_slot(self, place: Place, bias: Tensor) -> Slot:
        if not self.group.is_first:
            return Slot((place.num_rows,), FLOATS, lambda _: bias.zero_())
        return super()._bias_slot(place, bias)


class RowParallelLinear(RowParallelWeight, Linear):
    """Each rank is given some of the inputs, and all get the sum of the outputs; without
    `reduce_results` whoever reads the output adds it up (PartialSum)."""

    reduce_results = True

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
