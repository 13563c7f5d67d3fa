"""Fused mixture of experts in Triton, for GPUs: FP8 with block scales, bfloat16, float16.

Up to four launches: sort the pairs of token and expert, gate-up with silu(gate) * up, down, and
the weighted sum for each token; for many tokens one more, which quantises them. The few tokens of
a decode step are quantised where they are multiplied instead: their bytes are nothing beside the
weights', and every launch is time in which no weight is read.
"""

from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vllm.kernels.problem import MoEProblem
from vllm.kernels.tensors import MoETensors
from vllm.kernels.triton.moe_kernels import (
    PLAIN,
    QUANTISED,
    TO_QUANTISE,
    down_kernel,
    gate_up_kernel,
)
from vllm.kernels.triton.moe_rows import (
    FP8,
    GROUP,
    capability_major,
    combine,
    launch_dependent,
    quantise,
    sizes_compiled_apart,
    sort,
)
from vllm.utils.torch_utils import dtype_of


class Tile(NamedTuple):
    """Rows of a weight (of gate, and as many of up), and Triton's launch options."""

    block_n: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a number of tokens is computed. sorts: whether the pairs of an expert share a block;
    else each is a block of its own. quantises_first: tokens are quantised before gate-up, and its
    results in it; else both where they are read."""

    block_m: int
    sorts: bool
    quantises_first: bool
    gate_up: Tile
    down: Tile


# (most pairs for each expert on average, plan), ascending; None for any number.
Plans = tuple[tuple[float | None, Plan], ...]

# By the major number of the compute capability, for FP8 and for 16-bit weights; others take 0.
# Measured on an H100 (benchmarks/results/h100/moe.json).
FP8_PLANS: dict[int, Plans] = {
    9: (
        (0.1, Plan(8, False, False, Tile(64, 4, 4), Tile(64, 4, 4))),
        (0.3, Plan(8, False, False, Tile(64, 4, 3), Tile(128, 4, 3))),
        (0.75, Plan(8, True, False, Tile(64, 4, 3), Tile(64, 4, 3))),
        (8.0, Plan(16, True, True, Tile(128, 4, 3), Tile(64, 4, 3))),
        (64.0, Plan(32, True, True, Tile(128, 4, 3), Tile(64, 4, 3))),
        (None, Plan(64, True, True, Tile(128, 8, 4), Tile(128, 4, 4))),
    ),
    0: (
        (1.0, Plan(8, False, False, Tile(64, 4, 3), Tile(64, 4, 3))),
        (8.0, Plan(16, True, True, Tile(128, 4, 2), Tile(64, 4, 3))),
        (None, Plan(32, True, True, Tile(128, 4, 2), Tile(64, 4, 3))),
    ),
}
HALF_PLANS: dict[int, Plans] = {
    0: (
        (1.0, Plan(8, False, False, Tile(64, 4, 3), Tile(64, 4, 3))),
        (8.0, Plan(16, True, False, Tile(64, 4, 3), Tile(64, 4, 3))),
        (None, Plan(64, True, False, Tile(64, 4, 3), Tile(128, 8, 3))),
    ),
}


class _Grouped(NamedTuple):
    """Which rows an expert has: see `moe_rows.Sorted`; ids alone where they are not sorted."""

    ids: Tensor
    blocks: Tensor
    order: Tensor
    num_blocks: int


class Experts:
    """The experts of a layer, stored as loaded.

    steps: columns of gate-up and of down that are multiplied at a time, at least 32: of FP8 weights
    all in one scale block and in one group of activations.
    """

    def __init__(self, problem: MoEProblem, tensors: MoETensors):
        self.is_fp8 = tensors.format.element == "fp8"
        self.num_experts, self.hidden, self.inner = tensors.down.shape
        self.top_k, self.dtype = problem.top_k, dtype_of(problem.dtype)
        if not self.is_fp8:  # both operands of a product are of one type
            gate_up, down = tensors.gate_up.to(self.dtype), tensors.down.to(self.dtype)
            tensors = replace(tensors, gate_up=gate_up, down=down)
        self.tensors = tensors
        # Without scales any pointer will do in their place.
        self.gate_up_scales = tensors.gate_up_scales if self.is_fp8 else tensors.gate_up
        self.down_scales = tensors.down_scales if self.is_fp8 else tensors.down
        self.block = tensors.format.block if self.is_fp8 else (1, GROUP)
        table = FP8_PLANS if self.is_fp8 else HALF_PLANS
        self.plans = table.get(capability_major(tensors.down.device), table[0])
        self.steps = (64, 64)
        if self.is_fp8:
            columns = self.block[1]
            self.steps = gcd(columns, GROUP), gcd(columns, GROUP, tensors.column_offset)

    def plan(self, num_tokens: int) -> Plan:
        share = num_tokens * self.top_k / self.num_experts
        return self._fitted(next(p for limit, p in self.plans if limit is None or share <= limit))

    def _fitted(self, plan: Plan) -> Plan:
        if self.is_fp8 and min(self.steps) < GROUP:  # a step then sees a part of a group only
            return plan._replace(quantises_first=True, gate_up=plan.gate_up._replace(block_n=GROUP))
        return plan

    def warm_up(self) -> None:
        """Compiles the kernels of every plan, once for all layers of these sizes: else the first
        request with another number of tokens would wait for it."""
        x = torch.zeros(1, self.hidden, dtype=self.dtype, device=self.tensors.down.device)
        ids = torch.arange(self.top_k, device=x.device).view(1, -1)
        for _, plan in self.plans:
            self(x, torch.ones_like(ids, dtype=torch.float32), ids, self._fitted(plan))
        for num_tokens in sizes_compiled_apart(self.top_k):
            if (plan := self.plan(num_tokens)).sorts:
                sort(ids.repeat(num_tokens, 1), self.num_experts, block_m=plan.block_m)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, plan: Plan | None = None) -> Tensor:
        """x [T, hidden], weights float32 and ids int64 [T, top_k] -> [T, hidden]."""
        if x.shape[0] == 0:
            return torch.empty_like(x)
        plan = plan or self.plan(x.shape[0])
        rows, positions = self.pair_rows(x, ids, plan)
        return combine(rows, weights, positions, self.num_experts, plan.sorts)

    def pair_rows(self, x: Tensor, ids: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Results of the pairs, [T * top_k, hidden], and where they lie, as `combine` takes it."""
        ids = ids.contiguous()
        if plan.sorts:
            rows = sort(ids, self.num_experts, block_m=plan.block_m)
            grouped = _Grouped(ids, rows.blocks, rows.order, rows.num_blocks)
            positions = rows.positions
        else:
            grouped, positions = _Grouped(ids, ids, ids, ids.numel()), ids
        out = x.new_empty(ids.numel(), self.hidden)
        self._down(*self._gate_up(x, plan, grouped), out, plan, grouped)
        return out, positions

    def _gate_up(self, x: Tensor, plan: Plan, grouped: _Grouped) -> tuple[Tensor, Tensor]:
        ids, blocks, order, num_blocks = grouped
        tile, num_pairs = plan.gate_up, ids.numel()
        quantises = self.is_fp8 and plan.quantises_first
        x, x_scales = quantise(x) if quantises else (x.contiguous(), x)
        out = x.new_empty(num_pairs, self.inner, dtype=FP8 if quantises else x.dtype)
        shape = (num_pairs, triton.cdiv(self.inner, GROUP)) if quantises else (0,)
        out_scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        gate_up_kernel[(num_blocks * triton.cdiv(self.inner, tile.block_n),)](
            x, x_scales, self.tensors.gate_up, self.gate_up_scales, out, out_scales, ids, blocks,
            order, num_blocks, self.num_experts, HIDDEN=self.hidden, INNER=self.inner,
            TOP_K=ids.shape[1], QUANTISES=quantises, OFFSET=self.tensors.row_offset,
            **self._constants(plan, tile, self.steps[0]),
        )  # fmt: skip
        return out, out_scales

    def _down(
        self,
        x: Tensor,
        x_scales: Tensor,
        out: Tensor,
        plan: Plan,
        grouped: _Grouped,
    ) -> None:
        ids, blocks, _, num_blocks = grouped
        tile = plan.down
        down_kernel[(num_blocks * triton.cdiv(self.hidden, tile.block_n),)](
            x, x_scales, self.tensors.down, self.down_scales, out, ids, blocks, num_blocks,
            self.num_experts, HIDDEN=self.hidden, INNER=self.inner,
            OFFSET=self.tensors.column_offset, **self._constants(plan, tile, self.steps[1]),
        )  # fmt: skip

    def _constants(self, plan: Plan, tile: Tile, step: int) -> dict[str, int]:
        form = QUANTISED if plan.quantises_first else TO_QUANTISE
        return {
            "X": (form if self.is_fp8 else PLAIN).value,
            "GROUP_N": self.block[0],
            "GROUP_K": self.block[1],
            "IS_SORTED": plan.sorts,
            "BLOCK_M": plan.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": step,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **launch_dependent(self.tensors.down.device),
        }
