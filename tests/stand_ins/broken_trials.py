"""What `vllm kernels tune` may meet in the process that tries a kernel, by name of the backend."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from vllm.kernels.tuning.jobs import Measured, Turns
from vllm.platforms.child import requests


def serve(channel, device_kind):
    """Fails in checks; backends named `late ...` fail when they are timed."""
    channel.send(("begun", 0, None))
    for request in requests(channel):
        if isinstance(request, Turns):
            _time(channel, request)
        else:
            channel.send(("at", request.tokens[0], 1e-3))
            _BEHAVIOURS.get(request.backend, _BEHAVIOURS["works"])(channel)
        channel.send(("done", 0, None))


def _time(channel, turns):
    for num_tokens in turns.tokens:
        for job in turns.jobs:
            if job.backend.startswith("late "):
                _BEHAVIOURS[job.backend.removeprefix("late ")](channel)
            if num_tokens in job.tokens:
                us = {"us": 2.0, "skewed_us": 3.0}
                channel.send(("at", num_tokens, Measured(job.backend, us, 0.01)))


def serve_nothing(channel, device_kind):
    """A machine on which no process for kernels can begin."""
    sys.exit(1)


def _starve_once(channel):
    """As beside others, and not alone."""
    before = Path(os.environ["VLLM_CACHE_ROOT"], "starved")
    if not before.exists():
        before.touch()
        channel.send(_OUT_OF_MEMORY)
        sys.exit()


def _hang(channel):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # a compiler, say
    time.sleep(1000)


_OUT_OF_MEMORY = ("failed", "machine", "OutOfMemoryError: CUDA out of memory")
_BEHAVIOURS = {
    "works": lambda channel: None,
    "faults": lambda channel: ctypes.string_at(0),
    "exits": lambda channel: sys.exit(3),
    "hangs": _hang,
    "is killed": lambda channel: os.kill(os.getpid(), signal.SIGKILL),
    "is full": lambda channel: channel.send(_OUT_OF_MEMORY),
    "is full beside others": _starve_once,
    "is wrong": lambda channel: channel.send(("failed", "numerics", "relative error 1.00e-01")),
}
