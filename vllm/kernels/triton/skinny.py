# mypy: ignore-errors
"""Products of few tokens with a small weight in half precision, in one launch.

Names in capitals are compile-time constants.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.moe_kernels import begin_dependent
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2

ROWS = 2  # of the weight, that one program multiplies


@triton.jit
def product_kernel(
    x, weight, bias, out, x_stride, num_rows,
    K: tl.constexpr, K_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, num_rows] = x @ weight.T + bias, rounded once. Grid (blocks of ROWS rows,
    tokens). bias: float32 [num_rows].

    Products are exact in float32 and are added in an order that K alone decides, so that a token's
    result is the same in any company.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K_PAD)[None, :]
    is_row = rows < num_rows
    # The weight is no kernel's output: it is on its way while the one before this ends.
    w = tl.load(weight + rows[:, None] * K + k, mask=is_row[:, None] & (k < K), other=0.0)
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=is_row)
    begin_dependent(PDL)
    values = tl.load(x + token * x_stride + k, mask=k < K, other=0.0)
    sums = tl.sum(w.to(tl.float32) * values.to(tl.float32), 1)
    if HAS_BIAS:
        sums += added
    tl.store(out + token * num_rows + rows, sums.to(out.dtype.element_ty), mask=is_row)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias, float32 [N], in the type of x and weight; added up in
    float32. K: a multiple of 16."""
    (num_tokens, k), num_rows = x.shape, len(weight)
    assert weight.is_contiguous() and weight.dtype == x.dtype and x.stride(1) == 1
    out = x.new_empty(num_tokens, num_rows)
    if num_tokens:
        product_kernel[(cdiv(num_rows, ROWS), num_tokens)](
            x, weight, bias, out, x.stride(0), num_rows, K=k, K_PAD=next_power_of_2(k),
            HAS_BIAS=bias is not None, ROWS=ROWS, **launch_dependent(x.device),
        )  # fmt: skip
    return out
