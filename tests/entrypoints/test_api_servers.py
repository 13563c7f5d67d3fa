"""Several API processes on one port: what a client sees is one server."""

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

from .serving import (
    COMMAND,
    LONG,
    RunningServer,
    connections,
    descriptors,
    environment,
    in_background,
    run_cli,
    started_server,
    wait_until,
)

FLAGS = ("--api-server-count", "2")


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("servers") / "log"
    flags = (*FLAGS, "--max-num-seqs", "8", "--max-waiting", "4", "--stream-interval", "4")
    with started_server(tiny_model, log, *flags, VLLM_SERVER_DEV_MODE="1") as running:
        yield running


def owner_of(server: RunningServer, connection: socket.socket) -> int:
    """The API process that has accepted a connection."""
    ends = (f":{server.port:04X}", f":{connection.getsockname()[1]:04X}")
    rows = [row for row in connections() if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]
    # The kernel may list one twice while others come and go, and one that has ended as 0.
    (inode,) = {row[9] for row in rows} - {"0"}
    (pid,) = [pid for pid in server.api_pids() if f"socket:[{inode}]" in descriptors(pid)]
    return pid


def connections_of_both(server: RunningServer) -> dict[int, socket.socket]:
    """A connection to each API process, by its process id."""
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + 30
    while len(found) < 2:
        assert time.monotonic() < end, "one process accepts everything"
        connection = server.connect()
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        found.setdefault(owner_of(server, connection), connection)
    return found


def asked(connection: socket.socket, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of a request on a connection that stays open."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1 << 16)
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    length = int(re.search(rb"(?i)content-length: (\d+)", head_bytes)[1])
    while len(rest) < length:
        rest += connection.recv(1 << 16)
    return int(head_bytes.split()[1]), json.loads(rest) if rest[:1] in b"{[" and rest else rest


def _rest(connection: socket.socket) -> bytes:
    """What comes until the connection ends."""
    text = b""
    try:
        while piece := connection.recv(1 << 20):
            text += piece
    except ConnectionResetError:
        pass
    return text


PROMPT = {"prompt": "ban fick", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def num_running(server: RunningServer) -> float:
    return server.metric("vllm:num_requests_running")


def test_both_processes_answer_and_one_scrape_counts_all(server: RunningServer) -> None:
    counts = {
        "vllm:generation_tokens_total": 48,
        "vllm:prompt_tokens_total": 12,
        "vllm:time_to_first_token_seconds_count": 6,
        "vllm:request_success_total": 6,
        "vllm:e2e_request_latency_seconds_count": 6,
    }
    before = {name: server.metric(name) for name in counts}
    connections = connections_of_both(server)
    texts = set()
    for connection in connections.values():
        for _ in range(3):
            status, answer = asked(connection, "POST", "/v1/completions", PROMPT)
            assert status == 200
            texts.add(answer["choices"][0]["text"])
    assert len(texts) == 1
    for connection in connections.values():
        text = asked(connection, "GET", "/metrics")[1].decode()
        for name, num in counts.items():
            values = re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)", text, re.M)
            assert sum(map(float, values)) - before[name] == num, name
        assert re.findall(r'sleep_state="awake"\} (\S+)', text) == ["1.0"]
        assert text.count("\npython_info{") == 1
        assert len(re.findall(r'heartbeat\{process="API process [01]"\}', text)) == 2


def test_events_have_the_tokens_of_the_interval(server: RunningServer) -> None:
    events = server.events("/v1/completions", **{**PROMPT, "max_tokens": 40}, return_token_ids=True)
    first, *middle, last = [len(event["choices"][0]["token_ids"]) for event in events]
    assert first == 1 and min(middle) >= 4 and first + sum(middle) + last == 40


def test_a_client_that_leaves_aborts_its_own_request_beside_one_of_the_same_id(
    server: RunningServer,
) -> None:
    expected = server.complete(**{**PROMPT, "max_tokens": 900})["choices"][0]["text"]
    first, second = connections_of_both(server).values()
    for connection in (first, second):
        body = json.dumps({**PROMPT, "max_tokens": 900, "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: same\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
    assert first.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: num_running(server) == 2)
    first.close()
    wait_until(lambda: num_running(server) == 1)
    assert server.metric("vllm:num_requests_waiting") == 0
    answer = _rest(second)
    events = [line[6:] for line in answer.split(b"\r\n") if line.startswith(b"data: {")]
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == expected
    assert answer.rstrip().endswith(b"0") and b"[DONE]" in answer
    wait_until(lambda: num_running(server) == 0)


def test_places_for_requests_are_those_of_the_whole_server(server: RunningServer) -> None:
    first, second = connections_of_both(server).values()
    server.send_completion(first, n=12, temperature=1.0, stream=True)
    assert first.recv(1000).startswith(b"HTTP/1.1 200")
    status, answer = asked(second, "POST", "/v1/completions", PROMPT)
    assert status == 429
    assert "12 sequences are running or waiting already" in answer["error"]["message"]
    assert asked(second, "GET", "/load") == (200, {"server_load": 1})
    assert server.metric("vllm:num_requests_running") == 8
    assert server.metric("vllm:num_requests_waiting") == 4
    first.close()
    wait_until(lambda: asked(second, "POST", "/v1/completions", PROMPT)[0] == 200)


def test_all_tell_the_same_of_the_model(server: RunningServer) -> None:
    first, second = connections_of_both(server).values()
    assert asked(first, "GET", "/v1/models") == asked(second, "GET", "/v1/models")


def test_a_stored_response_is_there_for_all(server: RunningServer) -> None:
    first, second = connections_of_both(server).values()
    request = {"input": "ban fick", "max_output_tokens": 8, "temperature": 0}
    status, made = asked(first, "POST", "/v1/responses", request)
    assert status == 200
    assert asked(second, "GET", f"/v1/responses/{made['id']}") == (200, made)
    goes_on = {**request, "previous_response_id": made["id"]}
    status, answer = asked(second, "POST", "/v1/responses", goes_on)
    assert status == 200
    assert answer["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]},
                 {"role": "user", "content": "and"}]  # fmt: skip
    assert asked(second, "POST", "/v1/responses", {**request, "input": reference})[0] == 200
    status, page = asked(second, "GET", f"/v1/responses/{made['id']}/input_items")
    assert page["data"][0]["content"][0]["text"] == "ban fick"
    whole = [{"role": "user", "content": "and", "of_the_client": 10**29}]
    assert asked(second, "POST", "/v1/responses", {**request, "input": whole})[0] == 200
    assert asked(first, "DELETE", f"/v1/responses/{made['id']}")[0] == 200
    status, answer = asked(second, "GET", f"/v1/responses/{made['id']}")
    assert (status, answer["error"]["code"]) == (404, "response_not_found")
    status, answer = asked(first, "POST", "/v1/responses", goes_on)
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.slow
def test_sleep_and_kernels_are_those_of_the_engine(server: RunningServer) -> None:
    first, second = connections_of_both(server).values()
    assert asked(first, "POST", "/sleep")[0] == 200
    assert asked(second, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert asked(first, "POST", "/wake_up")[0] == 200
    assert asked(second, "GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert asked(second, "POST", "/v1/completions", PROMPT)[0] == 200
    shown = [asked(connection, "GET", "/kernels")[1] for connection in (first, second)]
    assert shown[0] == shown[1] and shown[0]
    busy = in_background(server, **LONG)
    wait_until(lambda: num_running(server) == 1)
    status, answer = asked(second, "POST", "/sleep")
    assert status == 400
    assert "cannot sleep while it has requests" in answer["error"]["message"]
    assert busy.join().status == 200


def test_a_process_that_dies_is_replaced_and_its_requests_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started_server(tiny_model, tmp_path / "log", *FLAGS, "--restarts", "1") as server:
        connections = connections_of_both(server)
        (killed, lost), (other, kept) = connections.items()
        for connection in (lost, kept):
            server.send_completion(connection, stream=True, max_tokens=1900)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until(lambda: num_running(server) == 2)
        os.kill(killed, signal.SIGKILL)
        assert b"[DONE]" not in _rest(lost)
        text = b""
        while b"[DONE]" not in text:
            text += kept.recv(1 << 20)
        assert b'"finish_reason":"length"' in text and b"error" not in text
        assert num_running(server) == 0
        # Computed to the end, the lost request would make it twice the tokens.
        assert 1900 <= server.metric("vllm:iteration_tokens_total_sum") < 1.9 * 1900
        wait_until(lambda: len(server.api_pids()) == 2 and killed not in server.api_pids())
        both = connections_of_both(server)
        assert other in both
        assert {asked(c, "POST", "/v1/completions", PROMPT)[0] for c in both.values()} == {200}
        assert server.metric("vllm:request_success_total") >= 3
        assert re.search(rf"API process [01] \(pid {killed}\) died \(killed by SIGKILL",
                         server.log.read_text())  # fmt: skip

        os.kill(other, signal.SIGKILL)
        assert server.process.wait(15) == 1
        said = rf"vllm: error: API process [01] \(pid {other}\) died .* after 1 restarts within"
        assert re.search(said, server.log.read_text())


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named_killed_and_replaced(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started_server(tiny_model, tmp_path / "log", *FLAGS, "--dead-after", "8") as server:
        (stopped, _), (_, other) = connections_of_both(server).items()
        os.kill(stopped, signal.SIGSTOP)
        named = re.compile(rf"API process [01] \(pid {stopped}\) gives no sign of life")
        wait_until(lambda: named.search(server.log.read_text()) is not None, 10)
        assert asked(other, "POST", "/v1/completions", PROMPT)[0] == 200
        start = time.monotonic()
        assert b"vllm:generation_tokens_total" in asked(other, "GET", "/metrics")[1]
        assert time.monotonic() - start < 5
        wait_until(lambda: len(set(server.api_pids()) - {stopped}) == 2)
        assert "killed after 8 s (--dead-after); it is being started" in server.log.read_text()
        assert len(connections_of_both(server)) == 2


@pytest.mark.slow
def test_a_chat_template_that_is_wrong_ends_the_start(tiny_model: Path) -> None:
    ended = run_cli("serve", str(tiny_model), "--port", "0", "--chat-template", "{% x %}", *FLAGS)
    assert ended.returncode == 2
    assert "vllm: error: --chat-template, line 1: " in ended.stderr


@pytest.mark.slow
def test_a_unix_socket_is_shared_too(tiny_model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([*COMMAND, "serve", str(tiny_model), "--uds", path, *FLAGS],
                                   stdout=output, stderr=output, env=environment())  # fmt: skip
    try:
        wait_until(lambda: "Serving" in log.read_text(), 100)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            assert asked(connection, "POST", "/v1/completions", PROMPT)[0] == 200
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_sigterm_lets_requests_of_both_finish(tiny_model: Path, tmp_path: Path) -> None:
    with started_server(tiny_model, tmp_path / "log", *FLAGS) as server:
        (first, second), third = connections_of_both(server).values(), server.connect()
        for connection in (first, second):
            server.send_completion(connection, stream=True, max_tokens=1900)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        children = server.engine_pids()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: asked(third, "GET", "/health")[0] == 503, 10)
        for connection in (first, second):
            text = _rest(connection)
            assert b"[DONE]" in text and b'"finish_reason":"length"' in text
        assert server.process.wait(20) == 0
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 5)


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tiny_model: Path, tmp_path: Path) -> None:
    with started_server(tiny_model, tmp_path / "log", *FLAGS) as server:
        both = list(connections_of_both(server).values())
        for connection in both:
            server.send_completion(connection, stream=True, n=16, temperature=1.0)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.get("/health").status == 503)
        server.process.send_signal(signal.SIGINT)
        for connection in both:
            text = _rest(connection)
            assert b"the server is shutting down" in text and b"[DONE]" in text
        assert server.process.wait(15) == 0
        assert "Traceback" not in server.log.read_text()


def test_all_tell_of_an_engine_that_dies_and_of_the_next_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    with started_server(tiny_model, tmp_path / "log", *FLAGS, "--restarts", "1") as server:
        first, second = connections_of_both(server).values()
        expected = asked(first, "POST", "/v1/completions", PROMPT)[1]["choices"][0]["text"]
        (engine,) = set(server.engine_pids()) - set(server.api_pids())
        os.kill(engine, signal.SIGKILL)
        for connection in (first, second):
            wait_until(lambda c=connection: asked(c, "GET", "/health")[0] == 503, 10)  # type: ignore[misc]
            status, answer = asked(connection, "POST", "/v1/completions", PROMPT)
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            assert "the engine is being started again" in answer["error"]["message"]
        for connection in (first, second):
            wait_until(lambda c=connection: asked(c, "GET", "/health")[0] == 200)  # type: ignore[misc]
            answer = asked(connection, "POST", "/v1/completions", PROMPT)[1]
            assert answer["choices"][0]["text"] == expected
        (engine,) = set(server.engine_pids()) - set(server.api_pids())
        os.kill(engine, signal.SIGKILL)
        for connection in (first, second):
            wait_until(lambda c=connection: asked(c, "GET", "/health")[0] == 503, 10)  # type: ignore[misc]
            assert "killed by SIGKILL" in asked(connection, "GET", "/health")[1]["error"]["message"]
        assert server.process.wait(20) == 1
        assert "vllm: error: the engine process died" in server.log.read_text()


@pytest.mark.parametrize("value", ["0", "-1", "abc", "65", "1.5", ""])
def test_a_count_that_is_none_is_refused(value: str) -> None:
    ended = run_cli("serve", "./model", f"--api-server-count={value}")
    assert ended.returncode == 2
    assert "--api-server-count" in ended.stderr
    assert "a count from 1 to 64" in ended.stderr
