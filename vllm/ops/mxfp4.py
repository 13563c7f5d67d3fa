"""MXFP4 arithmetic in torch, on any device.

A value is q * 2^(exponent - 127) with q in E2M1 and a UE8M0 exponent for each group of 32
consecutive columns (OCP Microscaling Formats 1.0).
"""

import torch
from torch import Tensor

from vllm.formats.mxfp4 import GROUP
from vllm.ops.nvfp4 import e2m1_decode, e2m1_encode, pack_e2m1
from vllm.utils.fp8 import ue8m0_decode

_BIAS = 127
_E2M1_MAX_EXPONENT = 2  # of 4 and 6


def mxfp4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises weight [N, K] (K % 32 == 0): codes uint8 [N, K / 2], exponents uint8 [N, K / 32].

    The exponent of a group is what the OCP specification says, floor(log2(largest magnitude)) - 2,
    with which magnitudes above 6 saturate; or the next one, where the sum of squared errors of the
    group is smaller with it. A group of zeros has the exponent of 1. ValueError for a weight that
    is not finite, or of other sizes.
    """
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"weight is {tuple(weight.shape)}; accepted: [N, K], K % {GROUP} = 0")
    groups = weight.float().unflatten(1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("the weight holds NaN or infinity and cannot be quantised")
    # frexp: amax = mantissa * 2^exponent with a mantissa from 0.5 on.
    least = torch.frexp(amax).exponent - 1 - _E2M1_MAX_EXPONENT + _BIAS
    least = torch.where(amax == 0, _BIAS, least.clamp(0, 2 * _BIAS)).to(torch.uint8)
    next_one = (least + 1).clamp(max=2 * _BIAS)
    codes, error = _rounded(groups, least)
    other, other_error = _rounded(groups, next_one)
    is_other = other_error < error
    codes = torch.where(is_other.unsqueeze(-1), other, codes)
    return pack_e2m1(codes.flatten(1)), torch.where(is_other, next_one, least)


def _rounded(groups: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of groups [N, G, 32] with exponents [N, G], and the squared error of each group."""
    # In float64: the quotient by 2^-127 of a float32 need not be one.
    steps = ue8m0_decode(exponents).double().unsqueeze(-1)
    codes = e2m1_encode((groups / steps).clamp(-8, 8))
    error = groups - e2m1_decode(codes) * steps
    return codes, error.square().sum(-1)
