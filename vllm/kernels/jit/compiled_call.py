"""What a backend says of its kernels that nvcc compiles at run time, before any is called."""

from collections.abc import Callable

from vllm.utils.dataclasses import dataclass


@dataclass(frozen=True)
class CompiledCall:
    """A library call whose kernel, compiled by nvcc, depends on one size.

    name: with the fixed sizes. sizes: ascending; a call of size s runs the kernel of the smallest
    that is >= s. run: makes the call for a size.
    """

    name: str
    sizes: tuple[int, ...]
    run: Callable[[int], None]
