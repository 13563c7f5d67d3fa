"""Which part of a checkpoint weight a rank holds, and with it of its scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm.distributed.groups import Group
from vllm.model_executor.weights import Slot
from vllm.utils.math_utils import cdiv

Span = tuple[int, int]
Cut = Literal["rows", "columns", "replicated"]


@dataclass(frozen=True, slots=True)
class Place:
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

    def offsets(self, block: Sequence[int]) -> tuple[int, int]:
        """Where the place begins within its first block of rows and of columns."""
        return self.rows[0] % block[0], self.columns[0] % block[1]

    def num_blocks(self, block: Sequence[int]) -> tuple[int, int]:
        """How many blocks of rows and of columns it touches."""
        return _size(_blocks(self.rows, block[0])), _size(_blocks(self.columns, block[1]))

    def whole_blocks(self, block: Sequence[int]) -> "Place":
        """All of the blocks that it touches."""
        rows, columns = _blocks(self.rows, block[0]), _blocks(self.columns, block[1])
        return Place(
            (rows[0] * block[0], min(rows[1] * block[0], max(self.num_rows, self.rows[1]))),
            (columns[0] * block[1], min(columns[1] * block[1], self.num_columns)),
            self.num_rows,
            self.num_columns,
        )

    def slot(
        self,
        block: tuple[int, int],
        dtypes: tuple[torch.dtype, ...],
        write: Callable[[Tensor], None],
        is_transposed: bool = False,
    ) -> Slot:
        """A checkpoint tensor with one element per `block` of the weight, of which `write` gets
        the elements whose blocks this place touches."""
        shape, region, missing = [], [], 0
        for span, whole, step in zip(
            (self.rows, self.columns), (self.num_rows, self.num_columns), block
        ):
            size, (start, stop) = cdiv(whole, step), _blocks(span, step)
            missing += stop - max(start, min(stop, size))
            shape.append(size)
            region.append(slice(min(start, size), min(stop, size)))
        if missing:
            write = _filled_up(write, missing)
        if is_transposed:
            shape.reverse()
            region.reverse()
        is_whole = all((part.start, part.stop) == (0, size) for part, size in zip(region, shape))
        return Slot(tuple(shape), dtypes, write, () if is_whole else tuple(region))


def _blocks(span: Span, block: int) -> Span:
    return span[0] // block, cdiv(span[1], block)


def _size(span: Span) -> int:
    return span[1] - span[0]


def _filled_up(write: Callable[[Tensor], None], num_rows: int) -> Callable[[Tensor], None]:
    def write_with_zeros(tensor: Tensor) -> None:
        write(torch.cat((tensor, tensor.new_zeros(num_rows, *tensor.shape[1:]))))

    return write_with_zeros


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint weight that is merged into a layer, and how its rows may be cut.

    num_heads: into whole heads; fewer heads than ranks are held by several ranks each. pieces:
    sizes of what its rows are made of (q, k and v, say), each of which is cut by itself. is_padded:
    rows that do not divide are filled up with zeros. With none of these they divide evenly.
    """

    name: str
    num_rows: int
    num_heads: int = 0
    pieces: tuple[int, ...] = ()
    is_padded: bool = False

    def places(self, num_columns: int, cut: Cut, group: Group) -> list[Place]:
        """This rank's: one, or one for each piece."""
        rows, columns = (0, self.num_rows), (0, num_columns)
        if cut == "columns":
            columns = _share(num_columns, group)
        if cut != "rows" or group.size == 1:
            return [Place(rows, columns, self.num_rows, num_columns)]
        return [Place(own, columns, self.num_rows, num_columns) for own in self._rows(group)]

    def _rows(self, group: Group) -> list[Span]:
        if self.pieces:
            assert sum(self.pieces) == self.num_rows, self
            starts = [sum(self.pieces[:index]) for index in range(len(self.pieces))]
            shares = [_share(size, group) for size in self.pieces]
            return [(start + own[0], start + own[1]) for start, own in zip(starts, shares)]
        if self.num_heads and self.num_heads < group.size:
            head, size = group.rank * self.num_heads // group.size, self.num_rows // self.num_heads
            return [(head * size, (head + 1) * size)]
        if self.is_padded:
            size = cdiv(self.num_rows, group.size)
            return [(group.rank * size, (group.rank + 1) * size)]
        return [_share(self.num_rows, group)]


def share(size: int, group: Group) -> int:
    """How much of `size` each rank has; the configuration was refused where it does not divide."""
    assert size % group.size == 0, (size, group.size)
    return size // group.size


def _share(size: int, group: Group) -> Span:
    own = share(size, group)
    return group.rank * own, (group.rank + 1) * own


def head_shares(num_heads: int, num_kv_heads: int, group: Group) -> tuple[int, int]:
    """Heads and KV heads per rank; KV heads fewer than the ranks are held by several each."""
    return share(num_heads, group), max(1, num_kv_heads // group.size)
