"""Signals that stop a server."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Iterator
from typing import Any


class Stop:
    """soon: set by the first signal: running requests are finished. now: by the second one. number:
    of the first."""

    def __init__(self) -> None:
        self.soon = asyncio.Event()
        self.now = asyncio.Event()
        self.number = 0

    @property
    def count(self) -> int:
        """0 to 2."""
        return self.soon.is_set() + self.now.is_set()

    def raise_to(self, count: int) -> None:
        """As after so many signals."""
        for event in (self.soon, self.now)[:count]:
            event.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT count while it lasts."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _on_signal(self, number: int) -> None:
        self.number = self.number or number
        self.raise_to(self.count + 1)


async def first_of(*waits: Awaitable[Any]) -> None:
    """Waits for one of `waits`, raises its error if it has one, and cancels the others.

    A task among them is only waited for, never cancelled.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()
