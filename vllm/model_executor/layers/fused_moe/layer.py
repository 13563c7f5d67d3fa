"""The experts of a layer: stacked parameters, computed by the kernel the selector chose."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.kernels import registry
from vllm.kernels.problem import ActScheme, MoEProblem, WeightFormat
from vllm.kernels.tensors import MoEKernel, MoETensors
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.activation import check_activation
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES


@dataclass(frozen=True, slots=True)
class Stack:
    """One weight of every expert. shards: checkpoint names of what is merged into it, with rows."""

    name: str
    shards: tuple[tuple[str, int], ...]
    num_columns: int

    @property
    def shard_rows(self) -> tuple[int, ...]:
        return tuple(rows for _, rows in self.shards)

    def rows(self, shard: int) -> slice:
        start = sum(self.shard_rows[:shard])
        return slice(start, start + self.shard_rows[shard])


class MoEMethod(ABC):
    """How the weights of experts are stored; one instance serves one layer.

    act_schemes: the activation schemes the checkpoint allows, best liked first.
    """

    def __init__(
        self, weight: WeightFormat, act_schemes: tuple[ActScheme, ...] = (ActScheme.NONE,)
    ):
        self.format = weight
        self.act_schemes = act_schemes

    @abstractmethod
    def create_weights(self, layer: "FusedMoE") -> None:
        """Registers the parameters of all stacks on `layer`."""

    @abstractmethod
    def shard_slots(
        self, layer: "FusedMoE", stack: Stack, shard: int, expert: int
    ) -> dict[str, Slot]:
        """Slots of one expert's shard, by the last part of their checkpoint names."""

    @abstractmethod
    def tensors(self, layer: "FusedMoE") -> MoETensors:
        """The loaded weights, as backends take them. Checks values."""


class UnquantizedMoEMethod(MoEMethod):
    """Weights in a floating point type, kept as the checkpoint stores them."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(WeightFormat(SHORT_NAMES[dtype]))
        self.dtype = dtype

    def create_weights(self, layer: "FusedMoE") -> None:
        for stack in layer.stacks:
            shape = (layer.num_experts, sum(stack.shard_rows), stack.num_columns)
            layer.register_parameter(stack.name, empty_parameter(*shape, dtype=self.dtype))

    def shard_slots(
        self, layer: "FusedMoE", stack: Stack, shard: int, expert: int
    ) -> dict[str, Slot]:
        place = layer.get_parameter(stack.name).data[expert, stack.rows(shard)]
        return {"weight": Slot(tuple(place.shape), FLOATS, copy_into(place))}

    def tensors(self, layer: "FusedMoE") -> MoETensors:
        gate_up, down = (layer.get_parameter(stack.name).data for stack in layer.stacks)
        return MoETensors(self.format, gate_up, down)


class FusedMoE(nn.Module):
    """y = sum of weight * down(silu(gate x) * up x) over the experts of each token.

    num_experts, top_k, hidden, intermediate: as in MoEProblem. Weights are `<prefix>.<expert>.
    {gate,up,down}_proj` in the checkpoint.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
    ):
        super().__init__()
        check_activation(ctx.hf_config)
        self.prefix = prefix
        self.num_experts = num_experts
        gate_up = (("gate_proj", intermediate), ("up_proj", intermediate))
        self.stacks = (
            Stack("gate_up", gate_up, hidden),
            Stack("down", (("down_proj", hidden),), intermediate),
        )
        quant = ctx.quant_config
        self.method = (quant and quant.moe_method(self)) or UnquantizedMoEMethod(ctx.weight_dtype)
        self.method.create_weights(self)
        self.problem = MoEProblem(
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            intermediate=intermediate,
            weight=self.method.format,
            act=self.method.act_schemes,
            dtype=SHORT_NAMES[ctx.dtype],
        )
        self.decision = ctx.selection.choose(prefix, self.problem)
        self.kernel: MoEKernel | None = None

    def expert_names(self, expert: int) -> tuple[str, ...]:
        """Checkpoint names of one expert's weights, without `.weight`."""
        return tuple(
            f"{self.prefix}.{expert}.{name}" for stack in self.stacks for name, _ in stack.shards
        )

    def slots(self) -> dict[str, Slot]:
        return {
            f"{self.prefix}.{expert}.{name}.{part}": slot
            for expert in range(self.num_experts)
            for stack in self.stacks
            for shard, (name, _) in enumerate(stack.shards)
            for part, slot in self.method.shard_slots(self, stack, shard, expert).items()
        }

    def make_kernel(self) -> None:
        """Hands the weights to the chosen backend, which lays them out; the parameters go."""
        winner = self.decision.winner
        assert not winner.is_lossy, "no backend of experts re-quantises weights yet"
        tensors = self.method.tensors(self)
        for name in list(self._parameters):
            delattr(self, name)
        self.kernel = registry.backend(winner.backend).moe(self.problem, tensors, winner)

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """x [T, hidden], weights float32 and ids int64 [T, top_k] -> [T, hidden]."""
        assert self.kernel is not None
        return self.kernel(x, topk_weights, topk_ids)
