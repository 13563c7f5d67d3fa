"""Where the seconds of a start go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.logger import get_logger

logger = get_logger(__name__)


class StartupReport:
    """Phases of one start, in the order they began. A phase inside another counts for itself.

    seconds: by phase, without the phases inside it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()
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

    def log(self) -> None:
        """One line: the total since this object was made, and every phase with its share."""
        total = time.perf_counter() - self._begin
        phases = {**self.seconds, "other": total - sum(self.seconds.values())}
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
        logger.info("Ready after %.1f s: %s", total, parts)
