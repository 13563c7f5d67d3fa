"""How many sequences a server takes, and of which client."""

import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from vllm.errors import QueueFullError, RequestError

# The rate at which sequences finish is that of the last so many seconds.
_WINDOW_S = 60.0
_MAX_RETRY_S = 60


class Admission:
    """Counts the sequences of all requests in flight; those beyond `max_running` wait.

    At most `max_waiting` wait. A client that has less than an equal share of all is taken beyond
    that, up to `max_waiting` more: one that fills the queue does not keep others out.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """max_waiting: None for no limit."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._clock = clock
        self._num_in_flight: Counter[str] = Counter()
        self._total = 0
        self._busy_since = 0.0
        self._finished: deque[tuple[float, int]] = deque()  # when, and how many sequences
        self._num_finished = 0  # their sum

    def check(self, client: str, num_sequences: int) -> None:
        """QueueFullError where `num_sequences` more are too many; RequestError where they would be
        on an idle server."""
        if self._max_waiting is None:
            return
        room = self._max_running + self._max_waiting
        if num_sequences > room:
            raise RequestError(
                f"{num_sequences} sequences (prompts times n): this server takes at most "
                f"{self._max_running} running and {self._max_waiting} waiting (--max-waiting); "
                f"send fewer at a time"
            )
        total = self._total + num_sequences
        if total <= room:
            return
        own = self._num_in_flight[client] + num_sequences
        num_clients = len(self._num_in_flight | {client: 1})
        if own * num_clients <= room and total <= room + self._max_waiting:
            return
        raise QueueFullError(
            f"{self._total} sequences are running or waiting already; the limit is "
            f"{self._max_running} running and {self._max_waiting} waiting (--max-waiting)",
            retry_after_s=self.retry_after_s(),
        )

    @contextmanager
    def reserve(self, client: str, num_sequences: int) -> Iterator[None]:
        """Counts them for as long as it lasts; raises as `check`."""
        self.check(client, num_sequences)
        if not self._total:
            self._busy_since = self._clock()
            self._finished.clear()
            self._num_finished = 0
        self._total += num_sequences
        self._num_in_flight[client] += num_sequences
        try:
            yield
        finally:
            self._total -= num_sequences
            self._num_in_flight[client] -= num_sequences
            if not self._num_in_flight[client]:
                del self._num_in_flight[client]
            self._finished.append((self._clock(), num_sequences))
            self._num_finished += num_sequences
            self._forget_old()

    @asynccontextmanager
    async def place(self, client: str, num_sequences: int) -> AsyncIterator[None]:
        """As `reserve`, for those who may ask another process for it."""
        with self.reserve(client, num_sequences):
            yield

    def retry_after_s(self) -> int:
        """Whole seconds, 1 to 60, until what waits now would run at the rate at which sequences
        finished lately. While none has, it is as long again as they have run."""
        self._forget_old()
        elapsed = min(self._clock() - self._busy_since, _WINDOW_S)
        num_waiting = max(1, self._total - self._max_running)
        seconds = elapsed * (num_waiting / self._num_finished if self._num_finished else 1)
        return max(1, min(_MAX_RETRY_S, math.ceil(seconds)))

    def _forget_old(self) -> None:
        oldest = self._clock() - _WINDOW_S
        while self._finished and self._finished[0][0] < oldest:
            self._num_finished -= self._finished.popleft()[1]
