"""Values that name how a tensor is quantised."""

from typing import ClassVar, NamedTuple

import torch


class _Group(NamedTuple):
    row: int
    col: int


class GroupShape(_Group):
    """Rows x columns of a matrix that share one scale; -1 stands for the whole dimension."""

    __slots__ = ()

    PER_TENSOR: ClassVar["GroupShape"]
    PER_TOKEN: ClassVar["GroupShape"]
    PER_CHANNEL: ClassVar["GroupShape"]


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


def get_fp8_min_max() -> tuple[float, float]:
    """The finite range of E4M3: -448 and 448."""
    info = torch.finfo(torch.float8_e4m3fn)
    return info.min, info.max
