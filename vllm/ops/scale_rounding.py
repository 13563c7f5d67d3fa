"""Weights as kernels take their scales: with powers of two, or in the type of the activations.

Both may round, which loses accuracy for good; `requant_error` says how much, before it is done.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearTensors
from vllm.ops import fp8
from vllm.ops.fp8 import RequantError
from vllm.ops.packed_weights import element_values

_MOST_ELEMENTS = 1 << 24  # of a weight, widened at a time


def requantised(tensors: LinearTensors, scales: str, dtype: torch.dtype) -> LinearTensors:
    """The weight with scales of the form `scales` (a value of `Scales`), in tensors of its own
    where anything changes. dtype: of activations."""
    if scales == Scales.ACTIVATION:
        return with_scales_of_type(tensors, dtype)
    if scales in (Scales.UE8M0, Scales.FLOAT32_CEIL_UE8M0):
        return fp8.requantised_ue8m0(tensors)
    return tensors


def requant_error(tensors: LinearTensors, scales: str, dtype: torch.dtype) -> RequantError:
    """What `requantised` changes, against the weight as stored."""
    if scales != Scales.ACTIVATION:
        return fp8.requant_error(tensors)
    stored, rounded = tensors.row_scales(), with_scales_of_type(tensors, dtype).row_scales()
    assert stored is not None and rounded is not None
    change = rounded - stored
    if not bool(change.any()):
        return RequantError(0.0, 0.0)
    values = element_values(tensors)
    step = max(1, _MOST_ELEMENTS // values.shape[1])
    error, norm, worst = 0.0, 0.0, 0.0
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        wide = values[rows].float().unflatten(1, (stored.shape[1], -1))
        squares = wide.square().sum(-1, dtype=torch.float64)
        norm += float((squares * stored[rows].double().square()).sum())
        error += float((squares * change[rows].double().square()).sum())
        worst = max(worst, float((wide.abs().amax(-1) * change[rows].abs()).max()))
    return RequantError.of(error, norm, worst)


def with_scales_of_type(tensors: LinearTensors, dtype: torch.dtype) -> LinearTensors:
    """The weight with scales that `dtype` holds, each times one power of two (`unit_of`).

    Left alone: blocks, UE8M0, and one scale for all rows, which kernels take in float32; so are the
    E4M3 scales of nvfp4 and a global scale that its shards share. FP8 shards with different scales
    come back with one per row.
    """
    is_ue8m0 = tensors.scales is not None and tensors.scales.dtype == torch.uint8
    if tensors.format.scale == "block" or is_ue8m0:
        return tensors
    if tensors.global_scales is not None:
        factors = tensors.global_scales
        is_shared = bool((factors == factors[0]).all())
        return tensors if is_shared else replace(tensors, global_scales=_rounded(factors, dtype))
    scales = tensors.row_scales()
    assert scales is not None
    if tensors.is_packed:
        return replace(tensors, scales=_rounded(scales, dtype))
    if bool((scales == scales[0]).all()):
        return tensors
    per_row = WeightFormat(tensors.format.element, "channel")
    return replace(tensors, format=per_row, scales=_rounded(scales, dtype))


def unit_of(scales: Tensor, dtype: torch.dtype) -> float:
    """The power of two that `dtype` holds these scales in multiples of: 1, but for fp16, whose
    least normal number is 2^-14, the one below the greatest scale where that is below 1."""
    greatest = float(scales.max()) if dtype == torch.float16 else 0.0
    return min(1.0, 2.0 ** math.floor(math.log2(greatest))) if greatest > 0 else 1.0


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    unit = unit_of(scales, dtype)
    return (scales.float() / unit).to(dtype).float() * unit
