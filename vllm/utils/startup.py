"""Where the seconds of a start go."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.logger import get_logger

logger = get_logger(__name__)


class StartupReport:
    """Phases of one start, in the order they began. A phase inside another counts for itself.

    begin: when the wait began, of time.perf_counter(); None: now. seconds: by phase, without the
    phases inside it.
    """

    def __init__(self, begin: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter() if begin is None else begin
        self._inner = [0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block, also where it raises."""
        self.seconds.setdefault(name, 0.0)
        self._inner.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[name] += spent - self._inner.pop()
            self._inner[-1] += spent

    def count_rest(self, name: str) -> None:
        """Counts as `name` all time since the beginning that is in no phase. Inside none."""
        self.seconds[name] = self.seconds.get(name, 0.0) + self._rest()

    @property
    def total(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    def phases(self) -> dict[str, float]:
        """Seconds by phase, with `other` for what is in none: `total` in all."""
        return {**self.seconds, "other": self._rest()}

    def log(self, more: str = "", who: str = "") -> None:
        """One line: the total since the beginning, every phase with its share, and `more` that is
        to be told. who: what is ready, where it is not the engine."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases().items())
        ready = f"{who} ready" if who else "Ready"
        logger.info("%s after %.1f s: %s%s", ready, self.total, parts, more and f"; {more}")

    def _rest(self) -> float:
        return self.total - sum(self.seconds.values())


_current: StartupReport | None = None


def begin_report(begin: float | None = None) -> StartupReport:
    """The report of the start that begins; see StartupReport. Others find it as current_report."""
    global _current
    _current = StartupReport(begin)
    return _current


def current_report() -> StartupReport:
    """Of the start that this process is in; where nobody said when that began, it is with the
    process itself."""
    return _current or begin_report(process_start())


def process_start() -> float:
    """When this process began, of time.perf_counter(); now where Linux does not say."""
    now = time.perf_counter()
    try:
        text = Path("/proc/self/stat").read_text()
        ticks = int(text.rpartition(")")[2].split()[19])  # field 22, since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError, AttributeError):
        return now
    return now - max(0.0, age)


@contextmanager
def no_collections() -> Iterator[None]:
    """Spares a start the search for garbage, a sixth of the time that imports take: nearly all of
    what they make stays."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def settle_collections() -> None:
    """Leaves what a start made out of all later collections, and makes those rare that go through
    every request in flight: each of either kind stalls all answers, by 0.1 s and more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
