"""NVFP4 arithmetic in torch, on any device: what native kernels must equal bit for bit.

A value is q * scale / global_scale: q in E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), an E4M3
scale for each group of 16 consecutive columns, and a float32 global scale for the tensor. In
float32, by IEEE division, with both roundings to nearest even and saturating:

    scale = E4M3(max|group| * (global_scale / 6))
    q     = E2M1(x * (global_scale / scale)), 0 where scale is 0

A NaN makes its group's scale NaN, so that nothing computed with it looks sound. global_scale is
what compressed-tensors stores (`input_global_scale`, `weight_global_scale`); ModelOpt stores its
reciprocal (`input_scale`, `weight_scale_2`).
"""

from itertools import pairwise

import torch
from torch import Tensor

from vllm.formats.nvfp4 import GROUP as GROUP
from vllm.utils.math_utils import cdiv

E2M1_MAX = 6.0
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
# Magnitudes of the codes 0 to 7; bit 3 of a code is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8
# Scale tiles of tensor-core GEMMs: 128 rows by 4 scale columns.
TILE_ROWS, TILE_COLUMNS = 128, 4


# ---------------------------------------------------------------- E2M1


def e2m1_encode(x: Tensor) -> Tensor:
    """Codes (uint8, 0 to 15) of float32 x: to nearest, ties to the even code, saturating.

    -0 gives 8; a NaN of either sign gives 7, as `cvt.rn.satfinite.e2m1x2.f32` does.
    """
    x = x.float()
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code in range(7):
        # A midpoint belongs to its even neighbour.
        midpoint = (E2M1_VALUES[code] + E2M1_VALUES[code + 1]) / 2
        codes += magnitude > midpoint if code % 2 == 0 else magnitude >= midpoint
    codes += x.signbit().to(torch.uint8) * _SIGN
    return codes.masked_fill_(x.isnan(), 7)


def e2m1_decode(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes (uint8, 0 to 15)."""
    values = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat((values, -values))[codes.long()]


def pack_e2m1(codes: Tensor) -> Tensor:
    """uint8 [..., K] -> uint8 [..., K / 2]: even elements in the low nibbles."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes are {tuple(codes.shape)}: a byte holds two, so K must be even")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., K / 2] -> uint8 [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


# ---------------------------------------------------------------- layout of scales


def swizzle_scales(scales: Tensor) -> Tensor:
    """Row-major scales [..., M, G] (1-byte elements) -> tiles [..., M up to 128s, G up to 4s],
    zero-filled.

    A tile is 128 rows by 4 columns, 512 bytes; tiles of a row of tiles lie one after another, and
    row r, column c of a tile is at byte 16 (r % 32) + 4 (r // 32) + c.
    """
    filling = (0, -scales.shape[-1] % TILE_COLUMNS, 0, -scales.shape[-2] % TILE_ROWS)
    padded = torch.nn.functional.pad(scales.view(torch.uint8), filling)
    tiles: Tensor = padded.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, 4, 32))
    return tiles.transpose(-4, -2).reshape(padded.shape).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, num_rows: int, num_groups: int) -> Tensor:
    """The inverse of `swizzle_scales`: [num_rows, num_groups], without the filling."""
    row_tiles, column_tiles = cdiv(num_rows, TILE_ROWS), cdiv(num_groups, TILE_COLUMNS)
    expected = (row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    if tuple(swizzled.shape) != expected:
        raise ValueError(
            f"swizzled scales are {tuple(swizzled.shape)}; "
            f"[{num_rows}, {num_groups}] has tiles of {expected}"
        )
    tiles = swizzled.view(torch.uint8).view(row_tiles, column_tiles, 32, 4, TILE_COLUMNS)
    rows = tiles.permute(0, 3, 2, 1, 4).reshape(expected)[:num_rows, :num_groups]
    return rows.contiguous().view(swizzled.dtype)


def max_grouped_scale_rows(num_rows: int, num_experts: int) -> int:
    """Scale rows that `num_rows` rows of `num_experts` experts need at most: each expert's 128s."""
    most = num_rows + (TILE_ROWS - 1) * min(num_rows, num_experts)
    return most // TILE_ROWS * TILE_ROWS


# ---------------------------------------------------------------- quantising


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """The global scale that maps the largest magnitude of a tensor to E4M3's times E2M1's."""
    return torch.full_like(amax, E4M3_MAX * E2M1_MAX, dtype=torch.float32) / amax.float()


def nvfp4_quantize(
    x: Tensor, global_scale: Tensor, is_swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x [M, K] (any float type, K % 16 == 0) with a float32 global scale [1].

    Returns codes uint8 [M, K / 2] and scales float8_e4m3fn [M, K / 16], or as `swizzle_scales`
    lays them out.
    """
    if x.ndim != 2 or x.shape[1] % GROUP:
        raise ValueError(f"x is {tuple(x.shape)}; accepted: [M, K] with K a multiple of {GROUP}")
    groups = x.float().unflatten(1, (-1, GROUP))
    global_scale = global_scale.float().to(x.device)
    # By a tensor: torch divides by a number through its reciprocal on some devices.
    by_6 = global_scale / torch.full_like(global_scale, E2M1_MAX)
    scales = round_to_e4m3(groups.abs().amax(-1) * by_6)
    widened = scales.float()
    factors = torch.where(widened == 0, 0.0, global_scale / widened)
    packed = pack_e2m1(e2m1_encode(groups * factors.unsqueeze(-1)).flatten(1))
    return packed, swizzle_scales(scales) if is_swizzled else scales


def round_to_e4m3(x: Tensor) -> Tensor:
    """float32 x >= 0 -> float8_e4m3fn: to nearest even, saturating at 448; NaN stays NaN."""
    rounded = x.clamp(max=E4M3_MAX).to(E4M3).view(torch.uint8)
    return rounded.masked_fill(x.isnan(), E4M3_NAN).view(E4M3)


def nvfp4_dequantize(packed: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """float32 [M, K] of codes uint8 [M, K / 2] and row-major scales [M, K / 16]."""
    factors = scales.float() / global_scale.float().to(scales.device)
    return e2m1_decode(unpack_e2m1(packed)) * factors.repeat_interleave(GROUP, 1)


def nvfp4_quantize_grouped(
    x: Tensor, global_scales: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Quantises rows sorted by expert, each expert with its own global scale.

    x [M, K]; global_scales float32 [E]; expert_offsets int32 [E + 1], from 0 to R <= M: expert e
    has rows expert_offsets[e] to expert_offsets[e + 1]. Returns codes uint8 [R, K / 2] and scales
    float8_e4m3fn, swizzled for each expert alone, one expert's whole tiles after another's.
    """
    bounds = expert_offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > x.shape[0] or sorted(bounds) != bounds:
        raise ValueError(
            f"expert_offsets are {bounds}; accepted: from 0 up to {x.shape[0]} at most, never "
            f"falling"
        )
    parts = [
        nvfp4_quantize(x[begin:end], global_scales[e : e + 1], is_swizzled=True)
        for e, (begin, end) in enumerate(pairwise(bounds))
    ]
    scales = torch.cat([scales.view(torch.uint8) for _, scales in parts]).view(E4M3)
    return torch.cat([packed for packed, _ in parts]), scales
