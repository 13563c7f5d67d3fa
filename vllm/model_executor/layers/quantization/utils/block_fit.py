"""Carries out what `vllm.kernels.fit` plans for scale blocks that shards or merging cut. Exactly.

A shard is rows [start, stop) and columns [start, stop) of a whole weight [..., N, K], experts
before. Its scales are given as the whole weight's grid [..., ceil(N / rows), ceil(K / columns)].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.kernels.fit import Fit
from vllm.kernels.problem import WeightFormat
from vllm.kernels.tensors import LinearKernel, LinearTensors
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


def refine_scales(
    scales: Tensor, block: Sequence[int], fine: Sequence[int], rows: Span, columns: Span
) -> Tensor:
    """Scales of one shard in blocks of `fine`, which divides `block` and where the shard starts.

    Every fine block lies inside one coarse block, whose scale it repeats. Only the shard's last
    row or column of blocks may be partial.
    """
    places = []
    for span, coarse, step in zip((rows, columns), block, fine):
        assert coarse % step == 0 and span[0] % step == 0, (span, coarse, step)
        places.append(torch.arange(*span, step, device=scales.device) // coarse)
    return scales[..., places[0], :][..., places[1]]


def pad_weight(
    weight: Tensor,
    scales: Tensor,
    block: Sequence[int],
    rows: Span,
    columns: Span,
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


def refined_tensors(tensors: LinearTensors, fine: tuple[int, int]) -> LinearTensors:
    """A layer that holds all rows of each merged part, with its scales in blocks of `fine`.

    Where `fine` divides all parts but the last, the scale rows of all parts form one plain grid.
    """
    columns = (0, tensors.weight.shape[-1])
    parts = [
        refine_scales(scales, tensors.format.block, fine, (0, num_rows), columns)
        for num_rows, scales in _scales_of_parts(tensors)
    ]
    return LinearTensors(
        WeightFormat(tensors.format.element, "block", fine),
        tensors.weight,
        tensors.shard_rows,
        torch.cat(parts, -2),
        tensors.bias,
        tensors.input_scale,
    )


def padded_tensors(tensors: LinearTensors) -> tuple[LinearTensors, Tensor]:
    """A layer that holds all rows of each merged part, with each part padded to whole blocks.

    Columns are padded too: inputs must be. Returns also int64 [N]: which columns of the padded
    output are the layer's. The bias stays [N], for those.
    """
    block, columns = tensors.format.block, (0, tensors.weight.shape[-1])
    padded, kept = [], []
    start = padded_start = 0
    for num_rows, scales in _scales_of_parts(tensors):
        part = tensors.weight[..., start : start + num_rows, :]
        padded.append(pad_weight(part, scales, block, (0, num_rows), columns))
        kept.append(torch.arange(padded_start, padded_start + num_rows, device=part.device))
        start += num_rows
        padded_start += padded[-1].weight.shape[-2]
    result = LinearTensors(
        tensors.format,
        torch.cat([part.weight for part in padded], -2),
        tuple(part.weight.shape[-2] for part in padded),
        torch.cat([part.scales for part in padded], -2),
        tensors.bias,
        tensors.input_scale,
    )
    return result, torch.cat(kept)


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
    num_zeros = padded.weight.shape[1] - tensors.weight.shape[1]

    def apply(x: Tensor) -> Tensor:
        out = kernel(pad(x, (0, num_zeros)) if num_zeros else x).index_select(1, kept)
        return out if bias is None else out.add_(bias)

    return apply


def _scales_of_parts(tensors: LinearTensors) -> list[tuple[int, Tensor]]:
    """(rows, scale grid) of each merged part."""
    assert tensors.scales is not None and tensors.format.scale == "block"
    counts = [cdiv(num_rows, tensors.format.block[0]) for num_rows in tensors.shard_rows]
    return list(zip(tensors.shard_rows, tensors.scales.split(counts, -2)))
