"""GPU time of kernels from torch's profiler, without what they wait for one another, and when none
runs."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.worker.kernel_spans import Span, own_nanoseconds, recording, spans_of, waiting


def profile_steps(run: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """The `breakdown` of a run, which makes num_steps of steps."""
    with recording() as recorded:
        begin = time.time_ns()
        run()
        end = time.time_ns()
    return breakdown(spans_of(recorded), num_steps, begin, end)


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
