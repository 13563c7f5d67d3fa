"""Weights of 4 bits, two codes a byte (nvfp4, mxfp4, int4), and of int8: widened; int4 from the
layouts of checkpoints too.

int4 values are (code - zero point) * scale with codes and zero points of 0 to 15; 8 is the zero
point of symmetric weights. compressed-tensors packs eight codes into an int32, the first column
in the lowest bits, and zero points likewise along rows. AWQ's GEMM layout holds the transposed
weight and packs eight rows of ours into an int32 in the order of `AWQ_ORDER`.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from vllm.formats import mxfp4, nvfp4
from vllm.kernels.interface import LinearTensors
from vllm.ops.nvfp4 import e2m1_decode, pack_e2m1, unpack_e2m1

PER_INT32 = 8
E2M1_ELEMENTS = (nvfp4.FORMAT.element, mxfp4.FORMAT.element)
SYMMETRIC_ZERO = 8
# Position in an int32, from the lowest bits on -> which of eight neighbours lies there.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E4M3 = torch.float8_e4m3fn
Packed = TypeVar("Packed")


def element_values(tensors: LinearTensors) -> Tensor:
    """The weight before its scales, [N, K]: floats as they are stored, values of 4 bits in
    float8_e4m3fn, int8 ones in bfloat16.

    Exact: E4M3 holds every E2M1 value and every whole number from -15 to 15, bfloat16 those from
    -256 to 256.
    """
    if tensors.format.element == "int8":
        if tensors.zero_points is None:
            return tensors.weight.bfloat16()
        shifts = tensors.zero_points.short().repeat_interleave(tensors.block_k, 1)
        return (tensors.weight - shifts).bfloat16()
    if not tensors.is_packed:
        return tensors.weight
    if tensors.format.element in E2M1_ELEMENTS:
        table = _pairs_of_e2m1(tensors.weight.device)
        found = table.index_select(0, tensors.weight.flatten().int())
        return found.view(_E4M3).view(tensors.weight.shape[0], -1)
    codes = unpack_e2m1(tensors.weight).view(torch.int8)
    if tensors.zero_points is None:
        return (codes - SYMMETRIC_ZERO).to(_E4M3)
    zeros = tensors.zero_points.view(torch.int8).repeat_interleave(tensors.block_k, 1)
    return (codes - zeros).to(_E4M3)


def pack_with(pack: Callable[..., Packed], tensors: LinearTensors) -> Packed:
    """What `pack_linear` of an ops module makes of the elements of a weight. Their scales stay
    apart, in float32.
    """
    return pack(element_values(tensors), tensors.row_scales(), tensors.block_k, tensors.bias)


def dequantised(tensors: LinearTensors) -> Tensor:
    """The weight with its scales, float32 [N, K]."""
    wide, scales = element_values(tensors).float(), tensors.row_scales()
    if scales is None:
        return wide
    return wide * scales.repeat_interleave(tensors.block_k, 1)[:, : wide.shape[1]]


@cache
def _pairs_of_e2m1(device: torch.device) -> Tensor:
    """The two E4M3 values of every byte of E2M1 codes, as int16 [256]."""
    codes = unpack_e2m1(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1))
    return e2m1_decode(codes).to(_E4M3).view(torch.int16).flatten()


# ---------------------------------------------------------------- layouts of checkpoints


def unpack_int32(packed: Tensor) -> Tensor:
    """int32 [..., K / 8] -> codes uint8 [..., K], the first of eight in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & 0xF).to(torch.uint8).flatten(-2)


def pack_int32(codes: Tensor) -> Tensor:
    """codes uint8 [..., K] (K % 8 == 0) -> int32 [..., K / 8]."""
    return pack_e2m1(codes).contiguous().view(torch.int32)


def unpack_rows_int32(packed: Tensor, num_rows: int) -> Tensor:
    """int32 [ceil(N / 8), G], eight rows in each -> codes uint8 [N, G]."""
    return unpack_int32(packed.T.contiguous()).T[:num_rows]


def unpack_awq(packed: Tensor) -> Tensor:
    """int32 [K, N / 8] of AWQ's GEMM layout -> codes uint8 [N, K]."""
    stored = unpack_int32(packed).unflatten(1, (-1, PER_INT32))
    codes = torch.empty_like(stored)
    codes[..., list(AWQ_ORDER)] = stored
    return codes.flatten(1).T


# ---------------------------------------------------------------- quantising


def int4_quantize(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric int4 of weight [N, K]: codes uint8 [N, K] and scales [N, K / group] in its type.

    The scale is the largest magnitude of the group / 7.5, rounded to the weight's type before the
    codes are chosen: to nearest, so that the largest value itself may lose half a step.
    """
    if weight.shape[1] % group:
        raise ValueError(f"{weight.shape[1]} columns are not whole groups of {group}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight holds NaN or infinity and cannot be quantised")
    groups = weight.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 7.5).to(weight.dtype)
    scales = scales.masked_fill(scales == 0, 1)
    steps = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-8, 7)
    return (steps + SYMMETRIC_ZERO).to(torch.uint8).flatten(1), scales
