# mypy: ignore-errors
"""Products of few tokens, which stay as they are, with an NVFP4 weight as it is stored.

Names in capitals are compile-time constants.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm.formats.nvfp4 import GROUP
from vllm.utils.math_utils import cdiv

MOST_TOKENS = 16  # rows of the smallest tile that tensor cores multiply
BYTES = 128  # of a row of the weight, that are multiplied at a time
ROWS = 32  # of the weight, that one program multiplies
NUM_WARPS = ROWS // 8  # of an instruction of the tensor cores: more warps would repeat its work
NUM_STAGES = 4


@triton.jit
def _values(codes, scale):
    """E2M1 codes (the low four bits of a uint16) times scale / 128, float16 and exact: a code's
    exponent and mantissa are those of a float16 that is 2^14 too small; scale is 128 times its own.
    The product has 6 bits and is a multiple of 2^-17."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * scale


@triton.jit(do_not_specialize=["num_tokens"])
def nvfp4_product_kernel(
    x, weight, scales, factors, bias, out, x_stride, num_tokens, N, K,
    GROUP_BYTES: tl.constexpr, HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """out [num_tokens, N] = x @ weight.T + bias, added up in float32 and rounded once.

    weight: uint8 [N, K / 2], the even column in the low nibble; scales: E4M3 [N, K / 16]; factors:
    float32 [N], by which a row is multiplied last. Rows past the last are read as the last.
    BYTES: of a row in a step; IS_WHOLE says that it divides K / 2. A token's result is the same in
    any company.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    tokens = tl.minimum(m, num_tokens - 1).to(tl.int64)
    GROUPS: tl.constexpr = BYTES // GROUP_BYTES
    at, group = tl.arange(0, BYTES), tl.arange(0, GROUPS)
    column = tl.arange(0, 2 * BYTES)
    codes_tile = weight + rows[:, None] * (K // 2) + at[None, :]
    scales_tile = scales + rows[:, None] * (K // (2 * GROUP_BYTES)) + group[None, :]
    x_tile = x + tokens[:, None] * x_stride + column[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K // 2, BYTES):
        first = start // GROUP_BYTES
        if IS_WHOLE:
            codes = tl.load(codes_tile + start)
            scale = tl.load(scales_tile + first)
            values = tl.load(x_tile + 2 * start)
        else:
            codes = tl.load(codes_tile + start, mask=(start + at < K // 2)[None, :], other=0)
            is_group = (first + group < K // (2 * GROUP_BYTES))[None, :]
            scale = tl.load(scales_tile + first, mask=is_group, other=0.0)
            values = tl.load(x_tile + 2 * start, mask=(2 * start + column < K)[None, :], other=0.0)
        even, odd = tl.split(tl.reshape(values, [BLOCK_M, BYTES, 2]))
        scale = scale.to(tl.float16) * 128
        scale = tl.broadcast_to(scale[:, :, None], [BLOCK_N, GROUPS, GROUP_BYTES])
        scale = tl.reshape(scale, [BLOCK_N, BYTES])
        codes = codes.to(tl.uint16)
        low = _values(codes, scale).to(even.dtype)
        high = _values(codes >> 4, scale).to(even.dtype)
        total += tl.dot(even, tl.trans(low)) + tl.dot(odd, tl.trans(high))
    total *= tl.load(factors + rows)[None, :] * 128
    if HAS_BIAS:
        total += tl.load(bias + rows)[None, :]
    is_there = (m < num_tokens)[:, None] & (n < N)[None, :]
    tl.store(out + tokens[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=is_there)


def nvfp4_product(
    x: Tensor, weight: Tensor, scales: Tensor, factors: Tensor, bias: Tensor | None
) -> Tensor:
    """x [T, K] (bfloat16 or float16, T at most MOST_TOKENS) @ weight.T -> [T, N] in its type.

    weight: uint8 [N, K / 2]; scales: float8_e4m3fn [N, K / 16]; factors: float32 [N], the global
    scale of each row; bias: float32 [N].
    """
    (num_tokens, k), n = x.shape, len(weight)
    assert num_tokens <= MOST_TOKENS and x.stride(1) == 1 and k % GROUP == 0
    assert weight.is_contiguous() and scales.is_contiguous()
    out = x.new_empty(num_tokens, n)
    if num_tokens:
        nvfp4_product_kernel[(cdiv(n, ROWS),)](
            x, weight, scales, factors, bias, out, x.stride(0), num_tokens, n, k,
            GROUP_BYTES=GROUP // 2, HAS_BIAS=bias is not None, IS_WHOLE=k % (2 * BYTES) == 0,
            BLOCK_M=MOST_TOKENS, BLOCK_N=ROWS, BYTES=BYTES,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
    return out
