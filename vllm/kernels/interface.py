"""What passes between layers and backends: the tensors of a weight, the shape of a kernel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from vllm.formats.weight_format import WeightFormat
from vllm.utils.fp8 import ue8m0_decode
from vllm.utils.math_utils import cdiv

LinearKernel: TypeAlias = Callable[[Any], Tensor]
"""x [M, K] -> y [M, N] of the same dtype; owns its weight in the layout it likes. x is a Tensor, or
what the kernel's own `input_quant` made of one (vllm.kernels.activations)."""

MoEKernel: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]
"""(x [T, hidden], weights float32 [T, top_k], ids int64 [T, top_k]) -> y [T, hidden] of x's dtype:
the sum, for each token, of its experts' results times their weights. An id of -1 stands for an
expert of another rank and adds nothing. x is a Tensor, or what the kernel's own `input_quant` made
of one."""


DeltaRule: TypeAlias = Callable[..., Tensor]
"""`gated_delta_rule` of an ops module (see vllm.ops)."""
Mamba2Scan: TypeAlias = Callable[..., Tensor]
"""`mamba2_scan` of an ops module (see vllm.ops), with the limits of steps in it."""


class BatchedMoEKernel(Protocol):
    """A MoE kernel that also takes tokens in a block for each expert, quantised to E4M3 by the rank
    that sent them: neither sorted nor quantised again."""

    @property
    def scales(self) -> str:
        """The form of scales it takes (`Scales`)."""
        ...

    def from_quantized(self, q: Tensor, scales: Tensor, counts: Tensor, expected_m: int) -> Tensor:
        """What each expert computes of its rows, bfloat16 [E, M, hidden]; the router's weights are
        not in it. Rows after counts[e] hold anything.

        q: float8_e4m3fn [E, M, hidden]. scales: of groups of 128 columns, rows running fastest:
        float32 [E, M, hidden / 128], or UE8M0, four exponents in an int32 [E, M, hidden / 512].
        counts: int32 [E], of rows that are there. M: a multiple of 128. expected_m: a guess at the
        mean of counts, which decides the tiling.
        """
        ...


@dataclass(slots=True)
class LinearTensors:
    """One linear layer as loaded, before a backend lays it out.

    weight: [N, K] in its stored dtype. scales: float32 [scale rows, K blocks] or None; a merged
    layer (QKV, gate-up) keeps the scale rows of each shard, so partial edge blocks stay right:
    shards of 576, 192 and 192 rows have 5 + 2 + 2 scale rows of 128, not ceil(960 / 128).
    shard_rows: rows of weight per shard. bias: float32 [N] or None. input_scale: float32 scalar
    of a static activation scheme or None.

    Scales of MXFP8 and MXFP4 are UE8M0, uint8. Packed formats hold two codes a byte: weight uint8
    [N, K / 2], the even column in the low nibble. Which tensors a format has, with shapes and
    dtypes: its file in `vllm/formats/`. w = code * scale * global scale, or (code - zero point) *
    scale; zero_points None: 8 everywhere.

    columns: int64 [K], where the weight holds columns in another order than x: which of x's each
    is; None for x's own order. `make_linear` reorders x, so that no kernel sees it.

    A rank's part of a larger weight may begin inside a scale block: by row_offsets rows in each
    shard (() for none anywhere) and by column_offset columns. Its scales are those of all blocks
    that it touches.
    """

    format: WeightFormat
    weight: Tensor
    shard_rows: tuple[int, ...]
    scales: Tensor | None = None
    bias: Tensor | None = None
    input_scale: Tensor | None = None
    global_scales: Tensor | None = None
    zero_points: Tensor | None = None
    row_offsets: tuple[int, ...] = ()
    column_offset: int = 0
    columns: Tensor | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it begins inside a scale block."""
        return bool(self.row_offsets) or self.column_offset > 0

    @property
    def is_packed(self) -> bool:
        return self.format.is_packed

    @property
    def block_k(self) -> int:
        """Columns of the weight that share one of `row_scales`."""
        num_columns = self.weight.shape[1] * self.format.description.codes_per_byte
        block = self.format.columns_per_scale(num_columns)
        return gcd(block, self.column_offset) if self.column_offset else block

    def row_scales(self) -> Tensor | None:
        """Scales repeated to one row per row of weight: float32 [N, K blocks].

        Exact, but with global scales: the two are multiplied, and rounded once.
        """
        if self.scales is None:
            return None
        factors = self.row_global_scales()
        if factors is not None:
            return self.scales.float() * factors[:, None]
        if self.scales.dtype == torch.uint8:  # UE8M0
            return ue8m0_decode(self.scales)
        if self.is_packed:
            return self.scales
        rows = []
        start = 0
        for num_rows, offset in zip(self.shard_rows, self.offsets_of_shards()):
            per_scale = self.format.rows_per_scale(num_rows)
            stop = start + cdiv(offset + num_rows, per_scale)
            repeated = self.scales[start:stop].repeat_interleave(per_scale, 0)
            rows.append(repeated[offset : offset + num_rows])
            start = stop
        return torch.cat(rows)[:, self._columns_of_scales()]

    def row_global_scales(self) -> Tensor | None:
        """Global scales repeated to one for each row of weight, float32 [N]; None without them."""
        if self.global_scales is None:
            return None
        shards = zip(self.global_scales, self.shard_rows, strict=True)
        return torch.cat([scale.expand(num_rows) for scale, num_rows in shards])

    def offsets_of_shards(self) -> tuple[int, ...]:
        """row_offsets, with zeros where there are none."""
        return self.row_offsets or (0,) * len(self.shard_rows)

    def products(self) -> Iterator[tuple[slice, Tensor]]:
        """Of NVFP4: each run of rows of merged shards that share a global scale, with float32 [1],
        that times the input's."""
        assert self.global_scales is not None and self.input_scale is not None
        factors = self.global_scales.tolist()
        start = stop = 0
        for i, num_rows in enumerate(self.shard_rows):
            stop += num_rows
            if factors[i + 1 : i + 2] != factors[i : i + 1]:
                alpha = self.input_scale * self.global_scales[i]
                yield slice(start, stop), alpha.float().reshape(1)
                start = stop

    def _columns_of_scales(self) -> "Tensor | slice":
        """Which column of `scales` each column of `row_scales` repeats."""
        if not self.column_offset:
            return slice(None)
        assert self.scales is not None
        places = torch.arange(0, self.weight.shape[1], self.block_k, device=self.scales.device)
        return (places + self.column_offset) // self.format.block[1]


# What of MoETensors belongs to gate and up, with the rows or shards of both in dimension 1.
_OF_GATE_UP = (
    "gate_up",
    "gate_up_scales",
    "gate_up_input_scales",
    "gate_up_global_scales",
    "gate_up_zero_points",
    "gate_up_bias",
)


def _swapped(stacked: Tensor) -> Tensor:
    """A copy of [E, 2 * rows, ...] with the second half of rows before the first."""
    bits = stacked if stacked.element_size() > 1 else stacked.view(torch.uint8)
    return bits.roll(stacked.shape[1] // 2, 1).view(stacked.dtype)


@dataclass(slots=True)
class MoETensors:
    """The experts of one layer as loaded, stacked, before a backend lays them out.

    gate_up: [E, 2 * intermediate, hidden], of each expert its gate rows and then its up rows, or of
    experts without a gate [E, intermediate, hidden]; down: [E, hidden, intermediate]; both in their
    stored dtype. Their scales: float32 [E, scale rows, K blocks], for each expert as in
    LinearTensors, with gate and up as shards; None for weights without. Their input scales, of a
    static activation scheme, and global scales: float32 [E, shards]. Packed formats and zero
    points: as in LinearTensors.

    A rank's part of larger experts may begin inside a scale block: gate and up by row_offset rows,
    down by column_offset columns.

    Biases: float32 [E, 2 * intermediate] and [E, hidden], or None.

    is_up_first: up comes before gate, in gate_up and in all that belongs to it. Only kernels that
    take the layout UP_FIRST (vllm/kernels/select/spec.py) are given that.
    """

    format: WeightFormat
    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    gate_up_input_scales: Tensor | None = None
    down_input_scales: Tensor | None = None
    row_offset: int = 0
    column_offset: int = 0
    gate_up_global_scales: Tensor | None = None
    down_global_scales: Tensor | None = None
    gate_up_zero_points: Tensor | None = None
    down_zero_points: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    is_up_first: bool = False

    @property
    def inner(self) -> int:
        """Columns of an expert between its two products, on this rank."""
        return self.down.shape[2] * self.format.description.codes_per_byte

    @property
    def first_parts(self) -> tuple[int, ...]:
        """Rows of gate and of up in gate_up, or of up alone."""
        return (self.inner,) * (self.gate_up.shape[1] // self.inner)

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    def up_first(self) -> "MoETensors":
        """The same experts with up before gate: copies of what belongs to the first product."""
        if self.is_up_first:
            return self
        swapped: dict[str, Any] = {
            name: _swapped(stacked)
            for name in _OF_GATE_UP
            if (stacked := getattr(self, name)) is not None
        }
        return replace(self, is_up_first=True, **swapped)

    def with_one_input_scale(self) -> "MoETensors":
        """The same experts, the inputs of whose first product all have the largest scale."""
        scales = self.gate_up_input_scales
        if scales is None:
            return self
        return replace(self, gate_up_input_scales=scales.amax().expand_as(scales))

    def all_experts(self) -> tuple[LinearTensors, LinearTensors]:
        """Gate-up and down of every expert, as if of two linear layers: each tensor has a leading
        [E]; views."""
        parts = self.first_parts
        gate_up = LinearTensors(
            self.format,
            self.gate_up,
            parts,
            self.gate_up_scales,
            self.gate_up_bias,
            input_scale=self.gate_up_input_scales,
            global_scales=self.gate_up_global_scales,
            zero_points=self.gate_up_zero_points,
            row_offsets=(self.row_offset,) * len(parts) if self.row_offset else (),
        )
        down = LinearTensors(
            self.format,
            self.down,
            (self.down.shape[1],),
            self.down_scales,
            self.down_bias,
            input_scale=self.down_input_scales,
            global_scales=self.down_global_scales,
            zero_points=self.down_zero_points,
            column_offset=self.column_offset,
        )
        return gate_up, down

    def expert(self, index: int) -> tuple[LinearTensors, LinearTensors]:
        """Gate-up and down of one expert, as two linear layers; views, no copies."""

        def own(stacked: Tensor | None) -> Tensor | None:
            return None if stacked is None else stacked[index]

        gate_up, down = self.all_experts()
        for part in (gate_up, down):
            part.weight, part.scales = part.weight[index], own(part.scales)
            part.bias = own(part.bias)
            part.global_scales, part.zero_points = own(part.global_scales), own(part.zero_points)
            part.input_scale = None if part.input_scale is None else part.input_scale[index].max()
        return gate_up, down
