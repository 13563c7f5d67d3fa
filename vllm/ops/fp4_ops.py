"""Quantising activations to NVFP4 with the native CUDA kernels, as torch custom ops.

CPU tensors are computed by the torch references in `vllm.ops.nvfp4`, which the kernels equal bit
for bit (those with SiLU up to the chip's exponential). Formulas:
csrc/quantization/fp4/nvfp4_quant.h.
"""

from typing import Any

import torch
from torch import Tensor

from vllm.ops.nvfp4 import (
    GROUP,
    TILE_COLUMNS,
    TILE_ROWS,
    max_grouped_scale_rows,
    nvfp4_quantize,
    nvfp4_quantize_grouped,
)
from vllm.ops.torch_library import register
from vllm.ops.torch_ops import silu_and_mul
from vllm.utils.fp8 import FP8
from vllm.utils.math_utils import round_up


def _quant(x: Tensor, global_scale: Tensor, q: Tensor, scales: Tensor, is_swizzled: bool) -> None:
    codes, found = nvfp4_quantize(x, global_scale, is_swizzled)
    q.copy_(codes)
    scales.copy_(found)


def _silu_quant(x: Tensor, *others: Any) -> None:
    _quant(silu_and_mul(x), *others)


def _quant_grouped(
    x: Tensor,
    global_scales: Tensor,
    offsets: Tensor,
    pairs: Tensor | None,
    top_k: int,
    q: Tensor,
    scales: Tensor,
) -> None:
    rows = x if pairs is None else x[pairs[: offsets[-1]] // top_k]
    codes, found = nvfp4_quantize_grouped(rows, global_scales, offsets)
    q[: codes.shape[0]].copy_(codes)
    scales[: found.shape[0]].copy_(found)


def _silu_quant_grouped(
    x: Tensor, global_scales: Tensor, offsets: Tensor, q: Tensor, scales: Tensor
) -> None:
    _quant_grouped(silu_and_mul(x), global_scales, offsets, None, 1, q, scales)


_RESULTS = "Tensor(a!) q, Tensor(b!) scales"
_PLAIN = f"(Tensor x, Tensor global_scale, {_RESULTS}, bool is_swizzled) -> ()"
_GROUPED = "(Tensor x, Tensor global_scales, Tensor expert_offsets"
_nvfp4_quant = register(f"nvfp4_quant{_PLAIN}", _quant)
_silu_and_mul_nvfp4_quant = register(f"silu_and_mul_nvfp4_quant{_PLAIN}", _silu_quant)
_nvfp4_quant_grouped = register(
    f"nvfp4_quant_grouped{_GROUPED}, Tensor? pairs, int top_k, {_RESULTS}) -> ()", _quant_grouped
)
_silu_and_mul_nvfp4_quant_grouped = register(
    f"silu_and_mul_nvfp4_quant_grouped{_GROUPED}, {_RESULTS}) -> ()", _silu_quant_grouped
)


def scaled_fp4_quant(
    input: Tensor, input_global_scale: Tensor, is_sf_swizzled_layout: bool = True
) -> tuple[Tensor, Tensor]:
    """Quantises input [M, K] (bfloat16 or float16; K a multiple of 16) to NVFP4.

    input_global_scale: float32, one element: 448 * 6 / max|input| or less. Returns codes uint8
    [M, K / 2], the even column in the low nibble, and scales float8_e4m3fn of groups of 16 columns:
    [M, K / 16], or for tensor-core GEMMs [M up to 128s, K / 16 up to 4s] in tiles of 128 x 4 whose
    filling is zeros (`vllm.ops.nvfp4`). input ~ code * scale / input_global_scale.
    """
    q, scales = _results(input, 1, is_sf_swizzled_layout)
    global_scale = input_global_scale.reshape(1)
    _nvfp4_quant(input, global_scale, q, scales, is_sf_swizzled_layout)
    return q, scales


def silu_and_mul_scaled_fp4_quant(
    input: Tensor, input_global_scale: Tensor, is_sf_swizzled_layout: bool = True
) -> tuple[Tensor, Tensor]:
    """input [M, 2 K] -> scaled_fp4_quant of silu(input[:, :K]) * input[:, K:], rounded to its type
    before."""
    q, scales = _results(input, 2, is_sf_swizzled_layout)
    global_scale = input_global_scale.reshape(1)
    _silu_and_mul_nvfp4_quant(input, global_scale, q, scales, is_sf_swizzled_layout)
    return q, scales


def scaled_fp4_quant_grouped(
    input: Tensor,
    input_global_scales: Tensor,
    expert_offsets: Tensor,
    pairs: Tensor | None = None,
    top_k: int = 1,
) -> tuple[Tensor, Tensor]:
    """scaled_fp4_quant of rows [M, K] that are sorted by expert, each with its own global scale.

    input_global_scales: float32 [E]; expert_offsets: int32 [E + 1], ascending from 0 to M at most.
    pairs: int32 [M], of row r of the result the row of input times top_k, or that and some rest: a
    token's row is quantised for each of its experts; without them, row r. Scales are swizzled, each
    expert's rows padded to 128; rows past the last expert's are undefined, and so may pairs be.
    """
    num_rows = None if pairs is None else pairs.shape[0]
    q, scales = _results(input, 1, True, input_global_scales.shape[0], num_rows)
    _nvfp4_quant_grouped(input, input_global_scales, expert_offsets, pairs, top_k, q, scales)
    return q, scales


def silu_and_mul_scaled_fp4_quant_grouped(
    input: Tensor, input_global_scales: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """input [M, 2 K] -> scaled_fp4_quant_grouped of silu(input[:, :K]) * input[:, K:]."""
    q, scales = _results(input, 2, True, num_experts=input_global_scales.shape[0])
    _silu_and_mul_nvfp4_quant_grouped(input, input_global_scales, expert_offsets, q, scales)
    return q, scales


def _results(
    input: Tensor, halves: int, is_swizzled: bool, num_experts: int = 0, num_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Empty codes and scales for rows of `halves` * K columns; num_experts 0: one matrix. num_rows:
    None for those of input."""
    if input.dim() != 2 or input.shape[1] % (halves * GROUP):
        raise ValueError(
            f"input: given shape {tuple(input.shape)}; accepted: [M, K] with K a multiple of "
            f"{halves * GROUP}"
        )
    rows = input.shape[0] if num_rows is None else num_rows
    num_columns = input.shape[1] // halves
    groups = num_columns // GROUP
    q = input.new_empty(rows, num_columns // 2, dtype=torch.uint8)
    if is_swizzled:
        groups = round_up(groups, TILE_COLUMNS)
        rows = (
            max_grouped_scale_rows(rows, num_experts) if num_experts else round_up(rows, TILE_ROWS)
        )
    return q, input.new_empty(rows, groups, dtype=FP8)
