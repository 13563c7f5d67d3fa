"""The clock of the machine jumps: what counts time by it must not."""

import signal
from pathlib import Path

import pytest

from .harness import Fault, tokens

pytestmark = pytest.mark.chaos

# libfaketime is not to be had everywhere: the clock of Python code jumps at SIGUSR1, in the server
# and in its engine; the monotonic clock does not, as on a machine whose clock is set.
CLOCK = """
import os, signal, time
real, jump = time.time, [0.0]
time.time = lambda: real() + jump[0]
time.time_ns = lambda: int(time.time() * 1e9)
def at_signal(number, frame):
    jump[0] += float(os.environ["CLOCK_JUMP"])
try:
    signal.signal(signal.SIGUSR1, at_signal)
except ValueError:
    pass
"""


@pytest.mark.parametrize("days", [1, -1])
def test_clock_jumps(fault: Fault, tiny_model: Path, tmp_path: Path, days: int) -> None:
    """The clock jumps by days while requests run."""
    import os
    import threading

    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    variables = {"PYTHONPATH": str(tmp_path), "CLOCK_JUMP": str(days * 86400)}
    with fault.server(tiny_model, tmp_path / "log", **variables) as server:
        expected = tokens(server)
        statuses: list[int] = []
        long = {"prompt": "ban", "max_tokens": 1500, "ignore_eos": True}
        thread = threading.Thread(
            target=lambda: statuses.append(server.post("/v1/completions", long).status)
        )
        thread.start()
        fault.begins()
        for pid in (server.process.pid, server.engine_pid()):
            os.kill(pid, signal.SIGUSR1)
        assert tokens(server) == expected
        fault.recovered()
        thread.join(60)
        assert statuses == [200]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
