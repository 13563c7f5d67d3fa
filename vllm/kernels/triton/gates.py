# mypy: ignore-errors
"""Values times a function of a gate, in Triton: one launch each (contract: `vllm.ops`).

Names in capitals are compile-time constants.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.moe_kernels import begin_dependent
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2

NUM_WARPS = 4


# A model has one stride of gates; Triton has to know that 16 divides it, or reads each by itself.
@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x, gate, weight, out, num_rows, gate_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows are heads of tokens; those of `gate` lie together within a token alone."""
    begin_dependent(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_PAD)
    is_row, is_column = row < num_rows, column < DIM
    is_there = is_row[:, None] & is_column[None, :]
    own = row.to(tl.int64)[:, None] * DIM + column[None, :]
    values = tl.load(x + own, mask=is_there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)
    at = (row // HEADS).to(tl.int64)[:, None] * gate_stride
    at += (row % HEADS)[:, None] * DIM + column[None, :]
    z = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=is_column, other=0.0)
    y = values * scale[:, None] * w[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(out + own, y.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _sigmoid_kernel(
    x, gate, gate_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_STRIDE: tl.constexpr, IS_ONE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of a token's columns). IS_ONE: a head has a single gate."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < HEADS * DIM
    place = x + token * (HEADS * DIM) + column
    own = gate + token * gate_stride
    if IS_ONE and HEADS == 1:
        g = tl.load(own).to(tl.float32)
    else:
        at = column // DIM * HEAD_STRIDE + (0 if IS_ONE else column % DIM)
        g = tl.load(own + at, mask=is_column, other=0.0).to(tl.float32)
    values = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    tl.store(place, (values / (1.0 + tl.exp(-g))).to(x.dtype.element_ty), mask=is_column)


@triton.jit
def _gelu_kernel(
    x, out, x_stride, N: tl.constexpr, IS_TANH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of a token's columns). tanh(u) = 2 * sigmoid(2 u) - 1."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < N
    place = x + token * x_stride + column
    gate = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(place + N, mask=is_column, other=0.0).to(tl.float32)
    if IS_TANH:
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        share = 1.0 / (1.0 + tl.exp(-twice))
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    y = gate * share * up
    tl.store(out + token * N + column, y.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _relu2_kernel(
    x, out, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of a token's columns)."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < N
    given = tl.load(x + token * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    y = tl.where(given < 0.0, 0.0, given * given)  # which keeps NaN
    tl.store(out + token * N + column, y.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, gate_stride, eps,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, groups)."""
    begin_dependent(PDL)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    is_column = column < COLUMNS
    own = group * COLUMNS + column
    place = token * (GROUPS * COLUMNS) + own
    values = tl.load(x + place, mask=is_column, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + own, mask=is_column, other=0.0).to(tl.float32)
    values *= z / (1.0 + tl.exp(-z))
    scale = tl.rsqrt(tl.sum(values * values, 0) / COLUMNS + eps)
    w = tl.load(weight + own, mask=is_column, other=0.0)
    tl.store(out + place, (values * scale * w).to(out.dtype.element_ty), mask=is_column)


def gelu_and_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """x [T, 2 n] -> [T, n] = gelu(x[:, :n]) * x[:, n:]. approximate: `none`, or `tanh`."""
    num_tokens, n = x.shape[0], x.shape[1] // 2
    result = x.new_empty((num_tokens, n)) if out is None else out
    assert x.stride(1) == 1 and result.is_contiguous()
    if num_tokens:
        block = min(next_power_of_2(n), 512 if num_tokens < 64 else 2048)
        _gelu_kernel[(num_tokens, cdiv(n, block))](
            x, result, x.stride(0), N=n, IS_TANH=approximate == "tanh", BLOCK=block,
            num_warps=NUM_WARPS, **launch_dependent(x.device),
        )  # fmt: skip
    return result


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """rms_norm(x, weight, eps) * silu(gate), rounded once; x and gate [T, heads, dim]."""
    num_tokens, heads, dim = x.shape
    result = x.new_empty(x.shape) if out is None else out
    assert x.is_contiguous() and result.is_contiguous() and gate.shape == x.shape
    assert gate.stride(2) == 1 and gate.stride(1) == dim
    padded, num_rows = next_power_of_2(dim), num_tokens * heads
    rows = max(1, min(16, 2048 // padded))
    if num_rows:
        _norm_kernel[(cdiv(num_rows, rows),)](
            x, gate, weight, result, num_rows, gate.stride(0), eps, HEADS=heads, DIM=dim,
            D_PAD=padded, ROWS=rows, num_warps=NUM_WARPS, **launch_dependent(x.device),
        )  # fmt: skip
    return result


def silu_mul_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """rms_norm(x * silu(gate), weight, eps) over the columns of each group, rounded once; x and
    gate [T, groups, columns], weight float32 [groups, columns]."""
    num_tokens, groups, columns = x.shape
    result = x.new_empty(x.shape) if out is None else out
    assert x.is_contiguous() and result.is_contiguous() and weight.is_contiguous()
    assert gate.shape == x.shape and gate.stride()[1:] == (columns, 1)
    if num_tokens:
        padded = next_power_of_2(columns)
        _gated_norm_kernel[(num_tokens, groups)](
            x, gate, weight, result, gate.stride(0), eps, GROUPS=groups, COLUMNS=columns,
            PADDED=padded, num_warps=min(max(padded // 256, 1), 16), **launch_dependent(x.device),
        )  # fmt: skip
    return result


def relu2(x: Tensor, out: Tensor | None = None) -> Tensor:
    """max(x, 0) ** 2, rounded once; x [T, n]."""
    num_tokens, n = x.shape
    result = x.new_empty(x.shape) if out is None else out
    assert x.stride(1) == 1 and result.is_contiguous()
    if num_tokens:
        block = min(next_power_of_2(n), 512 if num_tokens < 64 else 2048)
        _relu2_kernel[(num_tokens, cdiv(n, block))](
            x, result, x.stride(0), N=n, BLOCK=block, num_warps=NUM_WARPS,
            **launch_dependent(x.device),
        )  # fmt: skip
    return result


def mul_sigmoid(x: Tensor, gate: Tensor) -> None:
    """In place: x [T, heads, dim] *= sigmoid(gate), gate of that shape or [T, heads, 1]."""
    num_tokens, heads, dim = x.shape
    assert x.is_contiguous() and gate.shape[:2] == x.shape[:2]
    assert gate.shape[2] == 1 or (gate.shape[2] == dim and gate.stride(2) == 1)
    if num_tokens:
        # Of few tokens many small programs; of many, a thread has 16 columns instead of 4 on their
        # way at once.
        block = min(next_power_of_2(heads * dim), 512 if num_tokens < 64 else 2048)
        _sigmoid_kernel[(num_tokens, cdiv(heads * dim, block))](
            x, gate, gate.stride(0), HEADS=heads, DIM=dim, HEAD_STRIDE=gate.stride(1),
            IS_ONE=gate.shape[2] == 1, BLOCK=block, num_warps=NUM_WARPS,
            **launch_dependent(x.device),
        )  # fmt: skip
