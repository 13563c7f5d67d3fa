"""The experts of a layer: stacked parameters, computed by the kernel the selector chose."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import ExpertsSpec
from vllm.distributed.all2all import All2All, Experts
from vllm.distributed.groups import Addend, Group
from vllm.distributed.make_all2all import make_all2all
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.activations import Activation, InputQuant, input_quant
from vllm.kernels.interface import MoEKernel, MoETensors
from vllm.kernels.make_kernel import make_moe
from vllm.kernels.problems import moe_problem
from vllm.kernels.select.decision import Decision
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import StorageMethod
from vllm.model_executor.layers.sharding import Place
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES, dtype_of


@dataclass(frozen=True, slots=True)
class Stack:
    """One weight of every expert. shards: checkpoint names of what is merged into it, and which
    part of each this rank holds."""

    name: str
    shards: tuple[tuple[str, Place], ...]

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(place for _, place in self.shards)

    @property
    def shard_rows(self) -> tuple[int, ...]:
        return tuple(place.shape[0] for place in self.places)

    @property
    def num_columns(self) -> int:
        return self.places[0].shape[1]

    def rows(self, shard: int) -> slice:
        start = sum(self.shard_rows[:shard])
        return slice(start, start + self.shard_rows[shard])


class MoEMethod(StorageMethod, ABC):
    """How the weights of experts are stored."""

    @abstractmethod
    def create_weights(self, layer: "FusedMoE") -> None:
        """Registers the parameters of all stacks on `layer`."""

    @abstractmethod
    def shard_slots(
        self, layer: "FusedMoE", stack: Stack, shard: int, expert: int
    ) -> dict[str, Slot]:
        """Slots of one expert's shard, by the last part of their checkpoint names. Writers check
        values. expert: of those on this rank."""

    @abstractmethod
    def tensors(self, layer: "FusedMoE") -> MoETensors:
        """The loaded weights, as backends take them."""


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
        write = copy_into(layer.get_parameter(stack.name).data[expert, stack.rows(shard)])
        return {"weight": stack.places[shard].slot((1, 1), FLOATS, write)}

    def tensors(self, layer: "FusedMoE") -> MoETensors:
        gate_up, down = (layer.get_parameter(stack.name).data for stack in layer.stacks)
        return MoETensors(self.format, gate_up, down)


class FusedMoE(nn.Module):
    """y = sum of weight * down(silu(gate x) * up x) over the experts of each token.

    Weights are `<prefix>.<expert>.{gate,up,down}_proj` in the checkpoint. Expert-parallel ranks
    hold some of the experts each, others the same share of `intermediate` of every expert. experts:
    those on this rank. cut_by: the ranks that share each expert.
    """

    def __init__(self, ctx: ModelContext, prefix: str, spec: ExpertsSpec):
        super().__init__()
        self.prefix = prefix + spec.name
        parallel = ctx.parallel
        ranks = parallel.expert
        self.experts = range(*spec.count.span(ranks.rank, ranks.size, "ep"))
        self.num_experts = len(self.experts)
        self.cut_by = group = parallel.tensor if ranks.size == 1 else Group()
        inner, own = spec.intermediate.size, spec.intermediate.span(group.rank, group.size)
        cut = Place(own, (0, spec.hidden), inner, spec.hidden)
        turned = Place((0, spec.hidden), own, spec.hidden, inner)
        self.stacks = (
            Stack("gate_up", (("gate_proj", cut), ("up_proj", cut))),
            Stack("down", (("down_proj", turned),)),
        )
        self.method: MoEMethod = ctx.quant_methods.moe_method(self) or UnquantizedMoEMethod(
            ctx.weight_dtype
        )
        self.method.create_weights(self)
        self.problem = moe_problem(
            spec,
            group.size,
            ranks.size,
            self.method.format,
            self.method.act_schemes,
            SHORT_NAMES[ctx.dtype],
        )
        self.parallel = parallel
        self.ranks = group if ranks.size == 1 else ranks
        self.selection = ctx.selection
        self.decision = ctx.selection.choose(self.prefix, self.problem)
        self.kernel: MoEKernel | None = None
        self.all2all: All2All | None = None

    @property
    def on_other_ranks(self) -> tuple[str, ...]:
        """The experts of other ranks."""
        size = self.problem.num_experts
        return tuple(f"{self.prefix}.{i}" for i in range(size) if i not in self.experts)

    def expert_names(self, expert: int) -> tuple[str, ...]:
        """Checkpoint names of the weights of one of all experts, without `.weight`."""
        return tuple(
            f"{self.prefix}.{expert}.{name}" for stack in self.stacks for name, _ in stack.shards
        )

    def slots(self) -> dict[str, Slot]:
        return {
            f"{self.prefix}.{expert}.{name}.{part}": slot
            for index, expert in enumerate(self.experts)
            for stack in self.stacks
            for shard, (name, _) in enumerate(stack.shards)
            for part, slot in self.method.shard_slots(self, stack, shard, index).items()
        }

    def make_kernel(self) -> None:
        """Hands the weights to the chosen backend, which lays them out; the parameters go."""
        tensors = self.method.tensors(self)
        self.decision = decision = self._final_decision(tensors)
        for name in list(self._parameters):
            delattr(self, name)
        self.kernel = make_moe(decision, tensors)
        takes_ue8m0 = decision.winner.scales == Scales.UE8M0
        problem = self.problem
        experts = Experts(self.experts, problem.num_experts, problem.hidden, takes_ue8m0)
        self.all2all = make_all2all(self.parallel, experts)

    def _final_decision(self, tensors: MoETensors) -> Decision:
        """Before weights are re-quantised, what that costs is measured and judged."""
        decision = self.decision
        if not decision.winner.rescales:
            return decision
        from vllm.ops.scale_rounding import requant_error

        errors = [
            requant_error(stack, decision.winner.scales, dtype_of(self.problem.dtype))
            for stack in tensors.all_experts()
        ]
        worst = self.ranks.greatest(max(error.relative for error in errors))
        if self.selection.is_refuted(decision.winner, worst):
            problem = dataclasses.replace(self.problem, requant_error=worst)
            decision = self.selection.replace(self.prefix, decision, problem)
        if decision.winner.rescales:
            transform = f"{self.problem.weight} float32 -> {decision.winner.scales}"
            for stack, error in zip(self.stacks, errors):
                self.selection.ledger.record(
                    f"{self.prefix}.{stack.name}",
                    transform,
                    error.relative,
                    error.max_abs,
                    error.is_exact,
                )
        return decision

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """How the kernel wants that many tokens quantised, which the router reads as floats; None
        for one that takes floats, and where tokens come from other ranks."""
        quant = None if self.ranks.size > 1 else input_quant(self.kernel, num_tokens)
        return quant and dataclasses.replace(quant, keeps_source=True)

    def forward(self, x: Activation, topk_weights: Tensor, topk_ids: Tensor) -> Addend:
        """x [T, hidden], weights float32 and ids int64 [T, top_k] -> [T, hidden]."""
        assert self.kernel is not None and self.all2all is not None
        return self.all2all(self.kernel, x, topk_weights, topk_ids)
