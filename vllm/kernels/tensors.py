"""What passes between layers and backends: the tensors of a weight, the shape of a kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from vllm.kernels.problem import WeightFormat
from vllm.utils.math_utils import cdiv

LinearKernel: TypeAlias = Callable[[Tensor], Tensor]
"""x [M, K] -> y [M, N] of the same dtype; owns its weight in the layout it likes."""


@dataclass(slots=True)
class LinearTensors:
    """One linear layer as loaded, before a backend lays it out.

    weight: [N, K] in its stored dtype. scales: float32 [scale rows, K blocks] or None; a merged
    layer (QKV, gate-up) keeps the scale rows of each shard, so partial edge blocks stay right:
    shards of 576, 192 and 192 rows have 5 + 2 + 2 scale rows of 128, not ceil(960 / 128).
    shard_rows: rows of weight per shard. bias: float32 [N] or None. input_scale: float32 scalar
    of a static activation scheme or None.
    """

    format: WeightFormat
    weight: Tensor
    shard_rows: tuple[int, ...]
    scales: Tensor | None = None
    bias: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def block_k(self) -> int:
        """Columns of the weight that share one scale."""
        return self.format.block[1] if self.format.scale == "block" else self.weight.shape[1]

    def row_scales(self) -> Tensor | None:
        """Scales repeated to one row per row of weight: float32 [N, K blocks]. Exact."""
        if self.scales is None:
            return None
        rows = []
        start = 0
        for num_rows in self.shard_rows:
            per_scale = rows_per_scale(self.format, num_rows)
            stop = start + cdiv(num_rows, per_scale)
            rows.append(self.scales[start:stop].repeat_interleave(per_scale, 0)[:num_rows])
            start = stop
        return torch.cat(rows)


def rows_per_scale(weight_format: WeightFormat, shard_rows: int) -> int:
    """Rows of a shard that share one scale."""
    return {"tensor": shard_rows, "channel": 1, "block": weight_format.block[0]}[
        weight_format.scale
    ]


def scale_shape(
    weight_format: WeightFormat, shard_rows: tuple[int, ...], num_columns: int
) -> tuple[int, int]:
    """Shape of `LinearTensors.scales` for these shards."""
    rows = sum(cdiv(n, rows_per_scale(weight_format, n)) for n in shard_rows)
    block_k = weight_format.block[1] if weight_format.scale == "block" else num_columns
    return rows, cdiv(num_columns, block_k)
