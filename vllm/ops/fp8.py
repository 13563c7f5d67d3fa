"""FP8 (E4M3) arithmetic in torch, on any device: what native kernels must equal bit for bit.

The numbers, their scales and their rounding: `vllm.utils.fp8`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.kernels.interface import LinearTensors
from vllm.machine import Device
from vllm.ops.block_fit import padded_tensors
from vllm.utils.deep_gemm import transform_sf_into_required_layout
from vllm.utils.fp8 import (
    FP8,
    MIN_AMAX,
    check_grid,
    dequantise_blocks,
    fp8_scales,
    is_power_of_two,
    per_block_cast_to_fp8,
    round_to_fp8,
)
from vllm.utils.math_utils import cdiv

_ROWS_AT_A_TIME = 2048


# ---------------------------------------------------------------- to UE8M0 scales


@dataclass(frozen=True, slots=True)
class RequantError:
    """What re-quantising a weight does to it: relative Frobenius error and greatest error."""

    relative: float
    max_abs: float

    @classmethod
    def of(cls, squares: float, norm: float, max_abs: float) -> "RequantError":
        """squares: the sum of squared errors; norm: that of the squared weight."""
        return cls((squares / norm) ** 0.5 if norm else 0.0, max_abs)

    @property
    def is_exact(self) -> bool:
        return self.max_abs == 0


def requant_weight_ue8m0_inplace(
    weight: Tensor, weight_scale: Tensor, block_size: Sequence[int] = (128, 128)
) -> None:
    """Re-quantises FP8 weight [..., N, K] in place so that every block's scale is a power of two.

    weight_scale: float32 [..., ceil(N / rows), ceil(K / columns)]. The weight is rounded to E4M3 a
    second time, which cannot be undone; where all scales are powers of two already, nothing is
    written.
    """
    check_grid(weight, weight_scale, block_size)
    _requantise(weight, weight_scale, (weight.shape[-2],), block_size)


def requantised_ue8m0(tensors: LinearTensors) -> LinearTensors:
    """The same layer, or [E, N, K] experts, with power-of-two scales, in tensors of its own.

    Each merged shard keeps its own scale rows. Where all scales are powers of two already, the
    weight needs nothing: `tensors` itself is returned.
    """
    assert tensors.scales is not None and tensors.format.scale == "block" and not tensors.is_cut
    if bool(is_power_of_two(tensors.scales).all()):
        return tensors
    weight, scales = tensors.weight.clone(), tensors.scales.clone()
    _requantise(weight, scales, tensors.shard_rows, tensors.format.block)
    return replace(tensors, weight=weight, scales=scales)


def requant_error(tensors: LinearTensors) -> RequantError:
    """The error that `requantised_ue8m0` causes, against the weight as stored (q * scale, float32).

    Where all scales are powers of two that is none, and the weight is not read.
    """
    assert tensors.format.scale == "block"
    if tensors.is_cut:  # zeros around it change no block's largest value, nor any sum
        tensors, _ = padded_tensors(tensors)
    block, all_scales = tensors.format.block, tensors.scales
    assert all_scales is not None
    represented = is_power_of_two(all_scales) | (all_scales == 0)
    if bool(represented.all()):
        return RequantError(0.0, 0.0)
    error, norm, worst = 0.0, 0.0, 0.0
    for q, scales in _pieces(tensors.weight, all_scales, tensors.shard_rows, block[0]):
        stored = dequantise_blocks(q, scales, block)
        recast = per_block_cast_to_fp8(stored, block, use_ue8m0=True)
        norm += _sum_of_squares(stored)
        difference = stored.sub_(dequantise_blocks(*recast, block))
        error += _sum_of_squares(difference)
        worst = max(worst, float(difference.abs().max()))
    return RequantError.of(error, norm, worst)


def _sum_of_squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _requantise(
    weight: Tensor, scales: Tensor, shard_rows: Sequence[int], block_size: Sequence[int]
) -> None:
    if bool(is_power_of_two(scales).all()):
        return
    for q, own_scales in _pieces(weight, scales, shard_rows, block_size[0]):
        wide = dequantise_blocks(q, own_scales, block_size)
        new_q, new_scales = per_block_cast_to_fp8(wide, block_size, use_ue8m0=True)
        q.copy_(new_q)
        own_scales.copy_(new_scales)


def _pieces(
    weight: Tensor, scales: Tensor, shard_rows: Sequence[int], block_rows: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of whole blocks of one shard of one expert, with their scales; few rows at a time,
    so that the float32 copies made of them stay small beside the weight."""
    if weight.ndim > 2:
        for expert in zip(weight, scales):
            yield from _pieces(*expert, shard_rows, block_rows)
        return
    step = max(1, _ROWS_AT_A_TIME // block_rows)
    row = scale_row = 0
    for num_rows in shard_rows:
        num_scales = cdiv(num_rows, block_rows)
        for first in range(0, num_scales, step):
            last = min(first + step, num_scales)
            rows = slice(row + first * block_rows, row + min(last * block_rows, num_rows))
            yield weight[rows], scales[scale_row + first : scale_row + last]
        row, scale_row = row + num_rows, scale_row + num_scales


def deepgemm_post_process_fp8_weight_block(
    wq: Tensor,
    ws: Tensor,
    quant_block_shape: Sequence[int],
    use_e8m0: bool,
    arch: Device | None = None,
) -> tuple[Tensor, Tensor]:
    """Lays a block-scaled weight out for DeepGEMM: [N, K] or experts [E, N, K].

    use_e8m0: re-quantises `wq` and `ws` to power-of-two scales first, in place (a second copy of
    all experts would not fit beside the first). Returns `wq` and its scales in the layout that
    DeepGEMM wants on `arch`; None for this chip.
    """
    check_grid(wq, ws, quant_block_shape)
    if use_e8m0:
        requant_weight_ue8m0_inplace(wq, ws, quant_block_shape)
    *experts, n, k = wq.shape
    num_groups = experts[0] if experts else None
    recipe = (1, *quant_block_shape)
    return wq, transform_sf_into_required_layout(ws, n, k, recipe, num_groups, arch=arch)


# ---------------------------------------------------------------- activations


def quantise_groups(
    x: Tensor,
    group_size: int,
    eps: float = MIN_AMAX,
    dtype: torch.dtype | None = None,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantises x [..., M, K] per token and group of `group_size` columns; the last may be partial.

    Returns q [..., M, K] and scales float32 [..., M, ceil(K / group_size)],
    scale = max(max|group|, eps) / 448. use_ue8m0 rounds scales up to powers of two.
    """
    dtype = dtype or FP8
    num_groups = cdiv(x.shape[-1], group_size)
    filling = num_groups * group_size - x.shape[-1]
    groups = torch.nn.functional.pad(x.float(), (0, filling)).unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(-1).clamp_(min=eps)
    scales = fp8_scales(amax, use_ue8m0, torch.finfo(dtype).max)
    q = round_to_fp8(groups, scales.unsqueeze(-1), dtype).flatten(-2)[..., : x.shape[-1]]
    return q.contiguous(), scales


# ---------------------------------------------------------------- products


def block_scaled_mm(
    A: Tensor, B: Tensor, As: Tensor, Bs: Tensor, block_size: Sequence[int]
) -> Tensor:
    """A [M, K] @ B [N, K].T of FP8 values with block scales -> float32 [M, N].

    As: float32 [M, K blocks]; Bs: float32 [N blocks, K blocks]; edge blocks may be partial. Sums
    in float32 per block of K, each scaled once.
    """
    block_rows, block_columns = block_size
    check_product(A, B, As, Bs, block_size)
    row_scales = Bs.repeat_interleave(block_rows, 0)[: B.shape[0]]
    total = A.new_zeros(A.shape[0], B.shape[0], dtype=torch.float32)
    for i in range(Bs.shape[1]):
        columns = slice(i * block_columns, (i + 1) * block_columns)
        product = A[:, columns].float() @ B[:, columns].float().T
        total += product * As[:, i : i + 1] * row_scales[:, i]
    return total


def check_product(A: Tensor, B: Tensor, As: Tensor, Bs: Tensor, block_size: Sequence[int]) -> None:
    check_grid(B, Bs, block_size)
    check_grid(A, As, (1, block_size[1]))
    if A.shape[1] != B.shape[1]:
        raise ValueError(f"A has {A.shape[1]} columns and B {B.shape[1]}: both are K")
