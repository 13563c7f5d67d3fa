"""int8 activations: x ~ q * scale with q from -128 to 127, symmetric around zero.

Rounding is to nearest, ties to even, of x / scale in float32. NaN and infinity make the scale of
their token NaN or infinite, so that they show in every output of the token.
"""

import torch
from torch import Tensor

INT8_MAX = 127.0
# Below it no scale shrinks further: a token of zeros must not divide by zero.
MIN_AMAX = 1e-10


def quantise(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> int8 [M, K] and its scales: float32 [M, 1], max|x| / 127 of each token, or the
    static `scale` (one number) as it is given."""
    wide = x.float()
    if scale is None:
        amax = wide.abs().amax(-1, keepdim=True).clamp_(min=MIN_AMAX)
        # By a tensor: torch divides by a Python number on CUDA as a product with its reciprocal.
        scale = amax / torch.full((), INT8_MAX, device=x.device)
    return (wide / scale).round_().clamp_(-INT8_MAX - 1, INT8_MAX).to(torch.int8), scale


def dequantise(q: Tensor, scale: Tensor) -> Tensor:
    """float32."""
    return q.float() * scale


def product(q: Tensor, weight: Tensor, least_rows: int = 1) -> Tensor:
    """int8 [M, K] and [N, K] -> int32 [M, N], exact. least_rows: fewer are filled up with zeros."""
    num_rows = q.shape[0]
    if num_rows == 0:
        return q.new_empty(0, weight.shape[0], dtype=torch.int32)
    if num_rows < least_rows:
        q = torch.nn.functional.pad(q, (0, 0, 0, least_rows - num_rows))
    return torch._int_mm(q, weight.t())[:num_rows]


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 [N, K] and float32 [N, 1], the largest magnitude of the row / 127, or 1
    for a row of zeros. ValueError for NaN and infinity."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / INT8_MAX
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("the weight holds NaN or infinity and cannot be quantised")
    scales = scales.masked_fill(scales == 0, 1)
    return quantise(wide, scales)
