"""What the memory of this machine delivers, measured."""

import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

_BYTES = 1 << 30
_BYTES_ON_CPU = 1 << 28
_REPEATS = 20


def memory_bandwidth(device_kind: str) -> float:
    """Bytes a second. On a GPU of a kernel that reads half of them and writes the other half, which
    the best kernels reach; on a CPU of reading alone, as a decode step does: a copy would read what
    it writes first, uncounted."""
    return _of_gpu() if device_kind == "cuda" else _of_cpu()


def device_name(device_kind: str) -> str:
    """`NVIDIA H200`, or `x86_64, 2 threads`."""
    if device_kind == "cuda":
        name: str = torch.cuda.get_device_name()
        return name
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def _of_gpu() -> float:
    """Of floats that it negates: `copy_` is left to the driver, whose copies are a fifth slower.
    The median of some runs."""
    free, _ = torch.cuda.mem_get_info()
    half = min(_BYTES, free // 4) // 4
    pair = torch.randn(2, half, device="cuda")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    torch.neg(pair[0], out=pair[1])
    marks[0].record()
    for mark in marks[1:]:
        torch.neg(pair[0], out=pair[1])
        mark.record()
    torch.cuda.synchronize()
    ms: float = statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))
    return 2 * half * 4 / ms * 1e3


def _of_cpu() -> float:
    """The best of some runs: others may share the cores."""
    data = torch.ones(_BYTES_ON_CPU // 4)
    num_bytes: int = data.nbytes
    return num_bytes / min(_seconds(data.sum) for _ in range(_REPEATS))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
