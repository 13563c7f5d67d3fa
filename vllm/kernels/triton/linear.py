"""FP8 block GEMM in Triton, for chips and machines without a compiled one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from torch import Tensor

from vllm.kernels.triton.linear_kernels import GROUP, block_gemm
from vllm.utils.math_utils import cdiv


@dataclass(frozen=True, slots=True)
class Tile:
    """Of `tokens` x `rows` of a weight, for products of at most `most_tokens` tokens."""

    most_tokens: int | None
    tokens: int
    rows: int
    warps: int
    stages: int


# Few tokens: narrow tiles, so that there are enough programs to load from all of memory at once.
# Measured on an H100 with weights of 4096x4096 and 24576x4096.
TILES = (
    Tile(16, 16, 64, 4, 5),
    Tile(32, 32, 64, 4, 5),
    Tile(128, 64, 64, 4, 4),
    Tile(512, 64, 128, 4, 4),
    Tile(None, 128, 128, 8, 4),
)


def fp8_block_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    block: Sequence[int],
    y: Tensor,
) -> None:
    """y [M, N] = x [M, K] @ weight [N, K].T + bias, all contiguous; x and weight float8_e4m3fn.

    x_scales: float32 [M, ceil(K / 128)]. scales: float32, one per block [rows, columns] of the
    weight; columns and 128 have a common divisor of at least 32. bias: float32 [N]. y: bfloat16 or
    float16.
    """
    num_tokens, k = x.shape
    n = weight.shape[0]
    if num_tokens == 0:
        return
    tile = next(t for t in TILES if t.most_tokens is None or num_tokens <= t.most_tokens)
    step = gcd(GROUP.value, block[1])
    grid = (cdiv(num_tokens, tile.tokens) * cdiv(n, tile.rows),)
    block_gemm[grid](
        x, x_scales, weight, scales, bias, y, num_tokens, n, k,
        GROUP_N=block[0], GROUP_K=block[1], HAS_BIAS=bias is not None, IS_WHOLE=k % step == 0,
        BLOCK_M=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=step,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
