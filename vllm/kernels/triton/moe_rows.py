"""Rows of a mixture of experts in Triton: in which order, out and back.

Nothing waits for the device and every size depends on the number of tokens alone, so that all of
it can be captured in a CUDA graph. A pair is a token with one of its experts; experts outside of
[0, num_experts) are those of other ranks, and add nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vllm.formats.scales import Scales
from vllm.kernels.activations import InputQuant, QuantizedInput, UnaddedRows
from vllm.kernels.triton.moe_kernels import HAS_DEPENDENT_LAUNCH
from vllm.kernels.triton.moe_rows_kernels import (
    FLOAT32,
    FLOAT32_CEIL_UE8M0,
    UE8M0,
    activate_kernel,
    combine_kernel,
    combine_norm_kernel,
    count_kernel,
    label_kernel,
    sort_kernel,
    spread_kernel,
)
from vllm.ops.fp8_quant import ScaleLayout, empty_groups
from vllm.utils.math_utils import cdiv, next_power_of_2

_FORMS: dict[str, Any] = {
    Scales.FLOAT32: FLOAT32,
    Scales.FLOAT32_CEIL_UE8M0: FLOAT32_CEIL_UE8M0,
    Scales.UE8M0: UE8M0,
}
FP8 = torch.float8_e4m3fn
GROUP = 128
# Pairs that one program sorts, if there are few programs; each size is compiled apart, and so is
# each of these numbers of programs.
LEAST_CHUNK, SMALL_CHUNK, CHUNKS = 256, 1024, (1, 8, 64)


@cache
def capability_major(device: torch.device) -> int:
    """Of the compute capability; 0 in Triton's interpreter."""
    if device.type == "cpu":
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch) // 10


@cache
def launch_dependent(device: torch.device) -> dict[str, bool]:
    """Arguments of kernels that call `begin_dependent`: where chip and Triton can, they are made
    ready to start while the kernel before them ends."""
    if capability_major(device) < 9 or not HAS_DEPENDENT_LAUNCH:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


class Sorted(NamedTuple):
    """Pairs by expert, all int32.

    order [rows]: pair of each row, not written where there is none. positions [T, top_k]: row of
    each pair, -1 for one of no expert here. ends [E + 1]: row after the last of the first i
    experts; where each expert has as many rows, its number of rows, after a zero. blocks
    [3, num_blocks]: expert (negative for none), first row, end of the expert's rows.
    expert_of_row [rows] of aligned experts: -1 where no pair is.
    """

    order: Tensor
    positions: Tensor
    ends: Tensor
    blocks: Tensor
    expert_of_row: Tensor

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[1]


def sort(
    ids: Tensor,
    num_experts: int,
    *,
    block_m: int = 0,
    is_aligned: bool = False,
    rows_per_expert: int = 0,
) -> Sorted:
    """Rows for the pairs of ids int64 [T, top_k].

    block_m: rows of a block, 0 for no blocks. is_aligned: experts begin at multiples of block_m,
    and block b is rows b * block_m and on. rows_per_expert: expert e begins at row e times that
    (at least T).
    """
    num_pairs = ids.numel()
    num_blocks = max_blocks(num_pairs, num_experts, block_m) if block_m else 0
    num_rows = num_pairs
    if is_aligned or rows_per_expert:
        num_rows = num_blocks * block_m if is_aligned else num_experts * rows_per_expert
    bins = next_power_of_2(num_experts + 1)
    chunk = min(SMALL_CHUNK, max(LEAST_CHUNK, next_power_of_2(num_pairs)))
    chunk = max(chunk, next_power_of_2(cdiv(num_pairs, CHUNKS[-1])))
    num_chunks = max(1, cdiv(num_pairs, chunk))  # of no pairs too, `ends` and `blocks` are written

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    counts, cursors = empty(num_chunks, bins), empty(num_chunks, bins)
    order, positions, ends = empty(num_rows), empty(*ids.shape), empty(num_experts + 1)
    blocks, expert_of_row = empty(3, num_blocks), empty(num_rows if is_aligned else 0)
    if num_chunks > 1:
        count_kernel[(num_chunks,)](ids, counts, num_pairs, num_experts, BINS=bins, CHUNK=chunk)
    sort_kernel[(num_chunks,)](
        ids, counts, cursors, order, positions, ends, blocks, num_pairs, num_experts, num_blocks,
        rows_per_expert, num_chunks, BINS=bins, CHUNK=chunk,
        CHUNKS_PAD=next(n for n in CHUNKS if n >= num_chunks), ALIGN=block_m if is_aligned else 1,
        BLOCK_M=block_m, FILL=256, IS_MASKED=rows_per_expert > 0, num_warps=4 if chunk < 512 else 8,
        **launch_dependent(ids.device),
    )  # fmt: skip
    if is_aligned:
        label_kernel[(num_blocks,)](blocks, expert_of_row, num_blocks, BLOCK_M=block_m)
    return Sorted(order, positions, ends, blocks, expert_of_row)


def sizes_compiled_apart(top_k: int) -> list[int]:
    """Numbers of tokens of which each makes `sort` compile another kernel."""
    pairs = [LEAST_CHUNK, 2 * LEAST_CHUNK, *(SMALL_CHUNK * count for count in CHUNKS)]
    return [cdiv(count, top_k) for count in pairs]


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that `num_pairs` pairs can fill, whatever their experts."""
    some = min(num_pairs, num_experts)  # have one block begun
    return some + (num_pairs - some) // block_m


class Rows(NamedTuple):
    """How quantised rows and their scales lie. num_rows: of all experts. rows_per_expert: where
    each expert has as many, else 0. scales: their form (`Scales`). is_row_major: scales of
    a row lie together (float32 and no rows_per_expert)."""

    num_rows: int
    rows_per_expert: int = 0
    scales: str = Scales.FLOAT32
    is_row_major: bool = False

    def empty(self, k: int, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """q E4M3 [num_rows, k]; scales [num_rows, groups], or [E, rows_per_expert, groups], rows
        running fastest and padded to 16 bytes, UE8M0 packed in int32; and the kernels' arguments
        for them."""
        groups, rows = cdiv(k, GROUP), self.rows_per_expert or self.num_rows
        blocks = self.num_rows // self.rows_per_expert if self.rows_per_expert else 1
        is_packed = self.scales == Scales.UE8M0
        columns = cdiv(groups, 4) if is_packed else groups
        stride = cdiv(rows, 4) * 4
        q = torch.empty(self.num_rows, k, dtype=FP8, device=device)
        dtype = torch.int32 if is_packed else torch.float32
        memory = torch.empty(blocks, columns, stride, dtype=dtype, device=device)
        scales = memory[..., :rows].transpose(1, 2)
        if self.is_row_major:
            scales = memory = torch.empty(1, rows, groups, dtype=dtype, device=device)
        arguments = {
            "q": q,
            "scales": memory.view(torch.uint8) if is_packed else memory,
            "block_rows": rows,
            "row_stride": groups if self.is_row_major else 1,
            "group_stride": 1 if self.is_row_major else stride,
            "K": k,
            "G_PAD": max(4, next_power_of_2(groups)),
            "FORM": _FORMS[self.scales].value,
        }
        return q, scales if self.rows_per_expert else scales[0], arguments


def spread(x: Tensor, positions: Tensor | None, layout: Rows) -> tuple[Tensor, Tensor]:
    """Tokens x [T, K] quantised, in the rows of their pairs; without positions in their own. Rows
    of no pair are not written."""
    num_tokens, k = x.shape
    assert x.stride(1) == 1
    q, scales, arguments = layout.empty(k, x.device)
    top_k = 1 if positions is None else positions.shape[1]
    spread_kernel[(num_tokens,)](
        x, positions=positions, x_stride=x.stride(0), TOP_K=top_k, **arguments
    )
    return q, scales


def activate(
    x: Tensor, positions: Tensor, layout: Rows, is_up_first: bool = False
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of rows x [num_rows, 2 K], quantised. Rows of no pair are not read.
    is_up_first: the columns of up come before those of gate."""
    assert x.is_contiguous()
    q, scales, arguments = layout.empty(x.shape[-1] // 2, x.device)
    activate_kernel[(positions.numel(),)](
        x, positions=positions, IS_UP_FIRST=is_up_first, **arguments
    )
    return q, scales


def taken_rows(counts: Tensor, size: int) -> Tensor:
    """Of blocks of `size` rows the first counts[e] are taken: int32 [E, size] of the row's number
    where it is, and -1 elsewhere, as `activate` takes them."""
    rows = torch.arange(len(counts) * size, dtype=torch.int32, device=counts.device)
    rows = rows.view(-1, size)
    return rows.masked_fill(rows % size >= counts.unsqueeze(1), -1)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] in E4M3, and float32 scales [T, groups of 128 columns]."""
    return spread(x, None, Rows(len(x), is_row_major=True))


@dataclass(frozen=True, slots=True)
class ExpertRows(UnaddedRows):
    """Results of pairs and their weights, as `combine` takes them. addend: [T, hidden] or None."""

    rows: Tensor
    weights: Tensor
    positions: Tensor
    num_experts: int
    is_sorted: bool = True
    addend: Tensor | None = None

    def total(self) -> Tensor:
        pairs = self.rows, self.weights, self.positions, self.num_experts, self.is_sorted
        return combine(*pairs) if self.addend is None else combine(*pairs).add_(self.addend)

    def plus(self, x: Tensor) -> UnaddedRows:
        return replace(self, addend=x if self.addend is None else self.addend + x)

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, quant: InputQuant
    ) -> QuantizedInput | None:
        if quant.layout is ScaleLayout.PACKED_UE8M0:
            return None
        (num_tokens, hidden), top_k = residual.shape, self.weights.shape[1]
        q, scales, is_ue8m0 = empty_groups(residual, hidden, quant.layout, quant.use_ue8m0)
        normed = torch.empty_like(residual) if quant.keeps_source else None
        assert residual.is_contiguous() and residual.dtype == self.rows.dtype
        assert self.addend is None or self.addend.is_contiguous()
        # A thread has eight columns of a row, 16 bytes.
        num_warps = min(max(next_power_of_2(hidden) // 256, 1), 16)
        if num_tokens:
            combine_norm_kernel[(len(scales),)](
                self.rows, self.weights, self.positions, self.addend, residual, weight, normed, q,
                scales, num_tokens, self.num_experts, eps, len(scales), *scales.stride(), K=hidden,
                G_PAD=next_power_of_2(cdiv(hidden, GROUP)), TOP_K=top_k, IS_SORTED=self.is_sorted,
                FORM=(FLOAT32_CEIL_UE8M0 if is_ue8m0 else FLOAT32).value,
                num_warps=num_warps, **launch_dependent(residual.device),
            )  # fmt: skip
        return QuantizedInput(q, scales[:num_tokens], residual.dtype, normed)


@dataclass(frozen=True, slots=True)
class KernelOfRows:
    """Experts whose results lie in rows of pairs."""

    unadded: Callable[[Tensor, Tensor, Tensor], ExpertRows]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.unadded(x, weights, ids).total() if len(x) else x.clone()


def combine(
    rows: Tensor, weights: Tensor, positions: Tensor, num_experts: int, is_sorted: bool = True
) -> Tensor:
    """[T, hidden]: for each token the sum of weight * its pairs' rows, in float32.

    positions: row of each pair, negative for one that adds nothing; or, where pair i is row i
    (not is_sorted), ids of experts.
    """
    num_tokens, top_k = weights.shape
    hidden = rows.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=rows.dtype, device=rows.device)
    block = min(next_power_of_2(hidden), 512 if num_tokens < 64 else 2048)
    combine_kernel[(num_tokens, cdiv(hidden, block))](
        rows, weights, positions, out, num_experts, HIDDEN=hidden, TOP_K=top_k,
        IS_SORTED=is_sorted, BLOCK=block, num_warps=1 if block <= 512 else 4,
        **launch_dependent(rows.device),
    )  # fmt: skip
    return out
