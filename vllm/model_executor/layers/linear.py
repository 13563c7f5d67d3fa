"""Linear layers own parameters; the kernel the selector chose owns their layout and compute."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vllm.kernels.problem import ActScheme, LinearProblem, WeightFormat
from vllm.kernels.spec import Decision
from vllm.kernels.split import make_linear
from vllm.kernels.tensors import LinearKernel, LinearTensors
from vllm.model_executor.context import ModelContext
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES


class LinearMethod(ABC):
    """How the weight of a linear layer is stored; one instance serves one layer.

    act_schemes: the activation schemes the checkpoint allows, best liked first.
    """

    def __init__(
        self, weight: WeightFormat, act_schemes: tuple[ActScheme, ...] = (ActScheme.NONE,)
    ):
        self.format = weight
        self.act_schemes = act_schemes

    @abstractmethod
    def create_weights(self, layer: "Linear") -> None:
        """Registers the parameters on `layer`."""

    @abstractmethod
    def shard_slots(self, layer: "Linear", index: int, rows: slice) -> dict[str, Slot]:
        """Slots of shard `index`, by the last part of their checkpoint names (`weight`, ...)."""

    @abstractmethod
    def tensors(self, layer: "Linear") -> LinearTensors:
        """The loaded weight, as backends take it. Checks values."""


class UnquantizedLinearMethod(LinearMethod):
    """A weight in a floating point type, kept as the checkpoint stores it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(WeightFormat(SHORT_NAMES[dtype]))
        self.dtype = dtype

    def create_weights(self, layer: "Linear") -> None:
        layer.weight = empty_parameter(sum(layer.shard_rows), layer.input_size, dtype=self.dtype)

    def shard_slots(self, layer: "Linear", index: int, rows: slice) -> dict[str, Slot]:
        shape = (layer.shard_rows[index], layer.input_size)
        return {"weight": Slot(shape, FLOATS, copy_into(layer.weight.data[rows]))}

    def tensors(self, layer: "Linear") -> LinearTensors:
        return LinearTensors(self.format, layer.weight.data, layer.shard_rows)


class Linear(nn.Module):
    """y = x @ W.T + b for x [T, input_size].

    shards: (checkpoint name, rows) of the weights that are merged into one, in order; a plain
    layer has one shard, its own name.
    """

    weight: nn.Parameter

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        input_size: int,
        shards: Sequence[tuple[str, int]],
        bias: bool = False,
    ):
        super().__init__()
        self.prefix = prefix
        self.input_size = input_size
        self.shard_names = tuple(name for name, _ in shards)
        self.shard_rows = tuple(rows for _, rows in shards)
        output_size = sum(self.shard_rows)
        quant = ctx.quant_config
        self.method = (quant and quant.linear_method(self)) or UnquantizedLinearMethod(
            ctx.weight_dtype
        )
        self.bias = empty_parameter(output_size, dtype=torch.float32) if bias else None
        self.method.create_weights(self)
        self.problem = LinearProblem(
            n=output_size,
            k=input_size,
            weight=self.method.format,
            act=self.method.act_schemes,
            dtype=SHORT_NAMES[ctx.dtype],
            bias=bias,
            parts=self.shard_rows if len(self.shard_rows) > 1 else (),
        )
        self.selection = ctx.selection
        self.decision = ctx.selection.choose(prefix, self.problem)
        self.kernel: LinearKernel | None = None

    def slots(self) -> dict[str, Slot]:
        slots = {}
        start = 0
        for index, (name, num_rows) in enumerate(zip(self.shard_names, self.shard_rows)):
            rows = slice(start, start + num_rows)
            shard = self.method.shard_slots(self, index, rows)
            if self.bias is not None:
                shard["bias"] = Slot((num_rows,), FLOATS, copy_into(self.bias.data[rows]))
            slots.update({f"{name}.{part}": slot for part, slot in shard.items()})
            start += num_rows
        return slots

    def make_kernel(self) -> None:
        """Hands the weight to the chosen backend, which lays it out; the parameters go."""
        tensors = self.method.tensors(self)
        tensors.bias = None if self.bias is None else self.bias.data
        decision = self._final_decision(tensors)
        for name in list(self._parameters):
            delattr(self, name)
        self.kernel = make_linear(decision, tensors)

    def _final_decision(self, tensors: LinearTensors) -> Decision:
        """Before a weight is re-quantised, what that costs is measured and judged."""
        if not self.decision.winner.is_lossy:
            return self.decision
        from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_error

        error = requant_error(tensors)
        decision = self.decision
        if self.selection.exceeds_budget(error.relative):
            problem = dataclasses.replace(self.problem, requant_error=error.relative)
            decision = self.selection.replace(self.prefix, decision, problem)
        if decision.winner.is_lossy:
            transform = f"{self.problem.weight} float32 -> {decision.winner.scales}"
            self.selection.ledger.record(
                self.prefix, transform, error.relative, error.max_abs, error.is_exact
            )
        return decision

    def forward(self, x: Tensor) -> Tensor:
        assert self.kernel is not None
        return self.kernel(x)


def merged_linear(
    ctx: ModelContext,
    prefix: str,
    input_size: int,
    parts: Sequence[tuple[str, int]],
    bias: bool = False,
) -> Linear:
    """One GEMM for several checkpoint weights that share their input.

    `parts` are (name beside the merged one, rows): ("q_proj", 576) under "...self_attn".
    """
    parent = prefix.rpartition(".")[0]
    shards = [(f"{parent}.{name}", rows) for name, rows in parts]
    return Linear(ctx, prefix, input_size, shards, bias)


def plain_linear(
    ctx: ModelContext, prefix: str, input_size: int, output_size: int, bias: bool = False
) -> Linear:
    return Linear(ctx, prefix, input_size, [(prefix, output_size)], bias)
