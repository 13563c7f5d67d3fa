"""Quantising activations to FP8 with the native CUDA kernels, as torch custom ops.

Every kernel is an op `torch.ops.vllm.<name>` that fills tensors it is given, and says so in its
schema; the functions below allocate the results. On a GPU nothing waits for the device, and all of
it can be captured in a CUDA graph. CPU tensors are computed by the torch references in
`vllm.ops.fp8`, which the kernels equal bit for bit (those with RMSNorm up to the order of its sum,
those with SiLU up to the chip's exponential). Importing this module needs neither CUDA nor the
native library.
"""

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from vllm.ops import torch_ops
from vllm.ops.fp8 import quantise_groups
from vllm.ops.torch_library import register
from vllm.utils.deep_gemm import (
    get_col_major_tma_aligned_tensor,
    is_deep_gemm_e8m0_used,
    pack_exponents,
)
from vllm.utils.fp8 import FP8, MIN_AMAX, GroupShape, fp8_scales, round_to_fp8
from vllm.utils.math_utils import cdiv, round_up

GROUP_SIZE = 128


# ---------------------------------------------------------------- what the ops do on a CPU


def _quant_static(x: Tensor, scale: Tensor, q: Tensor) -> None:
    q.copy_(round_to_fp8(x, scale))


def _quant_tensor(x: Tensor, q: Tensor, scale: Tensor, min_amax: float) -> None:
    amax = x.float().abs().amax() if x.numel() else torch.zeros(())
    scale.copy_(fp8_scales(amax.clamp(min=min_amax)))
    _quant_static(x, scale, q)


def _quant_token(
    x: Tensor, q: Tensor, scales: Tensor, min_amax: float, max_amax: Tensor | None
) -> None:
    amax = x.float().abs().amax(-1)
    if max_amax is not None:
        amax = torch.where(amax > max_amax, max_amax, amax)
    scales.copy_(fp8_scales(amax.clamp(min=min_amax)))
    _quant_static(x, scales.unsqueeze(-1), q)


def _quant_group(
    x: Tensor, q: Tensor, scales: Tensor, group_size: int, min_amax: float, is_ue8m0: bool
) -> None:
    is_packed = scales.dtype == torch.int32
    values, found = quantise_groups(x, group_size, min_amax, use_ue8m0=is_ue8m0 or is_packed)
    if is_packed:
        found = pack_exponents(found)
    q.copy_(values)
    scales[: x.shape[0]] = found
    scales[x.shape[0] :] = 0


def _silu_and_mul_quant_group(x: Tensor, *group: Any) -> None:
    _quant_group(torch_ops.silu_and_mul(x), *group)


def _rms_norm_quant_group(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor | None,
    *group: Any,
) -> None:
    if residual is not None:
        residual += x
        x = residual
    _quant_group(torch_ops.rms_norm(x, weight, eps, normed), *group)


# ---------------------------------------------------------------- registration

# On CUDA the native function of the same name takes the arguments.
_GROUP = "Tensor(a!) q, Tensor(b!) scales, int group_size, float min_amax, bool is_ue8m0"
_fp8_quant_static = register(
    "fp8_quant_static(Tensor x, Tensor scale, Tensor(a!) q) -> ()", _quant_static
)
_fp8_quant_tensor = register(
    "fp8_quant_tensor(Tensor x, Tensor(a!) q, Tensor(b!) scale, float min_amax) -> ()",
    _quant_tensor,
)
_fp8_quant_token = register(
    "fp8_quant_token(Tensor x, Tensor(a!) q, Tensor(b!) scales, float min_amax, "
    "Tensor? max_amax) -> ()",
    _quant_token,
)
_fp8_quant_group = register(f"fp8_quant_group(Tensor x, {_GROUP}) -> ()", _quant_group)
_silu_and_mul_fp8_quant_group = register(
    f"silu_and_mul_fp8_quant_group(Tensor x, {_GROUP}) -> ()", _silu_and_mul_quant_group
)
_rms_norm_fp8_quant_group = register(
    "rms_norm_fp8_quant_group(Tensor x, Tensor(c!)? residual, Tensor weight, float eps, "
    f"Tensor(d!)? normed, {_GROUP}) -> ()",
    _rms_norm_quant_group,
)


# ---------------------------------------------------------------- FP8 by one scale or per token


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises input [M, K] (float32, bfloat16 or float16) -> (q float8_e4m3fn [M, K], scales).

    scale given: one element for the tensor, returned as it is; or, computed by torch and not by a
    kernel, one per block of group_shape (rows, columns; -1 for all), [ceil(M / rows),
    ceil(K / columns)] or flat; without group_shape a 2-D grid that divides the input.
    scale None: computed as max|x| / 448 per tensor ([1]), per token ([M, 1];
    use_per_token_if_dynamic or group_shape (1, -1)) or per group of n columns ([M, ceil(K / n)];
    group_shape (1, n)). Per tensor reads the input twice.
    scale_ub: float32, one element: the largest max|x| of a token that its scale follows.
    num_token_padding: q gets at least so many rows, zeros after the M-th. output: q to fill.
    ValueError for other combinations.
    """
    num_tokens, num_columns = _matrix_shape(input)
    q = _empty_q(input, num_tokens, num_columns, num_token_padding, output)
    body = q[:num_tokens]
    q[num_tokens:] = 0
    if scale is not None:
        if use_per_token_if_dynamic or scale_ub is not None:
            raise ValueError(
                "use_per_token_if_dynamic and scale_ub are for computed scales: leave scale out"
            )
        if scale.numel() == 1:
            _fp8_quant_static(input, scale.reshape(1), body)
        else:
            body.copy_(round_to_fp8(input, _spread(scale, num_tokens, num_columns, group_shape)))
        return q, scale
    shape = _dynamic_shape(use_per_token_if_dynamic, group_shape)
    if scale_ub is not None and shape != GroupShape.PER_TOKEN:
        raise ValueError("scale_ub is for scales per token: pass use_per_token_if_dynamic=True")
    if shape == GroupShape.PER_TENSOR:
        scales = input.new_empty(1, dtype=torch.float32)
        _fp8_quant_tensor(input, body, scales, MIN_AMAX)
    elif shape == GroupShape.PER_TOKEN:
        scales = input.new_empty(num_tokens, 1, dtype=torch.float32)
        bound = None if scale_ub is None else scale_ub.reshape(1)
        _fp8_quant_token(input, body, scales.view(-1), MIN_AMAX, bound)
    else:
        scales = input.new_empty(num_tokens, cdiv(num_columns, shape.col), dtype=torch.float32)
        _fp8_quant_group(input, body, scales, shape.col, MIN_AMAX, False)
    return q, scales


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    if x.ndim != 2:
        raise ValueError(f"input: given shape {list(x.shape)}; accepted: [tokens, columns]")
    return x.shape[0], x.shape[1]


def _empty_q(
    x: Tensor, num_tokens: int, num_columns: int, padding: int | None, output: Tensor | None
) -> Tensor:
    if output is None:
        return x.new_empty(max(num_tokens, padding or 0), num_columns, dtype=FP8)
    if padding is not None:
        raise ValueError("num_token_padding and output: give one of them, q has the rows of output")
    if output.shape != (num_tokens, num_columns) or output.dtype != FP8:
        raise ValueError(
            f"output: given {output.dtype} of shape {list(output.shape)}; accepted: {FP8} of "
            f"shape {[num_tokens, num_columns]}"
        )
    return output


def _dynamic_shape(is_per_token: bool, group_shape: tuple[int, int] | None) -> GroupShape:
    default = GroupShape.PER_TOKEN if is_per_token else GroupShape.PER_TENSOR
    shape = default if group_shape is None else GroupShape(*group_shape)
    is_group = shape.row == 1 and shape.col > 0
    if not is_group and shape not in (GroupShape.PER_TENSOR, GroupShape.PER_TOKEN):
        raise ValueError(
            f"group_shape: given {tuple(shape)} without a scale; "
            f"accepted: (-1, -1), (1, -1), (1, n)"
        )
    if is_per_token and shape != GroupShape.PER_TOKEN:
        raise ValueError(f"use_per_token_if_dynamic contradicts group_shape {tuple(shape)}")
    return shape


def _spread(
    scale: Tensor, num_tokens: int, num_columns: int, group_shape: tuple[int, int] | None
) -> Tensor:
    """The scale of every element, from one per block."""
    sizes = (num_tokens, num_columns)
    if group_shape is None:
        is_grid = scale.ndim == 2 and all(
            count and size % count == 0 for size, count in zip(sizes, scale.shape)
        )
        if not is_grid:
            raise ValueError(
                f"scale: given shape {list(scale.shape)} for an input of {list(sizes)}; accepted: "
                f"one element, a grid that divides the input, or any with group_shape"
            )
        block = [size // count for size, count in zip(sizes, scale.shape)]
    else:
        block = [size if part == -1 else part for size, part in zip(sizes, group_shape)]
    grid = [cdiv(size, part) for size, part in zip(sizes, block)]
    if scale.numel() != grid[0] * grid[1]:
        raise ValueError(
            f"scale: given {scale.numel()} elements; accepted: {grid}, one per block of {block}"
        )
    rows = scale.reshape(grid).repeat_interleave(block[0], 0)[:num_tokens]
    return rows.repeat_interleave(block[1], 1)[:, :num_columns]


# ---------------------------------------------------------------- FP8 per token and group


class ScaleLayout(Enum):
    """How scales [M, groups] of token groups lie in memory."""

    ROW_MAJOR = "row-major"
    COLUMN_MAJOR = "column-major"
    """Stride 1 along M."""
    TMA_ALIGNED = "tma-aligned"
    """Column-major with M padded to 16 bytes by zeros, as DeepGEMM takes it on Hopper."""
    PACKED_UE8M0 = "packed-ue8m0"
    """int32 [M, ceil(groups / 4)] of exponent bytes, the lowest first; else as TMA_ALIGNED."""

    @classmethod
    def of(cls, is_column_major: bool, is_tma_aligned: bool) -> "ScaleLayout":
        if is_tma_aligned:
            return cls.TMA_ALIGNED
        return cls.COLUMN_MAJOR if is_column_major else cls.ROW_MAJOR


def laid_out(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """float32 scales [..., M, groups] in a layout of float32."""
    if layout is ScaleLayout.TMA_ALIGNED:
        return get_col_major_tma_aligned_tensor(scales)
    return scales.mT.contiguous().mT if layout is ScaleLayout.COLUMN_MAJOR else scales


def per_token_group_fp8_quant(
    x: Tensor,
    group_size: int = GROUP_SIZE,
    eps: float = MIN_AMAX,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (q float8_e4m3fn [M, K], scales per group of columns; the last may be partial).

    scale = max(max|group|, eps) / 448, eps at least 1e-30; use_ue8m0 rounds it up to a power of
    two, which PACKED_UE8M0 implies. group_size: on a GPU a power of two from 16 to 512, 128 where
    packed. K that is no multiple of 16, and rows or data that are not aligned to 16 bytes, run on
    a slower path.
    """
    q, scales, is_ue8m0 = empty_groups(x, _matrix_shape(x)[1], layout, use_ue8m0, group_size)
    _fp8_quant_group(x, q, scales, group_size, eps, is_ue8m0)
    return q, scales[: x.shape[0]]


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = MIN_AMAX,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """per_token_group_fp8_quant of x [..., M, K], with the layout by flags.

    Returns q [..., M, K] (`out_q` where given) and scales float32 [..., M, ceil(K / group_size)].
    column_major_scales: stride[-2] == 1. tma_aligned_scales: column-major too, with stride[-1] ==
    get_tma_aligned_size(M, 4). use_ue8m0: None asks what DeepGEMM wants on this chip. Other types
    than E4M3, and x of other than two dimensions, are computed by torch.
    """
    if out_q is not None and out_q.shape != x.shape:
        raise ValueError(f"out_q is {tuple(out_q.shape)}, but x is {tuple(x.shape)}")
    use_ue8m0 = is_deep_gemm_e8m0_used() if use_ue8m0 is None else use_ue8m0
    dtype = dtype or (FP8 if out_q is None else out_q.dtype)
    layout = ScaleLayout.of(column_major_scales, tma_aligned_scales)
    if x.ndim == 2 and dtype == FP8:
        q, scales = per_token_group_fp8_quant(x, group_size, eps, layout, use_ue8m0)
    else:
        q, scales = quantise_groups(x, group_size, eps, dtype, use_ue8m0)
        scales = laid_out(scales, layout)
    return q if out_q is None else out_q.copy_(q), scales


def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Tensor, group_size: int, eps: float = MIN_AMAX, use_ue8m0: bool | None = None
) -> tuple[Tensor, Tensor]:
    """per_token_group_fp8_quant of x [M, K] with ScaleLayout.PACKED_UE8M0."""
    if use_ue8m0 is False:
        raise ValueError("packed scales are exponent bytes: use_ue8m0=False has none; leave it out")
    return per_token_group_fp8_quant(x, group_size, eps, ScaleLayout.PACKED_UE8M0)


def silu_and_mul_group_quant(
    x: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """x [M, 2 K] -> per_token_group_fp8_quant of silu(x[:, :K]) * x[:, K:] rounded to x's dtype."""
    num_tokens, num_columns = _matrix_shape(x)
    if num_columns % 2:
        raise ValueError(f"input: given {num_columns} columns; accepted: an even number (2 K)")
    q, scales, is_ue8m0 = empty_groups(x, num_columns // 2, layout, use_ue8m0)
    _silu_and_mul_fp8_quant_group(x, q, scales, GROUP_SIZE, MIN_AMAX, is_ue8m0)
    return q, scales[:num_tokens]


def rms_norm_group_quant(
    x: Tensor,
    weight: Tensor,
    rms_eps: float,
    residual: Tensor | None = None,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    use_ue8m0: bool = False,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> per_token_group_fp8_quant of x / sqrt(mean(x^2) + rms_eps) * weight, K <= 32768.

    weight: float32 [K]. residual [M, K] of x's dtype becomes residual + x in place, and its norm
    is quantised instead; x is left as it is. normed [M, K] of x's dtype, contiguous, receives what
    is quantised.
    """
    q, scales, is_ue8m0 = empty_groups(x, _matrix_shape(x)[1], layout, use_ue8m0)
    results = normed, q, scales, GROUP_SIZE, MIN_AMAX, is_ue8m0
    _rms_norm_fp8_quant_group(x, residual, weight, rms_eps, *results)
    return q, scales[: x.shape[0]]


def empty_groups(
    x: Tensor, num_columns: int, layout: ScaleLayout, ue8m0: bool, group_size: int = GROUP_SIZE
) -> tuple[Tensor, Tensor, bool]:
    """For the rows of x: empty q, empty scales with the rows that fill their columns, and whether
    they are UE8M0."""
    num_tokens = x.shape[0]
    is_packed = layout is ScaleLayout.PACKED_UE8M0
    num_groups = cdiv(num_columns, group_size)
    width = cdiv(num_groups, 4) if is_packed else num_groups
    is_padded = is_packed or layout is ScaleLayout.TMA_ALIGNED
    rows = round_up(num_tokens, 4) if is_padded else num_tokens  # 4 words are 16 bytes
    dtype = torch.int32 if is_packed else torch.float32
    if layout is ScaleLayout.ROW_MAJOR:
        scales = x.new_empty(rows, width, dtype=dtype)
    else:
        scales = x.new_empty(width, rows, dtype=dtype).t()
    q = x.new_empty(num_tokens, num_columns, dtype=FP8)
    return q, scales, ue8m0 or is_packed
