"""Linear layers by their full sizes, and the one function that cuts them into per-rank shards."""

from collections.abc import Iterator
from typing import Literal

from vllm.errors import ConfigError
from vllm.utils.dataclasses import dataclass

Span = tuple[int, int]
ParallelStyle = Literal["column", "row", "replicated"]


@dataclass(frozen=True)
class Dim:
    """`count` units of `unit` numbers along one dimension of a weight; ranks get whole units.

    field: what config.json calls the count, for messages. uneven: what happens to a count that the
    ranks do not divide: it is `refused`; units fewer than the ranks are `repeated` on several
    ranks; or the last rank's share is `padded` with zeros.
    """

    field: str
    count: int
    unit: int = 1
    uneven: Literal["refused", "repeated", "padded"] = "refused"

    @property
    def size(self) -> int:
        return self.count * self.unit

    def per_rank(self, ranks: int, axis: str = "tp") -> int:
        """Units on each rank. ConfigError where they do not divide; axis: for its message."""
        if self.uneven == "padded":
            return -(-self.count // ranks)
        if self.uneven == "repeated" and self.count < ranks and ranks % self.count == 0:
            return 1
        if self.count % ranks:
            raise ConfigError(
                f"{self.field} = {self.count} is not a multiple of {axis} = {ranks}: take a "
                f"divisor of {self.count}"
            )
        return self.count // ranks

    def span(self, rank: int, ranks: int, axis: str = "tp") -> Span:
        """The numbers [start, stop) of rank `rank`; padded ones reach beyond `size`."""
        own = self.per_rank(ranks, axis)
        first = rank * self.count // ranks if self.uneven == "repeated" else rank * own
        return first * self.unit, (first + own) * self.unit


@dataclass(frozen=True)
class Region:
    """Rows and columns [start, stop) of a checkpoint weight [num_rows, num_columns].

    Rows beyond num_rows do not exist in the checkpoint and are zeros.
    """

    rows: Span
    columns: Span
    num_rows: int
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Part:
    """A checkpoint weight that is merged into a linear layer. dims: what its rows are made of (q, k
    and v, say), each of which is cut by itself.

    interleaved: the checkpoint has the rows unit by unit of this dimension, in each those of all
    `dims`, where the layer has each of `dims` in one piece. None for weights that need no sorting.
    """

    name: str
    dims: tuple[Dim, ...]
    interleaved: Dim | None = None

    @property
    def num_rows(self) -> int:
        return sum(dim.size for dim in self.dims)

    def regions(
        self, columns: Dim, style: ParallelStyle, rank: int, ranks: int
    ) -> tuple[Region, ...]:
        """What the rank holds: one region, or one for each of `dims`, or of each its units."""
        num_rows, num_columns = self.num_rows, columns.size
        own_columns = columns.span(rank, ranks) if style == "row" else (0, num_columns)
        if self.interleaved is not None:
            assert style == "column"
            return tuple(
                Region(rows, own_columns, num_rows, num_columns)
                for rows in self._interleaved_rows(self.interleaved, rank, ranks)
            )
        if style != "column" or ranks == 1:
            return (Region((0, num_rows), own_columns, num_rows, num_columns),)
        regions, start = [], 0
        for dim in self.dims:
            first, stop = dim.span(rank, ranks)
            regions.append(
                Region((start + first, start + stop), own_columns, num_rows, num_columns)
            )
            start += dim.size
        return tuple(regions)

    def _interleaved_rows(self, units: Dim, rank: int, ranks: int) -> Iterator[Span]:
        """In the order of the layer; every one of `dims` has a multiple of as many units."""
        first, stop = units.span(rank, ranks)
        unit, offset = self.num_rows // units.count, 0
        for dim in self.dims:
            own = dim.size // units.count
            for start in range(first * unit + offset, stop * unit + offset, unit):
                yield start, start + own
            offset += own


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer of the whole model: y = x @ W.T + b, W of the rows of all `parts` in order.

    name: within its decoder layer; parts have names beside it. inputs: columns of W. style: what
    tensor parallelism divides: `column` the outputs, `row` the inputs, `replicated` nothing.
    may_quantize: False for routers, which checkpoints keep in a floating point type whether their
    config says so or not. is_absorbed: no kernel multiplies by it; at load it becomes what other
    products multiply by.
    """

    name: str
    parts: tuple[Part, ...]
    inputs: Dim
    style: ParallelStyle
    bias: bool = False
    may_quantize: bool = True
    is_absorbed: bool = False

    def shards(self, prefix: str, rank: int, ranks: int) -> list[tuple[str, Region]]:
        """(checkpoint name, region) of everything that one tensor-parallel rank holds, in order.

        prefix: of the decoder layer, with its dot. A shard is a part, or one of its `dims`.
        """
        parent = prefix + self.name[: self.name.rfind(".") + 1]
        return [
            (parent + part.name, region)
            for part in self.parts
            for region in part.regions(self.inputs, self.style, rank, ranks)
        ]


def linear(
    name: str, rows: Dim, inputs: Dim, style: ParallelStyle, bias: bool = False
) -> LinearSpec:
    """A layer of one checkpoint weight, which has the layer's own name."""
    return LinearSpec(name, (Part(name.rpartition(".")[2], (rows,)),), inputs, style, bias)
