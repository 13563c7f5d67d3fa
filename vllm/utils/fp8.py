"""FP8 (E4M3) numbers in torch, on any device: scales, rounding, and weights by blocks.

A value is q * scale with q in E4M3 (largest 448). Every scale is max|x| / 448 of the values that
share it, by IEEE division; where UE8M0 is asked for, the next power of two at or above that.
Rounding to E4M3 is to nearest, ties to even, of x / scale clamped to +-448. NaN stays NaN.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.utils.math_utils import cdiv

FP8 = torch.float8_e4m3fn
# Below it no scale shrinks further: a token of zeros must not divide by zero.
MIN_AMAX = 1e-10
UE8M0_NAN = 255
_UE8M0_BIAS = 127
_MANTISSA = 0x7FFFFF  # of a float32
_EXPONENT = 0x7F800000


class GroupShape(NamedTuple("_Group", [("row", int), ("col", int)])):
    """Rows x columns of a matrix that share one scale; -1 stands for the whole dimension."""

    __slots__ = ()

    PER_TENSOR: ClassVar["GroupShape"]
    PER_TOKEN: ClassVar["GroupShape"]
    PER_CHANNEL: ClassVar["GroupShape"]


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


def get_fp8_min_max() -> tuple[float, float]:
    """The finite range of E4M3: -448 and 448."""
    info = torch.finfo(torch.float8_e4m3fn)
    return info.min, info.max


FP8_MAX = get_fp8_min_max()[1]


# ---------------------------------------------------------------- scales


def ceil_to_power_of_two(x: Tensor) -> Tensor:
    """The smallest normal power of two >= x, for float32 x >= 0; 0, infinity and NaN stay.

    Exact: a carry out of the mantissa, where exp2(ceil(log2(x))) may miss by a factor of two.
    """
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + _MANTISSA) & _EXPONENT).view(torch.float32)
    return torch.where(torch.isnan(x), x, rounded)


def is_power_of_two(x: Tensor) -> Tensor:
    """Whether each element of float32 x is a normal power of two, as a UE8M0 byte can hold."""
    bits = x.contiguous().view(torch.int32)
    return ((bits & _MANTISSA) == 0) & (bits > 0) & (bits < _EXPONENT)


def ue8m0_decode(exponents: Tensor) -> Tensor:
    """uint8 -> float32 2^(exponent - 127), exact; NaN for 255."""
    exponents = exponents.int()
    bits = exponents << 23
    bits = torch.where(exponents == 0, 1 << 22, bits)  # 2^-127 is below the normal numbers
    return torch.where(exponents == UE8M0_NAN, _EXPONENT | 1, bits).int().view(torch.float32)


def ue8m0_encode(scales: Tensor) -> Tensor:
    """float32 powers of two from 2^-127 to 2^127 -> uint8 exponents."""
    _, exponents = torch.frexp(scales)
    return (exponents + (_UE8M0_BIAS - 1)).to(torch.uint8)


def fp8_scales(amax: Tensor, use_ue8m0: bool = False, fp8_max: float = FP8_MAX) -> Tensor:
    """float32 scales of values whose greatest magnitude is `amax`."""
    # By a tensor: torch divides by a Python number on CUDA as a product with its reciprocal, which
    # rounds differently.
    scales = amax / torch.full((), fp8_max, device=amax.device)
    return ceil_to_power_of_two(scales) if use_ue8m0 else scales


def round_to_fp8(x: Tensor, scales: Tensor, dtype: torch.dtype = FP8) -> Tensor:
    """x / scales (broadcast), clamped to the finite range and rounded to nearest even."""
    info = torch.finfo(dtype)
    return (x.float() / scales).clamp_(info.min, info.max).to(dtype)


# ---------------------------------------------------------------- weights


def per_block_cast_to_fp8(
    x: Tensor, block_size: Sequence[int] = (128, 128), use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x [N, K] by blocks; edge blocks may be partial.

    Returns q float8_e4m3fn [N, K] and scales float32 [ceil(N / rows), ceil(K / columns)], with
    x ~ q * scale and scale = max|block| / 448 (1 for a block of zeros). use_ue8m0 rounds scales
    up to powers of two, as a UE8M0 exponent byte holds them. Non-finite values are a ValueError.
    """
    (num_rows, num_columns), (rows, columns) = x.shape, block_size
    padded = pad(x.float(), (0, -num_columns % columns, 0, -num_rows % rows)).contiguous()
    blocks = padded.view(cdiv(num_rows, rows), rows, cdiv(num_columns, columns), columns)
    amax = blocks.abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("a weight that holds NaN or infinity cannot be quantised")
    scales = fp8_scales(amax, use_ue8m0)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    quantised = round_to_fp8(blocks, scales[:, None, :, None])
    return quantised.view_as(padded)[:num_rows, :num_columns].contiguous(), scales


def dequantise_blocks(
    weight: Tensor,
    scales: Tensor,
    block_size: Sequence[int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """q * scale in `dtype` for weight [..., N, K] and scales [..., N blocks, K blocks].

    float64 holds every product exactly; float32 only where the scales are powers of two.
    """
    check_grid(weight, scales, block_size)
    size = block_size[1]
    row_scales = scales.to(dtype).repeat_interleave(block_size[0], -2)[..., : weight.shape[-2], :]
    wide = weight.to(dtype, copy=True)
    num_whole = weight.shape[-1] // size
    whole = wide[..., : num_whole * size].unflatten(-1, (num_whole, size))
    whole *= row_scales[..., :num_whole].unsqueeze(-1)
    wide[..., num_whole * size :] *= row_scales[..., num_whole:]
    return wide


def check_grid(weight: Tensor, scales: Tensor, block_size: Sequence[int]) -> None:
    grid = tuple(cdiv(size, block) for size, block in zip(weight.shape[-2:], block_size))
    if tuple(scales.shape) != (*weight.shape[:-2], *grid):
        raise ValueError(
            f"a tensor of {tuple(weight.shape)} in blocks of {block_size[0]}x{block_size[1]} has "
            f"scales of {(*weight.shape[:-2], *grid)}, not {tuple(scales.shape)}; merged weights "
            f"have scale rows per shard: requantised_ue8m0 takes those"
        )
