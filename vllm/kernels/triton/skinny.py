# mypy: ignore-errors
"""Products of few tokens with a weight in half precision, in one launch.

Names in capitals are compile-time constants.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.moe_kernels import begin_dependent
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2

ROWS = 2  # of a small weight, that one program multiplies
# Of larger ones, whose rows a program multiplies by all tokens: read from memory once.
LARGE_ROWS, LARGE_WARPS = 4, 8
MOST_TOKENS = 16
# Numbers of a weight that each token reads from L2 again, at most: estimated, 16 MiB for 8 tokens
# take 4 us at 4 TB/s, and as long do 8 tokens one after another.
SMALL_SIZE = 1 << 20


@triton.jit
def _store_product(w, x, added, out, rows, is_row, token, x_stride, num_rows, K: tl.constexpr,
                   K_PAD: tl.constexpr):  # fmt: skip
    k = tl.arange(0, K_PAD)[None, :]
    values = tl.load(x + token * x_stride + k, mask=k < K, other=0.0)
    sums = tl.sum(w.to(tl.float32) * values.to(tl.float32), 1) + added
    tl.store(out + token * num_rows + rows, sums.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    x, weight, bias, out, x_stride, num_rows, num_tokens,
    K: tl.constexpr, K_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    IS_LARGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [num_tokens, num_rows] = x @ weight.T + bias, rounded once. Grid (blocks of ROWS rows,
    tokens), of IS_LARGE (blocks of ROWS rows,). bias: float32 [num_rows].

    Products are exact in float32 and are added in an order that K alone decides, so that a token's
    result is the same in any company.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, K_PAD)[None, :]
    is_row = rows < num_rows
    # The weight is no kernel's output: it is on its way while the one before this ends.
    own = weight + rows[:, None].to(tl.int64) * K + k
    w = tl.load(own, mask=is_row[:, None] & (k < K), other=0.0)
    added = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=is_row, other=0.0)
    begin_dependent(PDL)
    if IS_LARGE:
        for token in range(num_tokens):
            _store_product(w, x, added, out, rows, is_row, token, x_stride, num_rows, K, K_PAD)
    else:
        token = tl.program_id(1).to(tl.int64)
        _store_product(w, x, added, out, rows, is_row, token, x_stride, num_rows, K, K_PAD)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias, float32 [N], in the type of x and weight; added up in
    float32. T: at most MOST_TOKENS. K: a multiple of 16."""
    (num_tokens, k), num_rows = x.shape, len(weight)
    assert weight.is_contiguous() and weight.dtype == x.dtype and x.stride(1) == 1
    assert num_tokens <= MOST_TOKENS
    out = x.new_empty(num_tokens, num_rows)
    is_large = num_rows * k > SMALL_SIZE
    rows, num_warps = (LARGE_ROWS, LARGE_WARPS) if is_large else (ROWS, 4)
    if num_tokens:
        product_kernel[(cdiv(num_rows, rows), 1 if is_large else num_tokens)](
            x, weight, bias, out, x.stride(0), num_rows, num_tokens, K=k,
            K_PAD=next_power_of_2(k), HAS_BIAS=bias is not None, ROWS=rows, IS_LARGE=is_large,
            num_warps=num_warps, **launch_dependent(x.device),
        )  # fmt: skip
    return out
