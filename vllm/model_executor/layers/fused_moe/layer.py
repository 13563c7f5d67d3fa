"""The experts of a layer: stacked parameters, computed by the kernel the selector chose."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import ExpertsSpec
from vllm.distributed.all2all import All2All, Experts
from vllm.distributed.groups import Addend, Group
from vllm.distributed.make_all2all import make_all2all
from vllm.kernels.activations import Activation, InputQuant, input_quant
from vllm.kernels.interface import MoEKernel, MoETensors
from vllm.kernels.make_kernel import has_one_input_scale, make_moe
from vllm.kernels.problems import moe_problem
from vllm.kernels.select.problem import MoEProblem
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import (
    ChosenKernel,
    LinearMethod,
    RowParallelWeight,
    StoredWeight,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.sharding import Place
from vllm.model_executor.weights import Slot, empty_parameter
from vllm.utils.torch_utils import SHORT_NAMES

# Parameters are named `<stack>_<field of LinearTensors>`; these are other fields of MoETensors.
_FIELDS = {
    "gate_up_weight": "gate_up",
    "down_weight": "down",
    "gate_up_input_scale": "gate_up_input_scales",
    "down_input_scale": "down_input_scales",
}


class FusedMoE(nn.Module, ChosenKernel):
    """y = sum of weight * down(silu(gate x) * up x) over the experts of each token, or of what its
    problem says of their activation.

    Weights are `<prefix>.<expert>.<part of the spec>` in the checkpoint. Expert-parallel ranks
    hold some of the experts each, others the same share of `intermediate` of every expert. experts:
    those on this rank. cut_by: the ranks that share each expert. stacks: by name one weight of
    every expert: what is merged into it, and which part of each this rank holds. method: of one
    expert's weights; parameters are all experts' in one, [num_experts, ...].
    """

    problem: MoEProblem

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
        *first, down = spec.parts
        self.stacks = {"gate_up": tuple((one, cut) for one in first), "down": ((down, turned),)}
        # One format serves all experts of a layer, so the first one speaks for them.
        method = ctx.quant_methods.moe_method(self.expert_names(0))
        self.method: LinearMethod = method or UnquantizedLinearMethod(ctx.weight_dtype)
        self.has_bias = spec.has_bias
        self._create_weights()
        self.problem = moe_problem(
            spec,
            group.size,
            ranks.size,
            self.method.format,
            self.method.act_schemes,
            SHORT_NAMES[ctx.dtype],
            ctx.quant_methods.requant_error(self.method.format),
        )
        self.parallel = parallel
        self.ranks = group if ranks.size == 1 else ranks
        self.selection = ctx.selection
        self.decision = ctx.selection.choose(self.prefix, self.problem)
        self.kernel: MoEKernel | None = None
        self.all2all: All2All | None = None

    def _create_weights(self) -> None:
        for stack in self.stacks:
            one = self._weight(stack, 0)
            with torch.device("meta"):
                if self.has_bias:
                    one.bias = empty_parameter(sum(one.shard_rows), dtype=torch.float32)
                self.method.create_weights(one)
            for name, like in one.named_parameters():
                stacked = empty_parameter(self.num_experts, *like.shape, dtype=like.dtype)
                self.register_parameter(f"{stack}_{name}", stacked)

    def _weight(self, stack: str, expert: int) -> StoredWeight:
        """One expert's weight of a stack, with its part of the parameters. expert: of those on this
        rank."""
        parent = f"{self.prefix}.{self.experts[expert]}"
        shards = [(f"{parent}.{name}", place) for name, place in self.stacks[stack]]
        names = ", ".join(name for name, _ in self.stacks[stack])
        kind = RowParallelWeight if stack == "down" else StoredWeight
        weight = kind(f"{parent} ({names})", shards, self.cut_by, self.method)
        for name, stacked in self.named_parameters(recurse=False):
            if name.startswith(f"{stack}_"):
                own = nn.Parameter(stacked.data[expert], requires_grad=False)
                weight.register_parameter(name.removeprefix(f"{stack}_"), own)
        return weight

    @property
    def on_other_ranks(self) -> tuple[str, ...]:
        """The experts of other ranks."""
        size = self.problem.num_experts
        return tuple(f"{self.prefix}.{i}" for i in range(size) if i not in self.experts)

    def expert_names(self, expert: int) -> tuple[str, ...]:
        """Checkpoint names of the weights of one of all experts, without `.weight`."""
        shards = [name for stack in self.stacks.values() for name, _ in stack]
        return tuple(f"{self.prefix}.{expert}.{name}" for name in shards)

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Those of the experts on this rank."""
        return tuple(name for expert in self.experts for name in self.expert_names(expert))

    def slots(self) -> dict[str, Slot]:
        slots = {}
        for expert in range(self.num_experts):
            for stack in self.stacks:
                slots |= self._weight(stack, expert).slots()
        return slots

    def make_kernel(self) -> None:
        """Hands the weights to the chosen backend, which lays them out; the parameters go."""
        tensors = self._tensors()
        parts = zip(self.stacks, tensors.all_experts())
        weights = {f"{self.prefix}.{stack}": part for stack, part in parts}
        self.decision = decision = self.final_decision(weights, self.ranks)
        self._record_input_scales(tensors)
        for name in list(self._parameters):
            delattr(self, name)
        self.kernel = make_moe(decision, tensors)
        experts = Experts(self.experts, self.problem.num_experts, self.problem.hidden)
        self.all2all = make_all2all(self.parallel, experts)

    def _record_input_scales(self, tensors: MoETensors) -> None:
        """In the ledger, where the kernel quantises tokens by one scale for all experts."""
        stored = tensors.gate_up_input_scales
        if stored is None or not has_one_input_scale(self.decision):
            return
        used = tensors.with_one_input_scale().gate_up_input_scales
        assert used is not None
        # As of `MoETensors.expert`: gate and up share their input.
        wanted = stored.float().amax(1)
        change = used[:, 0].float() - wanted
        self.selection.ledger.record(
            f"{self.prefix}.gate_up",
            f"{self.problem.weight} input scales of experts -> the largest",
            float(change.norm() / wanted.norm()),
            float(change.max()),
            not bool(change.any()),
            of_inputs=True,
        )

    def _tensors(self) -> MoETensors:
        """The loaded weights, as backends take them."""
        rows, _ = self._weight("gate_up", 0).block_offsets()
        _, column = self._weight("down", 0).block_offsets()
        parameters = self.named_parameters(recurse=False)
        stored: dict[str, Any] = {_FIELDS.get(name, name): p.data for name, p in parameters}
        return MoETensors(
            self.method.format, row_offset=rows[0] if rows else 0, column_offset=column, **stored
        )

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """How the kernel wants that many tokens quantised, which the router reads as floats; None
        for one that takes floats, and where tokens come from other ranks."""
        quant = None if self.ranks.size > 1 else input_quant(self.kernel, num_tokens)
        return quant and dataclasses.replace(quant, keeps_source=True)

    def forward(self, x: Activation, topk_weights: Tensor, topk_ids: Tensor) -> Addend:
        """x [T, hidden], weights float32 and ids int64 [T, top_k] -> [T, hidden]."""
        assert self.kernel is not None and self.all2all is not None
        return self.all2all(self.kernel, x, topk_weights, topk_ids)
