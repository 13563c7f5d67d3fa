"""Products with weights that are widened in registers, as torch custom ops (csrc/gemm/weight_only).

CPU tensors are computed by torch references: float32 sums of the numbers that the packed weights
stand for.
"""

import torch
from torch import Tensor

from vllm.ops.fp8_quant import scaled_fp8_quant
from vllm.ops.torch_library import register
from vllm.ops.weight_only_layout import PackedWeight, widen_weight


def _gemm(
    x: Tensor, x_scales: Tensor | None, codes: Tensor, scales: Tensor | None,
    row_factors: Tensor | None, bias: Tensor | None, out: Tensor, format: str,
    columns_per_scale: int, row_tiles: int, splits: int,
) -> None:  # fmt: skip
    n, k = out.shape[1], x.shape[1]
    packed = PackedWeight(format, n, k, codes, scales, row_factors, columns_per_scale)
    product = x.float() @ widen_weight(packed).T
    if x_scales is not None:
        product *= x_scales[:, None]
    out.copy_(product if bias is None else product + bias)


def _gemm_grouped(
    x: Tensor, x_scales: Tensor | None, codes: Tensor, scales: Tensor | None,
    row_factors: Tensor | None, bias: Tensor | None, blocks: Tensor, order: Tensor | None,
    out: Tensor, format: str, columns_per_scale: int, block_rows: int, top_k: int,
    has_blocks_before: bool, row_tiles: int, splits: int,
) -> None:  # fmt: skip
    for expert, first, end in blocks.T.tolist():
        if expert < 0:
            continue
        rows = slice(first, min(end, first + block_rows))
        of_x = rows if order is None else order[rows].long() // top_k
        own_scales, own_factors, own_bias, own_x_scales = (
            None if part is None else part[index]
            for part, index in (
                (scales, expert), (row_factors, expert), (bias, expert), (x_scales, of_x)
            )
        )  # fmt: skip
        _gemm(
            x[of_x], own_x_scales, codes[expert], own_scales, own_factors, own_bias, out[rows],
            format, columns_per_scale, 0, 0,
        )  # fmt: skip


def _widen(
    codes: Tensor, scales: Tensor | None, row_factors: Tensor | None, n: int, first_row: int,
    out: Tensor, format: str, columns_per_scale: int,
) -> None:  # fmt: skip
    num_rows, k = out.shape
    packed = PackedWeight(format, n, k, codes, scales, row_factors, columns_per_scale)
    out.copy_(widen_weight(packed)[first_row : first_row + num_rows])


_X = "Tensor x, Tensor? x_scales"
_WEIGHT = "Tensor codes, Tensor? scales, Tensor? row_factors"
_FORM = "str format, int columns_per_scale"
_SHAPE = "int row_tiles, int splits"
_marlin_gemm = register(
    f"marlin_gemm({_X}, {_WEIGHT}, Tensor? bias, Tensor(a!) out, {_FORM}, {_SHAPE}) -> ()", _gemm
)
_marlin_gemm_grouped = register(
    f"marlin_gemm_grouped({_X}, {_WEIGHT}, Tensor? bias, Tensor blocks, Tensor? order, "
    f"Tensor(a!) out, {_FORM}, int block_rows, int top_k, bool has_blocks_before, {_SHAPE}) -> ()",
    _gemm_grouped,
)
_marlin_widen = register(
    f"marlin_widen({_WEIGHT}, int n, int first_row, Tensor(a!) out, {_FORM}) -> ()", _widen
)


def multiply(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, row_tiles: int = 0, splits: int = 0
) -> Tensor:
    """x [M, K] (bfloat16 or float16) -> [M, N]; row_tiles, splits: 0 to have them chosen. By a
    weight of format w4a8, x is quantised per token first."""
    out = x.new_empty(x.shape[0], weight.num_rows)
    _marlin_gemm(*_operand(x, weight), *weight.parts, bias, out, *weight.form, row_tiles, splits)
    return out


def _operand(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """x as the kernel takes it for this weight, and the scales of its rows."""
    if weight.is_split:
        return torch.cat((x, x), 1), None
    if weight.format != "w4a8":
        return x, None
    q, scales = scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    return q, scales.view(-1)


def multiply_wide(x: Tensor, weight: PackedWeight, bias: Tensor | None, most_bytes: int) -> Tensor:
    """The same through torch's GEMM, but not for w4a8: rows of the weight are widened in x's type,
    as many at a time as fill `most_bytes`."""
    x, _ = _operand(x, weight)
    num_rows, num_columns = weight.num_rows, weight.num_columns
    num_parts = -(-num_rows * num_columns * x.element_size() // most_bytes)
    step = -(-num_rows // (num_parts * _PART_ROWS)) * _PART_ROWS
    wide = x.new_empty(min(step, num_rows), num_columns)
    out = x.new_empty(x.shape[0], num_rows)
    for first in range(0, num_rows, step):
        part = wide[: min(step, num_rows - first)]
        _marlin_widen(*weight.parts, num_rows, first, part, *weight.form)
        torch.mm(x, part.t(), out=out[:, first : first + len(part)])
    return out if bias is None else out.add_(bias)


def multiply_experts(
    x: Tensor, weight: PackedWeight, blocks: Tensor, block_rows: int, num_rows: int,
    order: Tensor | None = None, top_k: int = 1, bias: Tensor | None = None,
    has_blocks_before: bool = False, row_tiles: int = 0, splits: int = 0,
) -> Tensor:  # fmt: skip
    """[num_rows, N]: rows of each block (`moe_rows.Sorted`) times its expert, plus its bias,
    float32 [E, N]. Row r is of row order[r] / top_k of x; without order, of row r. Rows of no block
    are not written. has_blocks_before: two kernels that wait for what comes before them lie between
    the one that writes blocks and this one, whose weights need not wait for the last of them."""
    out = x.new_empty(num_rows, weight.num_rows)
    _marlin_gemm_grouped(
        *_operand(x, weight), *weight.parts, bias, blocks, order, out, *weight.form, block_rows,
        top_k, has_blocks_before, row_tiles, splits,
    )  # fmt: skip
    return out


_PART_ROWS = 256  # of a weight, widened together: whole tiles of torch's GEMM
