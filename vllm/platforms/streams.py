"""Two parts of a step at the same time on one GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Main = TypeVar("Main")
Side = TypeVar("Side")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_in_turn = False


@contextmanager
def in_turn() -> Iterator[None]:
    """Within it what `beside` runs comes one after the other, on one stream."""
    global _in_turn
    _in_turn = True
    try:
        yield
    finally:
        _in_turn = False


def beside(
    x: Tensor, main: Callable[[Tensor], Main], side: Callable[[Tensor], Side]
) -> tuple[Main, Side]:
    """(main(x), side(x)), side by side on a GPU; a graph that is being captured gets two branches.

    `side` has no collective: ranks could meet there and in `main` in another order each. Memory
    that `side` takes belongs to its stream, which waits for all work before it each time: so
    nothing is handed out again while it is still read.
    """
    if _in_turn or not x.is_cuda:
        return main(x), side(x)
    here, there = torch.cuda.current_stream(x.device), _side_stream(x.device)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        second = side(x)
    first = main(x)
    here.wait_stream(there)
    return first, second
