"""How long calls take: samples of several kernels in turns, their medians and their noise.

Turns make what drifts, such as the clock of a chip, the same for all.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from math import comb
from typing import Any, TypeVar

import torch

from vllm.kernels.evidence.tables import Column
from vllm.kernels.tuning.jobs import Measured

Runs = Sequence[Callable[[], Any]]
"""Calls of one kernel over different weights or inputs, two at least."""
Clock = Callable[[], float]
"""Mean microseconds of some of the calls, which are the same in each sample."""
Key = TypeVar("Key", bound=Hashable)

_MIN_SAMPLES, _MAX_SAMPLES, _SAMPLING_SECONDS = 9, 40, 0.03
_SAMPLE_SECONDS = 0.01
_CPU_CACHE_BYTES = 64 << 20

Steps = Iterator[tuple[Column, Any]]
"""Token counts, or steps of attention, with what was found of them, None for a sign of life."""


def measured_in_turns(column: Column, clocks: Mapping[tuple[str, str], Clock]) -> Steps:
    """What each kernel takes (`Measured`). clocks: by backend and field of `Entry`."""
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in sample_in_turns(clocks, samples):
        yield column, None
    for backend in dict.fromkeys(name for name, _ in clocks):
        found = {
            field: median_and_noise(own)
            for (name, field), own in samples.items()
            if name == backend
        }
        us = {field: median for field, (median, _) in found.items()}
        yield column, Measured(backend, us, max(noise for _, noise in found.values()))


def bytes_to_read(device: torch.device) -> int:
    """Before anything is read again."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return 2 * _CPU_CACHE_BYTES


def sample_in_turns(clocks: Mapping[Key, Clock], samples: dict[Key, list[float]]) -> Iterator[None]:
    """Appends to `samples` until each clock has enough; yields after each round."""
    spent = dict.fromkeys(clocks, 0.0)
    samples.update({key: [] for key in clocks})
    left = list(clocks)
    while left:
        for key in left:
            start = time.perf_counter()
            samples[key].append(clocks[key]())
            spent[key] += time.perf_counter() - start
        left = [key for key in left if not _is_enough(len(samples[key]), spent[key])]
        yield


def _is_enough(count: int, seconds: float) -> bool:
    return count >= _MAX_SAMPLES or (count >= _MIN_SAMPLES and seconds >= _SAMPLING_SECONDS)


def median_and_noise(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and the relative half-width of its 95 % interval.

    The interval lies between two of the samples: as many as are below the true median is binomial,
    whatever the times are distributed like.
    """
    ordered, median = sorted(samples), statistics.median(samples)
    left_out = _left_out(len(samples))
    return median, (ordered[-1 - left_out] - ordered[left_out]) / 2 / median


@cache
def _left_out(count: int) -> int:
    """Samples at either end that are outside of the interval."""
    below = [sum(comb(count, i) for i in range(k + 1)) / (1 << count) for k in range(count)]
    return max(sum(share <= 0.025 for share in below) - 1, 0)


def make_clock(runs: Runs, device: torch.device, pool: Any) -> Clock:
    """pool: of a GPU, what graphs share their memory in (`make_pool`)."""
    return _cuda_clock(runs, pool) if device.type == "cuda" else _cpu_clock(runs)


def make_pool(device: torch.device) -> Any:
    """Graphs of one pool must not run at the same time, and their results are lost."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _cuda_clock(runs: Runs, pool: Any) -> Clock:
    """Of one CUDA graph of the calls, without the gaps between launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs[0]()
        begin, end = _events()
        begin.record(stream)
        runs[1]()
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.synchronize()
    runs = _few(runs, begin.elapsed_time(end) * 1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for run in runs:
            run()
    graph.replay()
    torch.cuda.synchronize()

    def sample() -> float:
        begin, end = _events()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / len(runs)

    return sample


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _cpu_clock(runs: Runs) -> Clock:
    runs[0]()
    start = time.perf_counter()
    runs[1]()
    runs = _few(runs, time.perf_counter() - start)

    def sample() -> float:
        start = time.perf_counter()
        for run in runs:
            run()
        return (time.perf_counter() - start) * 1e6 / len(runs)

    return sample


def _few(runs: Runs, seconds: float) -> Runs:
    """The first ones that a sample has time for, if one of them takes so long."""
    return runs[: max(2, int(_SAMPLE_SECONDS / max(seconds, 1e-6)))]
