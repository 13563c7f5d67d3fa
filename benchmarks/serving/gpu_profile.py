"""GPU time of kernels from torch's profiler, without what they wait for one another, and when none
runs."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Of one kernel. begin, end: nanoseconds of the system's clock, as time.time_ns() has them."""

    name: str
    stream: int
    begin: int
    end: int


def own_nanoseconds(spans: Iterable[Span]) -> Iterator[tuple[str, int]]:
    """(name, time) of each kernel. One that starts early waits for those before it on its stream:
    it counts from their end."""
    ended: dict[int, int] = {}
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        before = ended.get(span.stream, 0)
        yield span.name, max(0, span.end - max(span.begin, before))
        ended[span.stream] = max(span.end, before)


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


def profile_steps(run: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """The `breakdown` of a run, which makes num_steps of steps."""
    with recording() as recorded:
        begin = time.time_ns()
        run()
        end = time.time_ns()
    return breakdown(spans_of(recorded), num_steps, begin, end)


def recording() -> Any:
    """A profile of kernels; without a GPU there will be none in it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    has_gpu = torch.cuda.is_available()
    return profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU])


def spans_of(recorded: Any) -> list[Span]:
    from torch.autograd import DeviceType

    # Not recorded.events(): that builds a tree of them first, which takes minutes.
    return [
        Span(e.name(), e.device_resource_id(), e.start_ns(), e.end_ns())
        for e in recorded.profiler.kineto_results.events()
        if e.device_type() == DeviceType.CUDA
    ]


def breakdown(spans: list[Span], num_steps: int, begin: int, end: int) -> dict[str, Any]:
    """Kernels of a step by GPU time, and under `waiting` where the rest of the time from `begin` to
    `end` goes: `between_us` for each step, the others once."""
    nanoseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, own in own_nanoseconds(spans):
        # Variants of a kernel whose names differ further on count together.
        nanoseconds[name[:90]] += own
        counts[name[:90]] += 1
    before, between, after = waiting(spans, begin, end)
    return {
        name: {
            "us": round(own / num_steps / 1e3, 1),
            "launches": round(counts[name] / num_steps, 1),
        }
        for name, own in nanoseconds.most_common(20)
    } | {
        "all": {"us": round(nanoseconds.total() / num_steps / 1e3, 1)},
        "waiting": {
            "before_us": round(before / 1e3, 1),
            "between_us": round(between / num_steps / 1e3, 1),
            "after_us": round(after / 1e3, 1),
        },
    }
