"""A process of the engine that is stopped, stuck or gone: who is told, and what goes on."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm.utils import systemd

from .serving import (
    COMMAND,
    LONG,
    RunningServer,
    environment,
    in_background,
    started_server,
    wait_until,
)


def health(server: RunningServer) -> str:
    """ "" for 200, else what /health says."""
    answer = server.get("/health")
    return "" if answer.status == 200 else answer.error


def ranks_of(engine: int) -> list[int]:
    children = Path(f"/proc/{engine}/task").glob("*/children")
    pids = [int(pid) for child in children for pid in child.read_text().split()]
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    return sorted(pid for pid, words in named.items() if b"vllm-rank-" in words)


def end_of_stream(connection: socket.socket) -> list[Any]:
    """The last event before [DONE] of a stream, of which a part was read."""
    rest = b""
    while b"data: [DONE]" not in rest:
        piece = connection.recv(1 << 20)
        assert piece
        rest += piece
    events = [line for line in rest.split(b"\r\n") if line.startswith(b"data: ")]
    return json.loads(events[-2].removeprefix(b"data: "))


@pytest.mark.slow
def test_a_stopped_engine_is_named_goes_on_and_is_replaced_when_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started_server(tiny_model, tmp_path / "log", "--restarts", "1") as server:
        engine = server.engine_pid()
        expected = server.complete()["choices"][0]["text"]
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        meanwhile = in_background(
            server, model="tiny", prompt="ban fick", max_tokens=8, temperature=0
        )
        wait_until(lambda: health(server) != "", 10)
        assert time.monotonic() - stopped < 6.5
        text = health(server)
        assert re.match(
            rf"the engine process \(pid {engine}\) gives no sign of life since \d\d:\d\d:\d\d "
            r"\(\d+ s\), .*; it is stopped \(SIGSTOP\)",
            text,
        )
        assert text.partition(" since ")[0] in server.log.read_text()
        assert server.get("/live").status == 200
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: health(server) == "", 3)
        assert meanwhile.join().json["choices"][0]["text"] == expected

        streaming = server.connect()
        server.send_completion(streaming, stream=True)
        assert streaming.recv(1000).startswith(b"HTTP/1.1 200")
        os.kill(engine, signal.SIGKILL)
        died = time.monotonic()
        error = end_of_stream(streaming)["error"]["message"]
        assert "killed by SIGKILL" in error
        assert error.endswith("the engine is being started again; send the request again")
        assert time.monotonic() - died < 3
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert (refused.status, refused.json["error"]["code"]) == (503, "unavailable")
        assert 1 <= int(refused.headers["retry-after"]) < 60
        assert "started again" in health(server)
        assert server.get("/live").status == 200
        wait_until(lambda: health(server) == "")
        assert server.complete()["choices"][0]["text"] == expected
        assert server.engine_pid() != engine
        assert server.metric("vllm:engine_restarts_total") == 1

        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(10) == 1
        said = "died (killed by SIGKILL; Linux does that when memory runs out, see dmesg) after 1 "
        assert f"{said}restarts within an hour (--restarts)" in server.log.read_text()


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_replaced_and_nothing_of_it_is_left(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--tensor-parallel-size", "2", "--dead-after", "8")
    with started_server(tiny_model, tmp_path / "log", *flags) as server:
        expected = server.complete()["choices"][0]["text"]
        engine = server.engine_pid()
        ranks = ranks_of(engine)
        os.kill(ranks[1], signal.SIGSTOP)
        stopped = time.monotonic()
        asked = in_background(server, model="tiny", prompt="ban fick", max_tokens=8,
                              temperature=0)  # fmt: skip
        wait_until(lambda: health(server) != "", 10)
        assert time.monotonic() - stopped < 6.5
        assert f"rank 1 (pid {ranks[1]}) gives no sign of life" in health(server)
        assert "rank 0" not in health(server) and "engine process" not in health(server)
        os.kill(ranks[1], signal.SIGCONT)
        wait_until(lambda: health(server) == "", 3)
        assert asked.join().json["choices"][0]["text"] == expected

        os.kill(ranks[1], signal.SIGSTOP)
        stopped = time.monotonic()
        running = in_background(server, **LONG)
        answer = running.join()
        assert answer.status == 500
        assert f"rank 1 (pid {ranks[1]}) gives no sign of life" in answer.error
        assert "killed after 8 s (--dead-after)" in answer.error
        assert 7 < time.monotonic() - stopped < 13
        wait_until(lambda: health(server) == "")
        assert server.complete()["choices"][0]["text"] == expected
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (engine, *ranks)), 5)


@pytest.mark.slow
def test_a_request_that_waits_is_answered_by_the_next_engine(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started_server(tiny_model, tmp_path / "log", "--max-num-seqs", "1") as server:
        expected = server.complete()["choices"][0]["text"]
        running = in_background(server, **LONG)
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
        waiting = in_background(
            server, model="tiny", prompt="ban fick", max_tokens=8, temperature=0
        )
        wait_until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert running.join().status == 500
        answer = waiting.join()
        assert answer.status == 200
        assert answer.json["choices"][0]["text"] == expected
        assert health(server) == ""


# In the engine's process: a step with a prompt of several tokens takes 8 s, which it computes or
# waits, as a file says.
_SLOW_STEP = """
import builtins
original = builtins.__import__
def importing(name, globals=None, *args, **options):
    module = original(name, globals, *args, **options)
    if globals and globals.get("__name__") == "vllm.engine.core":
        builtins.__import__ = original
        import hashlib, pathlib, time
        from vllm.worker.model_runner import ModelRunner
        execute = ModelRunner.execute_model
        file = pathlib.Path(__file__).with_name("slow")
        def slow(self, scheduled, bitmasks):
            if file.exists():
                how = file.read_text()
                file.unlink()
                end = time.monotonic() + 8
                while time.monotonic() < end:
                    if how == "computes":
                        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 100000)
                    else:
                        time.sleep(0.5)
            return execute(self, scheduled, bitmasks)
        ModelRunner.execute_model = slow
    return module
builtins.__import__ = importing
"""


@pytest.mark.slow
def test_a_long_step_is_no_trouble_but_one_that_computes_nothing_is(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW_STEP)
    with started_server(tiny_model, tmp_path / "log", PYTHONPATH=str(tmp_path)) as server:
        found = {}
        for how in ("computes", "waits"):
            (tmp_path / "slow").write_text(how)
            asked = in_background(server, model="tiny", prompt="ban fick", max_tokens=2)
            found[how] = set()
            while not asked.is_done:
                found[how].add(re.sub(r" since .*\), ", ", ", health(server)))
                time.sleep(0.1)
            assert asked.join().status == 200
        pid = server.engine_pid()
        assert found["computes"] == {""}
        (told,) = found["waits"] - {""}
        assert re.fullmatch(
            rf"the engine process \(pid {pid}\) makes no progress, computing step \d+", told
        )
        wait_until(lambda: health(server) == "", 3)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """systemd's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield receiver


def test_systemd_is_told_and_its_absence_harms_nothing(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd.notify("READY=1")
    assert manager.recv(100) == b"READY=1"
    monkeypatch.setenv("NOTIFY_SOCKET", "@nobody listens here")
    systemd.notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    systemd.notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [("2000000", None, 2.0), ("2000000", str(os.getpid()), 2.0), ("2000000", "1", None),
     ("0", None, None), ("soon", None, None), (None, None, None)],
    ids=["any", "own", "another", "zero", "no number", "none"],
)  # fmt: skip
def test_a_watchdog_may_be_of_another_process(
    usec: str | None, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert systemd.watchdog_seconds() == seconds


@pytest.mark.slow
def test_a_service_is_ready_alive_and_stopping(
    tiny_model: Path, tmp_path: Path, manager: socket.socket
) -> None:
    command = [*COMMAND, "serve", str(tiny_model), "--host", "127.0.0.1", "--port", "0"]
    own = environment(WATCHDOG_USEC="3000000")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=own)
    try:
        told = [manager.recv(100).decode()]
        while told[-1] != "READY=1":
            told.append(manager.recv(100).decode())
        assert set(told[:-1]) <= {"WATCHDOG=1"}, "also while the model loads"
        ready = time.monotonic()
        assert manager.recv(100) == b"WATCHDOG=1"
        assert manager.recv(100) == b"WATCHDOG=1"
        assert 0.9 < time.monotonic() - ready < 3
        process.send_signal(signal.SIGTERM)
        rest = [manager.recv(100).decode()]
        while rest[-1] == "WATCHDOG=1":
            rest.append(manager.recv(100).decode())
        assert rest[-1] == "STOPPING=1"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)
