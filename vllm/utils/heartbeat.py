"""Signs of life of the processes of an engine, in memory that they share with the server.

Each process has a slot. A thread of its own counts beats there, also while the main thread
computes; the main thread counts steps and says what it does, with one store each and no system
call. The server compares what it reads with what it read before (`vllm/engine/supervision.py`), so
that no clock is shared and a machine that was suspended harms nothing.
"""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from multiprocessing import reduction
from typing import Any, NamedTuple

BEAT_SECONDS = 0.5

_WORDS = 8  # of 8 bytes: a slot is a cache line
_PID, _BEATS, _ACTIVITY, _STEPS, _CPU_MS = range(5)


class Activity(IntEnum):
    """What a process does."""

    START = 0
    IDLE = 1
    STEP = 2
    CALL = 3
    COMPILE = 4


class Sign(NamedTuple):
    """A slot as it was read. pid: 0 before the process has begun, and after its regular end. beats:
    of its thread; steps: of its main thread; cpu_ms: CPU time of all its threads, in ms."""

    pid: int
    beats: int
    activity: Activity
    steps: int
    cpu_ms: int


class Page:
    """Shared memory with a slot per process: 0 of the engine, then one per rank."""

    def __init__(self, num_slots: int, descriptor: int | None = None):
        """descriptor: of a page that another process has made; None: a new one."""
        self.num_slots = num_slots
        size = num_slots * _WORDS * 8
        if descriptor is None:
            descriptor = _anonymous_file()
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self.words = memoryview(mmap.mmap(descriptor, size)).cast("Q")

    def read(self, slot: int) -> Sign:
        pid, beats, activity, steps, cpu_ms = self.words[slot * _WORDS : slot * _WORDS + 5]
        return Sign(pid, beats, Activity(activity), steps, cpu_ms)

    def close(self) -> None:
        """The memory itself goes with the last process that has it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __reduce__(self) -> tuple[Any, ...]:
        """For `multiprocessing`, to a process that is being started."""
        return _received, (self.num_slots, reduction.DupFd(self.descriptor))


class Pulse:
    """The signs of life of this process. Before `attach` nobody reads them."""

    def __init__(self) -> None:
        self.page: Page | None = None
        self._words = memoryview(bytearray(_WORDS * 8)).cast("Q")

    def attach(self, page: Page, slot: int) -> None:
        """Begins to beat in a slot of `page`."""
        words = page.words[slot * _WORDS : (slot + 1) * _WORDS]
        for index in range(_WORDS):
            words[index] = 0
        words[_PID] = os.getpid()
        self.page, self._words = page, words
        threading.Thread(target=self._beat, args=(words,), name="heartbeat", daemon=True).start()

    def enter(self, activity: Activity) -> None:
        self._words[_ACTIVITY] = activity

    def step(self) -> None:
        """Tells of progress."""
        self._words[_STEPS] += 1

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Announces what may take long."""
        before = self._words[_ACTIVITY]
        self._words[_ACTIVITY] = activity
        try:
            yield
        finally:
            self._words[_ACTIVITY] = before

    def end(self) -> None:
        """The process is about to end as it should."""
        self._words[_PID] = 0

    def _beat(self, words: "memoryview[int]") -> None:
        while True:
            words[_CPU_MS] = int(time.process_time() * 1000)
            words[_BEATS] += 1
            time.sleep(BEAT_SECONDS)


PULSE = Pulse()
"""One per process."""


def _anonymous_file() -> int:
    # Not a file on a disk: a store would wait for a disk that does not answer.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vllm-heartbeat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _received(num_slots: int, descriptor: Any) -> Page:
    return Page(num_slots, descriptor.detach())
