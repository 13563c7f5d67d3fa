# mypy: ignore-errors
"""What is between the products of experts with biases, in Triton: one launch.

Rows are those of pairs of a token and an expert, in any order (`moe_rows.sort`). Names in capitals
are compile-time constants.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.moe_kernels import activate, begin_dependent
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2

_MOST_COLUMNS = 1024


@triton.jit
def _activate_kernel(
    x, bias, out, ids, positions,
    INNER: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (pairs, blocks of columns)."""
    begin_dependent(PDL)
    pair = tl.program_id(0)
    row = tl.load(positions + pair).to(tl.int64)
    if row < 0:
        return
    expert = tl.load(ids + pair)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < INNER
    own, added = x + row * (2 * INNER) + columns, bias + expert * (2 * INNER) + columns
    gate = tl.load(own, mask=is_there, other=0.0).to(tl.float32)
    gate += tl.load(added, mask=is_there, other=0.0)
    up = tl.load(own + INNER, mask=is_there, other=0.0).to(tl.float32)
    up += tl.load(added + INNER, mask=is_there, other=0.0)
    inner = activate(gate, up, LIMIT)
    tl.store(out + row * INNER + columns, inner.to(out.dtype.element_ty), mask=is_there)


def activate_biased(
    x: Tensor, bias: Tensor, ids: Tensor, positions: Tensor, limit: float
) -> Tensor:
    """[rows, I]: the activation of x [rows, 2 I] plus the bias of each row's expert; limit: of
    `swigluoai`, 0 for silu.

    bias: float32 [E, 2 I]. ids: int64 [T, top_k], experts of the pairs. positions: int32
    [T, top_k], row of each pair, negative for one without. Rows of no pair are not written.
    """
    rows, inner = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous() and ids.is_contiguous() and positions.is_contiguous()
    out = x.new_empty(rows, inner)
    block = min(next_power_of_2(inner), _MOST_COLUMNS)
    _activate_kernel[(ids.numel(), cdiv(inner, block))](
        x, bias, out, ids, positions, INNER=inner, LIMIT=limit, BLOCK=block,
        **launch_dependent(x.device),
    )  # fmt: skip
    return out
