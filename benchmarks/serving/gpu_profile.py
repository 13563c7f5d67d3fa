"""GPU time of kernels from torch's profiler, without what they wait for one another."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Of one kernel. begin, end: nanoseconds."""

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


def profile_steps(run: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Kernels of a step by GPU time. run: makes num_steps of them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    # Not profiled.events(): that builds a tree of them first, which takes minutes.
    events = profiled.profiler.kineto_results.events()
    spans = [
        Span(e.name(), e.device_resource_id(), e.start_ns(), e.end_ns())
        for e in events
        if e.device_type() == DeviceType.CUDA
    ]
    nanoseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, own in own_nanoseconds(spans):
        # Variants of a kernel whose names differ further on count together.
        nanoseconds[name[:90]] += own
        counts[name[:90]] += 1
    return {
        name: {
            "us": round(own / num_steps / 1e3, 1),
            "launches": round(counts[name] / num_steps, 1),
        }
        for name, own in nanoseconds.most_common(20)
    } | {"all": {"us": round(nanoseconds.total() / num_steps / 1e3, 1)}}
