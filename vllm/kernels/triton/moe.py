"""Fused mixture of experts in Triton, for GPUs: FP8 with scales per block, row or weight, bfloat16,
float16.

Up to four launches: sort the pairs of token and expert, gate-up with its activation, down, and
the weighted sum for each token, which a norm that comes next makes itself. FP8 experts ask for
tokens that are quantised already, each once, and read them where they lie. Those that come as
floats take one more launch, or if they are few are quantised where they are multiplied: their bytes
are nothing beside the weights', and every launch is time in which no weight is read.

Activations have a scale for 128 columns also where a format lets a token have one for all: no
coarser, and what gate-up gives is quantised before a whole row of it is known.
"""

from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm.kernels.activations import Activation, InputQuant, QuantizedInput
from vllm.kernels.interface import MoETensors
from vllm.kernels.select.problem import MoEProblem
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
    ExpertRows,
    Sorted,
    capability_major,
    launch_dependent,
    quantise,
    sizes_compiled_apart,
    sort,
)
from vllm.ops.fp8_quant import ScaleLayout
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_of


class Tile(NamedTuple):
    """Rows of a weight (of gate, and as many of up), and Triton's launch options."""

    block_n: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a number of tokens is computed. sorts: whether the pairs of an expert share a block;
    else each is a block of its own. quantises_first: tokens that come as floats are quantised
    before gate-up, and its results in it; else both where they are read."""

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
    )
}


class Experts:
    """The experts of a layer, stored as loaded.

    blocks: rows and columns of gate (as of up) and of down that share a scale. steps: columns of
    both that are multiplied at a time, at least 32: of FP8 weights all in one scale block and in
    one group of activations.
    """

    def __init__(self, problem: MoEProblem, tensors: MoETensors):
        self.is_fp8 = tensors.format.element == "fp8"
        self.num_experts, self.hidden, self.inner = tensors.down.shape
        self.top_k, self.dtype = problem.top_k, dtype_of(problem.dtype)
        self.limit = problem.swiglu_limit  # 0 for silu
        self.num_parts = problem.num_first_parts
        if not self.is_fp8:  # both operands of a product are of one type
            gate_up, down = tensors.gate_up.to(self.dtype), tensors.down.to(self.dtype)
            tensors = replace(tensors, gate_up=gate_up, down=down)
        self.tensors = tensors
        # Without scales any pointer will do in their place.
        self.gate_up_scales = tensors.gate_up_scales if self.is_fp8 else tensors.gate_up
        self.down_scales = tensors.down_scales if self.is_fp8 else tensors.down
        self.device = tensors.down.device
        self.has_peers = not problem.comes_quantised  # from whom tokens come as floats
        table = FP8_PLANS if self.is_fp8 else HALF_PLANS
        self.plans = table.get(capability_major(self.device), table[0])
        self.blocks: tuple[tuple[int, int], ...] = ((1, GROUP), (1, GROUP))
        self.steps = 64, 64
        if self.is_fp8:
            stored, offset = tensors.format, tensors.column_offset
            sizes = (self.inner, self.hidden), (self.hidden, self.inner)
            self.blocks = tuple(
                (stored.rows_per_scale(n), stored.columns_per_scale(k)) for n, k in sizes
            )
            # 0 where a row has one scale: gcd(0, GROUP) is GROUP.
            self.steps = gcd(stored.block[1], GROUP), gcd(stored.block[1], GROUP, offset)

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """For few tokens too: whoever quantises them does it once, gate-up for each tile."""
        return InputQuant(ScaleLayout.ROW_MAJOR) if self.is_fp8 else None

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
        floats = torch.zeros(1, self.hidden, dtype=self.dtype, device=self.device)
        quant = None if self.has_peers else self.input_quant(1)
        x = quant.quantise(floats) if quant else floats
        ids = torch.arange(self.top_k, device=self.device).view(1, -1)
        shares = torch.ones_like(ids, dtype=torch.float32)
        for _, plan in self.plans:
            rows = self.unadded(x, shares, ids, self._fitted(plan))
            rows.total()
            if quant:  # what comes after them is a norm for FP8 weights too
                rows.add_rms_norm(floats, torch.ones(self.hidden, device=self.device), 1e-6, quant)
        for num_tokens in sizes_compiled_apart(self.top_k):
            if (plan := self.plan(num_tokens)).sorts:
                sort(ids.repeat(num_tokens, 1), self.num_experts, block_m=plan.block_m)

    def __call__(
        self, x: Activation, weights: Tensor, ids: Tensor, plan: Plan | None = None
    ) -> Tensor:
        """x [T, hidden], weights float32 and ids int64 [T, top_k] -> [T, hidden]."""
        if x.shape[0] == 0:
            return torch.empty(x.shape, dtype=self.dtype, device=self.device)
        return self.unadded(x, weights, ids, plan).total()

    def unadded(
        self, x: Activation, weights: Tensor, ids: Tensor, plan: Plan | None = None
    ) -> ExpertRows:
        plan = plan or self.plan(x.shape[0])
        rows, positions = self.pair_rows(x, ids, plan)
        return ExpertRows(rows, weights, positions, self.num_experts, plan.sorts)

    def pair_rows(self, x: Activation, ids: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Results of the pairs, [T * top_k, hidden], and where they lie, as `combine` takes it."""
        ids = ids.contiguous()
        if plan.sorts:
            rows = sort(ids, self.num_experts, block_m=plan.block_m)
        else:  # each pair is a block, and the kernels read nothing but ids
            rows = Sorted(ids, ids, ids, ids.view(1, -1), ids)
        out = torch.empty(ids.numel(), self.hidden, dtype=self.dtype, device=self.device)
        tile, num_blocks = plan.down, rows.num_blocks
        down_kernel[(num_blocks * cdiv(self.hidden, tile.block_n),)](
            *self._gate_up(x, plan, ids, rows), self.tensors.down, self.down_scales,
            self.tensors.down_bias, out, ids, rows.blocks, num_blocks, self.num_experts,
            HIDDEN=self.hidden, INNER=self.inner,
            X=self._form(plan).value, OFFSET=self.tensors.column_offset,
            **self._constants(plan, tile, 1),
        )  # fmt: skip
        return out, rows.positions

    def _gate_up(
        self, x: Activation, plan: Plan, ids: Tensor, rows: Sorted
    ) -> tuple[Tensor, Tensor]:
        tile, num_pairs, num_blocks = plan.gate_up, ids.numel(), rows.num_blocks
        quantises, form = self.is_fp8 and plan.quantises_first, self._form(plan)
        if isinstance(x, QuantizedInput):
            form, values, x_scales = QUANTISED, x.q, x.scales
            assert x_scales.is_contiguous()
        elif quantises:
            values, x_scales = quantise(x)
        else:
            values = x_scales = x.contiguous()
        dtype = FP8 if quantises else self.dtype
        out = torch.empty(num_pairs, self.inner, dtype=dtype, device=self.device)
        shape = (num_pairs, cdiv(self.inner, GROUP)) if quantises else (0,)
        out_scales = torch.empty(shape, dtype=torch.float32, device=self.device)
        gate_up_kernel[(num_blocks * cdiv(self.inner, tile.block_n),)](
            values, x_scales, self.tensors.gate_up, self.gate_up_scales, self.tensors.gate_up_bias,
            out, out_scales, ids, rows.blocks, rows.order, num_blocks, self.num_experts,
            HIDDEN=self.hidden, INNER=self.inner, TOP_K=ids.shape[1], X=form.value,
            LIMIT=self.limit, NUM_PARTS=self.num_parts, QUANTISES=quantises,
            OFFSET=self.tensors.row_offset, **self._constants(plan, tile, 0),
        )  # fmt: skip
        return out, out_scales

    def _form(self, plan: Plan) -> Any:
        """How products read what did not come quantised."""
        if not self.is_fp8:
            return PLAIN
        return QUANTISED if plan.quantises_first else TO_QUANTISE

    def _constants(self, plan: Plan, tile: Tile, product: int) -> dict[str, int]:
        """product: 0 for gate-up, 1 for down."""
        rows, columns = self.blocks[product]
        return {
            "GROUP_N": rows,
            "GROUP_K": columns,
            "IS_SORTED": plan.sorts,
            "BLOCK_M": plan.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": self.steps[product],
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **launch_dependent(self.device),
        }
