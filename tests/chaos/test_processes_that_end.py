"""Processes that are killed or stopped."""

import os
import signal
import time
from pathlib import Path

import pytest
from entrypoints.serving import RunningServer, started_server

from .harness import Fault, Prober, answers, wait_for

pytestmark = pytest.mark.chaos


def is_named(server: RunningServer, *words: str) -> bool:
    answer = server.get("/health")
    return answer.status == 503 and any(word in answer.error for word in words)


def test_engine_killed(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """The engine process is killed (SIGKILL), and started again."""
    with fault.server(tiny_model, tmp_path / "log", "--restarts", "1") as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        fault.begins()
        wait_for(lambda: server.get("/health").status == 503, 10)
        fault.noticed()
        wait_for(lambda: answers(server), 60)
        fault.recovered()


def test_engine_stopped(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """The engine process is stopped (SIGSTOP), as a paused machine would be, and goes on."""
    with fault.server(tiny_model, tmp_path / "log", "--dead-after", "60") as server:
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        fault.begins()
        try:
            wait_for(lambda: is_named(server, "engine", str(pid)), 20)
            assert fault.noticed() < 7
        finally:
            os.kill(pid, signal.SIGCONT)
        fault.begins()
        wait_for(lambda: answers(server), 20)
        fault.recovered()


def test_engine_stopped_for_good(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """The engine process is stopped for good: killed after --dead-after, and started again."""
    flags = ("--dead-after", "8", "--restarts", "1")
    with fault.server(tiny_model, tmp_path / "log", *flags) as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        fault.begins()
        wait_for(lambda: is_named(server, "engine"), 20)
        fault.noticed()
        wait_for(lambda: answers(server), 90)
        fault.recovered()


def test_rank_stopped(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """One of two tensor-parallel ranks is stopped (SIGSTOP), and goes on."""
    flags = ("-tp", "2", "--dead-after", "60")
    with fault.server(tiny_model, tmp_path / "log", *flags) as server:
        engine = server.engine_pid()
        ranks = [
            p
            for p in server.children_of(engine)
            if b"run_local" in Path(f"/proc/{p}/cmdline").read_bytes()
        ]
        os.kill(ranks[-1], signal.SIGSTOP)
        fault.begins()
        try:
            wait_for(lambda: is_named(server, "rank"), 20)
            assert fault.noticed() < 7
        finally:
            os.kill(ranks[-1], signal.SIGCONT)
        fault.begins()
        wait_for(lambda: answers(server), 20)
        fault.recovered()


def test_server_killed(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """The server's process is killed (SIGKILL), its engine ends, and another server starts."""
    with started_server(tiny_model, tmp_path / "log") as server:
        engine = server.engine_pid()
        server.process.kill()
        fault.begins()
        wait_for(lambda: not _runs(engine), 10)
        fault.noticed()
    with fault.server(tiny_model, tmp_path / "log2") as server:
        assert answers(server)
        fault.recovered()


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_demo_model_restarts(fault: Fault, tmp_path: Path) -> None:
    """A server of the demo model ends and starts again: first answer within 10 s."""
    from vllm.entrypoints.demo import demo_model_path

    model = demo_model_path()
    fault.begins()
    with started_server(model, tmp_path / "log") as server:
        fault.probe(prober := Prober(server.port))
        assert answers(server)
        assert fault.recovered() < 10
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert server.process.wait(20) == 0
        assert time.monotonic() - begin < 10
        prober.end()
