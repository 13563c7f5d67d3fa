"""What `vllm kernels tune` may meet in the process that tries a kernel, by name of the backend."""

import ctypes
import subprocess
import sys
import time


def serve(channel, device_kind):
    while (job := channel.next_job()) is not None:
        channel.report(job.tokens[0], 1e-3)
        _BEHAVIOURS[job.candidate.backend](channel)
        channel.finish()


def _hang(channel):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # a compiler, say
    time.sleep(1000)


_BEHAVIOURS = {
    "works": lambda channel: None,
    "faults": lambda channel: ctypes.string_at(0),
    "exits": lambda channel: sys.exit(3),
    "hangs": _hang,
    "is wrong": lambda channel: channel.fail("numerics", "relative error 1.00e-01"),
}
