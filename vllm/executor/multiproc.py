"""Ranks in processes of this machine."""

import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from vllm.executor.workers import Place

_ROOT = Path(__file__).resolve().parents[2]
# Not by multiprocessing, which would import the user's script again.
_CODE = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from vllm.executor.worker import run_local; run_local({descriptor})"
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


class LocalLauncher:
    """num_engines: that run on this machine, all alike."""

    def __init__(self, num_engines: int):
        self._num_engines = num_engines

    def host(self) -> str:
        return "127.0.0.1"

    def launch(self, ranks: range) -> list[Place]:
        return [self._start(rank, len(ranks) * self._num_engines) for rank in ranks]

    def _start(self, device_index: int, num_neighbours: int) -> Place:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            code = _CODE.format(root=str(_ROOT), descriptor=descriptor)
            # The last word is for those who look at a list of processes.
            command = [sys.executable, "-c", code, f"vllm-rank-{device_index}"]
            process = subprocess.Popen(command, pass_fds=(descriptor,))
        return Place(Connection(ours.detach()), LocalProcess(process), device_index, num_neighbours)

    def close(self) -> None:
        pass
