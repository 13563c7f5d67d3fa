"""How a server starts, refuses to start, drains and dies."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from slowness import slowness

from vllm.engine import engines
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm import AsyncLLM
from vllm.errors import KernelFailedError

from .serving import (
    LONG,
    REPOSITORY,
    Answer,
    RunningServer,
    in_background,
    run_cli,
    started_server,
    wait_until,
)


def wait_for_running(server: RunningServer) -> None:
    wait_until(lambda: server.metric("vllm:num_requests_running") > 0)


def test_both_processes_tell_where_the_seconds_of_a_start_went(server: RunningServer) -> None:
    log = server.log.read_text()
    for line in (r"\] Ready after [\d.]+ s: configuration .*imports .*weights ",
                 r"\] Server ready after [\d.]+ s: .*tokenizer .*imports .*waiting for the engine ",
                 r"^Serving .* \(ready after [\d.]+ s\)"):  # fmt: skip
        assert re.search(line, log, re.MULTILINE)


def test_one_server_guards_its_door_and_finishes_its_work(tiny_model: Path, tmp_path: Path) -> None:
    """Keys, the bound on waiting requests, then SIGTERM with a request running and one waiting."""
    flags = ("--max-num-seqs", "1", "--max-waiting", "1", "--api-key", "one", "two",
             "--max-body-size", "5000", "--allowed-origins", '["http://a.example"]')  # fmt: skip
    with started_server(tiny_model, tmp_path / "log", *flags, VLLM_API_KEY="three") as server:
        check_keys(server)
        check_own_limits(server)
        check_full_queue(server)
        check_drain(server)


def check_keys(server: RunningServer) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert server.get(path).status == 200
    for path in ("/v1/models", "/kernels", "/openapi.json", "/nowhere"):
        assert server.get(path).status == 401
    for header in ("Bearer four", "Bearer ", "one", "Basic one", "Bearer one two"):
        refused = server.get("/v1/models", Authorization=header)
        assert refused.status == 401
        assert refused.json["error"]["code"] == "invalid_api_key"
    for header in ("Bearer one", "Bearer two", "bearer three"):
        assert server.get("/v1/models", Authorization=header).status == 200


def check_own_limits(server: RunningServer) -> None:
    key = {"Authorization": "Bearer one"}
    assert server.post("/v1/completions", {"prompt": "a" * 6000}, **key).status == 413
    cors = "access-control-allow-origin"
    assert cors in server.get("/health", Origin="http://a.example").headers
    assert cors not in server.get("/health", Origin="http://b.example").headers


class Keyed(RunningServer):
    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return super().post(path, body, Authorization="Bearer one", **headers)


def check_full_queue(server: RunningServer) -> None:
    server = Keyed(server.process, server.port, server.log)
    running = in_background(server, **LONG)
    wait_for_running(server)
    waiting = in_background(server, **{**LONG, "max_tokens": 5})
    wait_until(lambda: server.metric("vllm:num_requests_waiting") == 1)
    before = server.metric("vllm:generation_tokens_total")
    wait_until(lambda: server.metric("vllm:generation_tokens_total") > before)
    assert server.metric("vllm:prompt_tokens_total") == 1
    for too_many in ({"prompt": "a", "n": 3}, {"prompt": ["a", "b", "c"]}):
        refused = server.post("/v1/completions", too_many)
        assert refused.status == 400 and "3 sequences" in refused.error
    refused = server.post("/v1/completions", {"prompt": "a"})
    assert refused.status == 429 and refused.json["error"]["code"] == "queue_full"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "--max-waiting" in refused.error
    streamed = server.post("/v1/completions", {"prompt": "a", "stream": True})
    assert streamed.status == 429
    assert (running.join().status, waiting.join().status) == (200, 200)
    at_once = [server.connect() for _ in range(20)]
    for connection in at_once:
        server.send_completion(connection, key="one", max_tokens=300)
    statuses = sorted(connection.recv(4096).split()[1] for connection in at_once)
    assert statuses == [b"200"] * 2 + [b"429"] * 18


def check_drain(server: RunningServer) -> None:
    server = Keyed(server.process, server.port, server.log)
    running = in_background(server, **LONG)
    wait_for_running(server)
    waiting = in_background(server, **{**LONG, "max_tokens": 5})
    wait_until(lambda: server.metric("vllm:num_requests_waiting") == 1)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/health").status == 503)
    refused = server.post("/v1/completions", {"prompt": "a"})
    assert (refused.status, refused.error) == (503, "the server is shutting down")
    assert running.join().json["usage"]["completion_tokens"] == 2000
    assert waiting.join().json["usage"]["completion_tokens"] == 5
    assert server.process.wait(10) == 0


OUT_OF_MEMORY = """
import importlib.util, sys
class Find:
    def find_spec(name, path, target=None):
        if name != "vllm.worker.model_runner":
            return None
        sys.meta_path.remove(Find)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            def launch(*given):
                raise RuntimeError("CUDA error: out of memory")
            module.ModelRunner._execute = launch
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Find)
"""


@pytest.mark.slow
def test_an_engine_without_memory_says_which_option_helps(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY)
    variables = {"PYTHONPATH": str(tmp_path)}
    with started_server(tiny_model, tmp_path / "log", "--restarts", "0", **variables) as server:
        answer = server.post("/v1/completions", {"prompt": "ban"})
        assert answer.status == 500
        assert "out of memory" in answer.error and "--gpu-memory-utilization" in answer.error
        assert server.process.wait(20) != 0
        assert "vllm: error: out of memory" in server.log.read_text()


# In the engine's process: products in native code fault at their first call, and with them goes the
# device.
_FAULTS = """
import builtins
original = builtins.__import__
def importing(name, globals=None, *args, **options):
    module = original(name, globals, *args, **options)
    if globals and globals.get("__name__") == "vllm.worker.warm_up":
        builtins.__import__ = original
        from vllm.kernels.backends import cpu
        from vllm.worker.first_calls import FirstCalls
        def broken(*given):
            FirstCalls._wait = broken
            raise RuntimeError("an illegal memory access was encountered")
        cpu.linear = lambda *given: broken
    return module
builtins.__import__ = importing
"""


@pytest.mark.slow
def test_a_server_whose_kernels_fail_starts_again_with_others(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_FAULTS)
    paths = os.pathsep.join(map(str, (tmp_path, REPOSITORY)))
    variables = {"PYTHONPATH": paths, "VLLM_CACHE_ROOT": str(tmp_path)}
    with started_server(tiny_model, tmp_path / "log", **variables) as server:
        assert server.post("/v1/completions", {"prompt": "ban", "max_tokens": 2}).status == 200
        decisions = server.get("/kernels").json["decisions"]
        linear = [d for d in decisions if d["problem"]["family"] == "linear"]
        assert {d["chosen"] for d in linear} == {"torch"}
        assert "quarantined on" in json.dumps(linear)
        assert server.engine_pid(), "and no other: those that failed are gone"
    log = (tmp_path / "log").read_text()
    failed = re.findall(r"kernel cpu failed for (\S+) .* with 1 tokens: RuntimeError: an ill", log)
    assert log.count("; starting again") == len(failed) == len(linear) > 3
    assert len({*failed}) == len(failed)


@pytest.mark.slow
def test_kernels_that_fail_at_every_start_end_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if nothing of what is entered were left at the next start."""
    forget = "import vllm.worker.first_calls as f; f.add_failure = lambda failure: None"
    code = _FAULTS.replace("cpu.linear", f"{forget}\n        cpu.linear")
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, REPOSITORY))))
    monkeypatch.setattr(engines, "MAX_KERNEL_FAILURES", 1)
    started = []
    start = engines.start_engines
    monkeypatch.setattr(
        engines, "start_engines", lambda args: started.append(start(args)) or started[-1]
    )

    async def serve() -> None:
        llm = AsyncLLM(EngineArgs.from_keywords(model=tiny_model))
        try:
            await llm.wait_ready()
        finally:
            await llm.shutdown()

    with pytest.raises(KernelFailedError, match=r"kernel cpu failed for .*qkv_proj"):
        asyncio.run(serve())
    assert len(started) == 2
    assert not any(engine.process.is_alive() for all_of in started for engine in all_of)


def test_when_the_engine_dies_everybody_is_told(tiny_model: Path, tmp_path: Path) -> None:
    with started_server(tiny_model, tmp_path / "log", "--restarts", "0") as server:
        whole = in_background(server, **LONG)
        streaming = server.connect()
        server.send_completion(streaming, stream=True)
        assert streaming.recv(1000).startswith(b"HTTP/1.1 200")
        wait_for_running(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        died = time.monotonic()
        answer = whole.join()
        assert answer.status == 500
        assert "killed by SIGKILL; Linux does that when memory runs out" in answer.error
        health = server.get("/health")
        assert health.status == 503
        assert "died" in health.error
        rest = b""
        while piece := streaming.recv(1 << 20):
            rest += piece
        *_, event, end = [line for line in rest.split(b"\r\n") if line.startswith(b"data: ")]
        assert "engine" in json.loads(event.removeprefix(b"data: "))["error"]["message"]
        assert end.startswith(b"data: [DONE]")
        assert server.process.wait(10) == 1
        assert time.monotonic() - died < 5 * slowness()
        assert "vllm: error: the engine process died" in server.log.read_text()


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tiny_model: Path, tmp_path: Path) -> None:
    with started_server(tiny_model, tmp_path / "log", "--shutdown-timeout", "60") as server:
        running = in_background(server, **{**LONG, "n": 32, "temperature": 1.0})
        wait_for_running(server)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.get("/health").status == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(5) == 0
        cut = running.join()
        assert (cut.status, cut.error) == (503, "the server is shutting down")
        assert cut.headers["retry-after"] == "1"


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        start = time.monotonic()
        done = run_cli("serve", "/no/such/model", "--host", "127.0.0.1", "--port", port)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - start < 3 * slowness()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([""], "model is empty: give a folder"),
        (["/no/such/model"], "neither a folder here nor a hub name"),
        (["MODEL", "--max-model-len", "0"], "--max-model-len 0 is out of range"),
        (["MODEL", "--linear-backend", "cpus"], "did you mean cpu?"),
        (["MODEL", "--chat-template", "/no/such/file"], "neither a file nor a Jinja template"),
        (["MODEL", "--chat-template", "{% if %}"], "--chat-template, line 1"),
        (["MODEL", "--ssl-keyfile", "x"], "go together"),
        (
            ["MODEL", "--ssl-keyfile", "/no/key", "--ssl-certfile", "/no/cert"],
            "give a PEM certificate and its private key",
        ),
        (["MODEL", "--served-model-name", ""], "takes names that are not empty"),
        (["MODEL", "--dump-decisions", "/no/such/folder/x.json"], "a folder that exists"),
        (["MODEL", "--host", "999.1.1.1"], "cannot listen on 999.1.1.1"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_exits_with_2(
    tiny_model: Path, flags: list[str], message: str
) -> None:
    words = [str(tiny_model) if flag == "MODEL" else flag for flag in flags]
    done = run_cli("serve", *words, "--port", "0")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fifo_in_place_of_a_file_of_the_model_is_told_at_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    done = run_cli("serve", str(folder), "--port", "0", timeout=30)
    assert done.returncode == 2
    assert f"{folder / 'tokenizer_config.json'} is a FIFO, no regular file" in done.stderr
    assert "Traceback" not in done.stderr
