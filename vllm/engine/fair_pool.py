"""Threads that clients share: none of them keeps the others from having their work done."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any


class _Client:
    __slots__ = ("last_turn", "num_running", "work")

    def __init__(self, last_turn: int) -> None:
        self.work: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self.num_running = 0
        self.last_turn = last_turn


class FairPool:
    """Work of one client is begun in order, at most `most_of_client` pieces at once. The client
    with the fewest pieces in work is next; of equal ones, that whose last turn is longest ago."""

    def __init__(self, num_threads: int, most_of_client: int, name: str):
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._most = most_of_client
        self._clients: dict[str, _Client] = {}
        self._num_turns = 0
        self._lock = Lock()
        self._is_closed = False

    def submit(self, client: str, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """What becomes of function(*arguments); it can be cancelled until it is begun."""
        future: Future[Any] = Future()
        with self._lock:
            own = self._clients.setdefault(client, _Client(self._num_turns))
            own.work.append((future, function, arguments))
            self._begin()
        return future

    def shutdown(self) -> None:
        """Begins nothing more, and does not wait for what is in work."""
        with self._lock:
            self._is_closed = True
            for client in self._clients.values():
                for future, *_ in client.work:
                    future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._num_free and not self._is_closed:
            ready = [(own.num_running, own.last_turn, name) for name, own in self._clients.items()
                     if own.work and own.num_running < self._most]  # fmt: skip
            if not ready:
                return
            name = min(ready)[2]
            own = self._clients[name]
            self._num_turns += 1
            own.last_turn = self._num_turns
            own.num_running += 1
            self._num_free -= 1
            self._threads.submit(self._run, name, *own.work.popleft())

    def _run(
        self, name: str, future: "Future[Any]", function: Callable[..., Any], given: tuple[Any, ...]
    ) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*given))
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            own = self._clients[name]
            own.num_running -= 1
            self._num_free += 1
            if not own.num_running and not own.work:
                del self._clients[name]
            self._begin()
