"""Ctrl-C, where half of something must not happen; SIGTERM, from the first instruction on."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Of the signal that ends this process, once one does.
_exit_code: int | None = None
# Time for cleaning up after SIGTERM before the process ends whatever it does.
_EXIT_SECONDS = 1.5


def exit_on_sigterm() -> None:
    """SIGTERM ends this process as `sys.exit(143)` would: what it opened is closed, and the
    processes that it started end. To be called in the main thread, before anything that takes time.

    Linux drops a signal without a handler that is sent to process 1 of a container.
    """
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _exit_now)  # a second one does not wait
    raise ending_with(number)


def _exit_now(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def ending_with(number: int) -> SystemExit:
    """To be raised for signal `number`: the exit code that shells give. The process ends in 2 s,
    also where the exception is swallowed or cleaning up hangs; children end with their parent."""

    global _exit_code
    _exit_code = 128 + number

    def end() -> None:
        time.sleep(_EXIT_SECONDS)
        os._exit(128 + number)

    threading.Thread(target=end, name="exit", daemon=True).start()
    return SystemExit(128 + number)


def exit_code_of_signal() -> int | None:
    """None while no signal ends this process. Compiled code (pydantic's) may turn the SystemExit
    that is raised in it into an error of its own."""
    return _exit_code


@contextmanager
def hold_back_interrupts() -> Iterator[None]:
    """Ctrl-C counts when the block is left; a second one counts at once.

    Another thread than the main one is never interrupted, and a handler that Python does not know
    cannot be put back: for them nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])
