"""Which part of a checkpoint weight a rank holds, and with it of its scales."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm.architectures.sharding import Region, Span
from vllm.model_executor.weights import Slot
from vllm.utils.math_utils import cdiv


class Place(Region):
    """A region with the scale blocks that it touches, and the slots of checkpoint tensors."""

    __slots__ = ()

    @classmethod
    def of(cls, region: Region) -> "Place":
        return cls(region.rows, region.columns, region.num_rows, region.num_columns)

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
