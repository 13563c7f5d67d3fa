"""Carries out the plans of `formats/partial_blocks.py` for partial scale blocks, exactly.

A shard is rows [start, stop) and columns [start, stop) of a whole weight [..., N, K], experts
before. Its scales are given as the whole weight's grid [..., ceil(N / rows), ceil(K / columns)].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.formats.partial_blocks import Fit
from vllm.kernels.interface import LinearKernel, LinearTensors, MoETensors
from vllm.utils.math_utils import cdiv

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PaddedWeight:
    """weight in whole blocks with a scale each; the shard begins at [row_offset, column_offset].

    Its output is output [row_offset : row_offset + rows] of the padded product, and its input
    goes to columns [column_offset : column_offset + columns] of a padded input.
    """

    weight: Tensor
    scales: Tensor
    row_offset: int
    column_offset: int


def pad_weight(
    weight: Tensor, scales: Tensor, block: Sequence[int], rows: Span, columns: Span
) -> PaddedWeight:
    """The shard `weight` with every block it touches filled up to a whole one with zeros."""
    row_offset, num_rows, row_blocks = _whole_blocks(rows, block[0])
    column_offset, num_columns, column_blocks = _whole_blocks(columns, block[1])
    padded = weight.new_zeros(*weight.shape[:-2], num_rows, num_columns)
    place = padded.narrow(-2, row_offset, rows[1] - rows[0])
    place.narrow(-1, column_offset, columns[1] - columns[0]).copy_(weight)
    own_scales = scales[..., row_blocks, :][..., column_blocks]
    return PaddedWeight(padded, own_scales.contiguous(), row_offset, column_offset)


def _whole_blocks(span: Span, block: int) -> tuple[int, int, slice]:
    """Of the blocks that `span` touches: its offset in the first, their total size, their range."""
    start, stop = span
    first, last = start // block, cdiv(stop, block)
    return start % block, (last - first) * block, slice(first, last)


def padded_tensors(tensors: LinearTensors) -> tuple[LinearTensors, Tensor]:
    """The same layer with each merged part padded to whole blocks.

    Columns are padded too, by column_offset of them before the layer's own: inputs must be.
    Returns also int64 [N]: which columns of the padded output are the layer's. The bias stays [N],
    for those.
    """
    assert tensors.scales is not None and tensors.format.scale == "block"
    block, sizes = tensors.format.block, tensors.shard_rows
    columns = tensors.column_offset, tensors.column_offset + tensors.weight.shape[-1]
    # Rows of each merged part, counted from its first block on.
    spans = [(first, first + size) for first, size in zip(tensors.offsets_of_shards(), sizes)]
    grids = tensors.scales.split([cdiv(stop, block[0]) for _, stop in spans], -2)
    padded, kept, start = [], [], 0
    for rows, weight, scales in zip(spans, tensors.weight.split(sizes, -2), grids):
        padded.append(pad_weight(weight, scales, block, rows, columns))
        kept.append(torch.arange(start + rows[0], start + rows[1], device=weight.device))
        start += padded[-1].weight.shape[-2]
    result = replace(
        tensors,
        weight=torch.cat([part.weight for part in padded], -2),
        shard_rows=tuple(part.weight.shape[-2] for part in padded),
        scales=torch.cat([part.scales for part in padded], -2),
        row_offsets=(),
        column_offset=0,
    )
    return result, torch.cat(kept)


def padded_experts(tensors: MoETensors) -> MoETensors:
    """The same experts with zeros around their intermediate rows and columns, up to the borders of
    the blocks that they touch: rows of zeros give zeros, which meet columns of zeros."""
    assert tensors.gate_up_scales is not None and tensors.down_scales is not None
    rows, columns = tensors.format.block
    before = tensors.column_offset
    after = tensors.down_scales.shape[-1] * columns - before - tensors.inner
    parts = tensors.gate_up.view(torch.uint8).split(tensors.first_parts, 1)
    gate_up = torch.cat([pad(part, (0, 0, before, after)) for part in parts], 1)
    down = pad(tensors.down.view(torch.uint8), (before, after))
    assert tensors.row_offset == before
    assert gate_up.shape[1] == tensors.gate_up_scales.shape[1] * rows
    dtype = tensors.down.dtype
    return replace(
        tensors, gate_up=gate_up.view(dtype), down=down.view(dtype), row_offset=0, column_offset=0
    )


def fitted_kernel(
    tensors: LinearTensors, fit: Fit | None, make: Callable[[LinearTensors], LinearKernel]
) -> LinearKernel:
    """The kernel that `make` builds over a weight, or over one padded to whole blocks.

    Padded, inputs get columns of zeros, and of the output the layer's own columns are kept.
    """
    if fit is None:
        return make(tensors)
    padded, kept = padded_tensors(tensors)
    bias, padded.bias = padded.bias, None
    kernel = make(padded)
    before = tensors.column_offset
    after = padded.weight.shape[1] - tensors.weight.shape[1] - before

    def apply(x: Tensor) -> Tensor:
        out = kernel(pad(x, (before, after)) if before or after else x).index_select(1, kept)
        return out if bias is None else out.add_(bias)

    return apply
