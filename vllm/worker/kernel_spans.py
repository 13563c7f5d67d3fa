"""Kernels of a GPU from torch's profiler: when each runs, and for how long, waits left out."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Span(NamedTuple):
    """Of one kernel. begin, end: nanoseconds of the system's clock, as time.time_ns() has them."""

    name: str
    stream: int
    begin: int
    end: int


def own_nanoseconds(spans: Iterable[Span]) -> Iterator[tuple[str, int]]:
    """(name, time) of each kernel, in the order of their beginnings. One that starts early waits
    for those before it on its stream: it counts from their end."""
    ended: dict[int, int] = {}
    for span in in_order(spans):
        before = ended.get(span.stream, 0)
        yield span.name, max(0, span.end - max(span.begin, before))
        ended[span.stream] = max(span.end, before)


def in_order(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.begin, span.end))


def waiting(spans: Iterable[Span], begin: int, end: int) -> tuple[int, int, int]:
    """Nanoseconds from `begin` on in which no kernel runs on any stream: before the first, between
    them, and after the last until `end`."""
    ordered = sorted(spans, key=lambda span: span.begin)
    if not ordered:
        return 0, 0, end - begin
    between, ended = 0, ordered[0].begin
    for span in ordered:
        between += max(0, span.begin - ended)
        ended = max(ended, span.end)
    return ordered[0].begin - begin, between, end - ended


def recording() -> Any:
    """A profile of kernels, a context manager; without a GPU there will be none in it."""
    has_gpu = torch.cuda.is_available()
    return profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU])


def spans_of(recorded: Any) -> list[Span]:
    # Not recorded.events(): that builds a tree of them first, which takes minutes.
    return [
        Span(e.name(), e.device_resource_id(), e.start_ns(), e.end_ns())
        for e in recorded.profiler.kineto_results.events()
        if e.device_type() == DeviceType.CUDA
    ]
