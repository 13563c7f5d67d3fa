"""How slow this machine is just now, so that limits in seconds mean the same on every machine."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

# What `yardstick` takes on the machine that limits are written for. Slower ones, and those that
# others use at the same time, take longer for it as for what is tested.
YARDSTICK_SECONDS = 10e-6
CALLS, REPEATS = 50, 15


@dataclass(frozen=True)
class Row:
    name: str
    sizes: tuple[int, int]


def yardstick() -> list[Row]:
    """Small frozen objects, texts, comparisons: what our Python code does all day."""
    rows = [Row(f"row {i}", (i, i + 1)) for i in range(16)]
    return [row for row in rows if not all(size % 3 for size in row.sizes)]


def median_seconds(call: Callable[[], object]) -> float:
    took = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def seconds_elsewhere(call: Callable[[], object]) -> float:
    """Of a short call on the machine that limits are written for: the least of several medians,
    since what others do on a machine only ever adds."""
    took = [(median_seconds(call), median_seconds(yardstick)) for _ in range(REPEATS)]
    own, yard = map(min, zip(*took))
    return own / yard * YARDSTICK_SECONDS


def slowness() -> float:
    """By how much to stretch a limit in seconds here and now; at least 1."""
    yard = statistics.median(median_seconds(yardstick) for _ in range(REPEATS))
    return max(1.0, yard / YARDSTICK_SECONDS)
