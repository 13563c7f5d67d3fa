"""Processes of this machine that become ranks.

Importing what a rank needs takes seconds, so they start before the engine does the same for itself
and reads its configuration. Neither this file nor what it imports imports torch.
"""

import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

_ROOT = Path(__file__).resolve().parents[2]
# Not by multiprocessing, which would import the user's script again.
_CODE = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from vllm.executor.worker import run_local; run_local({descriptor})"
)
# Sizes are not checked yet; beyond the GPUs of one machine they may be mistakes.
_MAX_EARLY = 16


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
    """The process of rank `index` of this machine, started early or now."""
    return _early.pop(index, None) or _start(index)


@contextmanager
def started_early(args: "EngineArgs", data_parallel_rank: int = 0) -> Iterator[None]:
    """Starts those that an engine with these arguments will `take` within the block; ends those
    that it did not."""
    count = _num_early(args)
    first = data_parallel_rank * count
    _early.update({index: _start(index) for index in range(first, first + count)})
    try:
        yield
    finally:
        while _early:
            _, (connection, process) = _early.popitem()
            process.kill()
            connection.close()


def _num_early(args: "EngineArgs") -> int:
    """Of the ranks of one engine; 0 where what was given is going to be refused."""
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size)
    are_valid = all(type(size) is int and size > 0 for size in sizes)
    if args.distributed_executor_backend not in (None, "mp") or not are_valid:
        return 0
    count = math.prod(sizes)
    return count if 1 < count <= _MAX_EARLY else 0


def _start(index: int) -> Started:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        code = _CODE.format(root=str(_ROOT), descriptor=descriptor)
        # -P: files of the folder that the user is in must not stand for modules of Python.
        # The last word is for those who look at a list of processes.
        command = [sys.executable, "-P", "-c", code, f"vllm-rank-{index}"]
        process = subprocess.Popen(command, pass_fds=(descriptor,))
    return Connection(ours.detach()), LocalProcess(process)
