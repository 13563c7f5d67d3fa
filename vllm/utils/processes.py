"""Processes that one starts: that none outlives its parent, and how one ended."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Linux ends this process when its parent dies, however that dies; others rely on polling.
    parent: its process id, to end now where it died before this call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def ending(code: int | None) -> str:
    """How a process with this exit code (of multiprocessing, negative for a signal) ended."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    hint = "; Linux does that when memory runs out, see dmesg" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
