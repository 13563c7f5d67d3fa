"""Quantising activations with the native CUDA kernels, as torch custom ops.

Every kernel is an op `torch.ops.vllm.<name>` that fills tensors it is given, and says so in its
schema; the functions below allocate the results. On a GPU nothing waits for the device, and all of
it can be captured in a CUDA graph. CPU tensors are computed by the torch references in `fp8_utils`
and `nvfp4_utils`, which the kernels equal bit for bit (those with RMSNorm up to the order of its
sum, those with SiLU up to the chip's exponential). Importing this module needs neither CUDA nor
the native library.
"""

from enum import Enum

import torch
from torch import Tensor

from vllm.kernels.backends import cutlass, scaled_mm
from vllm.machine import Device, DeviceCapability
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    FP8,
    MIN_AMAX,
    fp8_scales,
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
    round_to_fp8,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.ops import torch_ops
from vllm.ops.fp4_ops import (
    scaled_fp4_quant,
    scaled_fp4_quant_grouped,
    silu_and_mul_scaled_fp4_quant,
    silu_and_mul_scaled_fp4_quant_grouped,
)
from vllm.ops.gemm_ops import cutlass_scaled_fp4_mm, cutlass_scaled_mm
from vllm.ops.torch_library import register
from vllm.platforms import native
from vllm.utils.math_utils import cdiv, round_up

__all__ = [
    "ScaleLayout",
    "cutlass_scaled_fp4_mm",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "per_token_group_fp8_quant",
    "rms_norm_group_quant",
    "scaled_fp4_quant",
    "scaled_fp4_quant_grouped",
    "scaled_fp8_quant",
    "silu_and_mul_group_quant",
    "silu_and_mul_scaled_fp4_quant",
    "silu_and_mul_scaled_fp4_quant_grouped",
]

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
    if scales.dtype == torch.int32:
        values, found = per_token_group_quant_fp8_packed_for_deepgemm(x, group_size, min_amax)
    else:
        values, found = per_token_group_quant_fp8(x, group_size, min_amax, use_ue8m0=is_ue8m0)
    q.copy_(values)
    scales[: x.shape[0]] = found
    scales[x.shape[0] :] = 0


def _silu_and_mul_quant_group(
    x: Tensor, q: Tensor, scales: Tensor, group_size: int, min_amax: float, is_ue8m0: bool
) -> None:
    _quant_group(torch_ops.silu_and_mul(x), q, scales, group_size, min_amax, is_ue8m0)


def _rms_norm_quant_group(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor | None,
    q: Tensor,
    scales: Tensor,
    group_size: int,
    min_amax: float,
    is_ue8m0: bool,
) -> None:
    if residual is not None:
        residual += x
        x = residual
    y = torch_ops.rms_norm(x, weight, eps, normed)
    _quant_group(y, q, scales, group_size, min_amax, is_ue8m0)


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


def per_token_group_fp8_quant(
    x: Tensor,
    group_size: int = 128,
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
    q, scales, is_ue8m0 = empty_groups(x, *_matrix_shape(x), group_size, layout, use_ue8m0)
    _fp8_quant_group(x, q, scales, group_size, eps, is_ue8m0)
    return q, scales[: x.shape[0]]


def silu_and_mul_group_quant(
    x: Tensor,
    group_size: int = 128,
    eps: float = MIN_AMAX,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [M, 2 K] -> per_token_group_fp8_quant of silu(x[:, :K]) * x[:, K:] rounded to x's dtype."""
    num_tokens, num_columns = _matrix_shape(x)
    if num_columns % 2:
        raise ValueError(f"input: given {num_columns} columns; accepted: an even number (2 K)")
    q, scales, is_ue8m0 = empty_groups(
        x, num_tokens, num_columns // 2, group_size, layout, use_ue8m0
    )
    _silu_and_mul_fp8_quant_group(x, q, scales, group_size, eps, is_ue8m0)
    return q, scales[:num_tokens]


def rms_norm_group_quant(
    x: Tensor,
    weight: Tensor,
    rms_eps: float,
    residual: Tensor | None = None,
    group_size: int = 128,
    eps: float = MIN_AMAX,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    use_ue8m0: bool = False,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> per_token_group_fp8_quant of x / sqrt(mean(x^2) + rms_eps) * weight, K <= 32768.

    weight: float32 [K]. residual [M, K] of x's dtype becomes residual + x in place, and its norm
    is quantised instead; x is left as it is. normed [M, K] of x's dtype, contiguous, receives what
    is quantised.
    """
    q, scales, is_ue8m0 = empty_groups(x, *_matrix_shape(x), group_size, layout, use_ue8m0)
    _rms_norm_fp8_quant_group(
        x, residual, weight, rms_eps, normed, q, scales, group_size, eps, is_ue8m0
    )
    return q, scales[: x.shape[0]]


def empty_groups(
    x: Tensor, num_tokens: int, num_columns: int, group_size: int, layout: ScaleLayout, ue8m0: bool
) -> tuple[Tensor, Tensor, bool]:
    """Empty q, empty scales with the rows that fill their columns, and whether they are UE8M0, of
    x's device."""
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


# ---------------------------------------------------------------- what this build can multiply


def cutlass_scaled_mm_supports_fp8(cuda_device_capability: int) -> bool:
    """Whether `cutlass_scaled_mm` takes scales per tensor and channel on a chip, such as 90: by
    torch's GEMM, whatever this build holds."""
    device = Device("cuda", DeviceCapability.parse(cuda_device_capability))
    return any({device.family, device.arch} & spec.devices for spec in scaled_mm.SPECS)


def cutlass_scaled_mm_supports_block_fp8(cuda_device_capability: int) -> bool:
    """Whether this build has the 128x128-block FP8 GEMM for a chip, such as 90."""
    return _is_built_for("fp8-block", cuda_device_capability)


def cutlass_scaled_mm_supports_fp4(cuda_device_capability: int) -> bool:
    """Whether this build has the NVFP4 GEMM for a chip, such as 100."""
    return _is_built_for("nvfp4", cuda_device_capability)


def _is_built_for(weight_format: str, capability: int) -> bool:
    """Whether one of the native kernels of the CUTLASS backend for this format serves the chip."""
    try:
        built = native.gpu_archs()
    except native.NativeLibraryError:
        return False
    device = Device("cuda", DeviceCapability.parse(capability))
    kernels = [
        kernel
        for spec in cutlass.SPECS
        if spec.family == "linear" and weight_format in spec.formats
        for kernel in spec.native
    ]
    archs = [arch for kernel in kernels for arch in built.get(kernel, ())]
    return any(device.runs(arch) for arch in archs if arch[0].isdigit())
