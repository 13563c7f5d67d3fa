"""Rank processes on this node.

A rank's imports take seconds, so its process starts before the engine imports torch and reads its
configuration. This module imports no torch.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from vllm.utils.heartbeat import PULSE

_ROOT = Path(__file__).resolve().parents[2]
# Not multiprocessing: it would import the user's script again.
_CODE = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from vllm.executor.worker import run_local; run_local({descriptor}, {watched})"
)


class LocalProcess:
    def __init__(self, process: "subprocess.Popen[bytes]"):
        self._process = process

    def end(self, timeout: float) -> str:
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


Started = tuple[Connection, LocalProcess]

_early: dict[int, Started] = {}


def take(index: int) -> Started:
    """The process of local rank `index`, started early or now."""
    return _early.pop(index, None) or _start(index)


@contextmanager
def started_early(count: int, data_parallel_rank: int = 0) -> Iterator[None]:
    """Starts the `count` rank processes that an engine is going to `take` within the block; ends
    those that it did not take."""
    first = data_parallel_rank * count
    _early.update({index: _start(index) for index in range(first, first + count)})
    try:
        yield
    finally:
        while _early:
            _, (connection, process) = _early.popitem()
            process.kill()
            connection.close()


def _start(index: int) -> Started:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor, page = theirs.fileno(), PULSE.page
        watched = None
        if page is not None and page.num_slots > 1:
            watched = (page.descriptor, page.num_slots, 1 + index % (page.num_slots - 1))
        code = _CODE.format(root=str(_ROOT), descriptor=descriptor, watched=watched)
        # -P: files in the current folder must not shadow Python's modules.
        # The last argument names the process in `ps`.
        command = [sys.executable, "-P", "-c", code, f"vllm-rank-{index}"]
        descriptors = (descriptor,) if watched is None else (descriptor, watched[0])
        process = subprocess.Popen(command, pass_fds=descriptors)
    return Connection(ours.detach()), LocalProcess(process)
