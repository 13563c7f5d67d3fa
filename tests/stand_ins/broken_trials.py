"""What `vllm kernels tune` may meet in the process that tries a kernel, by name of the backend."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def serve(channel, device_kind):
    channel.begin()
    while (job := channel.next_job()) is not None:
        channel.report(job.tokens[0], 1e-3)
        _BEHAVIOURS[job.candidate.backend](channel)
        channel.finish()


def serve_nothing(channel, device_kind):
    """A machine on which no process for kernels can begin."""
    sys.exit(1)


def _starve_once(channel):
    """As beside others, and not alone."""
    before = Path(os.environ["VLLM_CACHE_ROOT"], "starved")
    if not before.exists():
        before.touch()
        channel.fail("machine", "OutOfMemoryError: CUDA out of memory")
        sys.exit()


def _hang(channel):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # a compiler, say
    time.sleep(1000)


_BEHAVIOURS = {
    "works": lambda channel: None,
    "faults": lambda channel: ctypes.string_at(0),
    "exits": lambda channel: sys.exit(3),
    "hangs": _hang,
    "is killed": lambda channel: os.kill(os.getpid(), signal.SIGKILL),
    "is full": lambda channel: channel.fail("machine", "OutOfMemoryError: CUDA out of memory"),
    "is full beside others": _starve_once,
    "is wrong": lambda channel: channel.fail("numerics", "relative error 1.00e-01"),
}
