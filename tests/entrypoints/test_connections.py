"""Clients that go away, or never read, harm nobody."""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from slowness import slowness

from vllm.entrypoints.openai import http

from .serving import RunningServer, wait_until

NUM_SILENT = 600
ABORTED = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'


def is_idle(server: RunningServer) -> bool:
    return (
        server.metric("vllm:num_requests_running") == 0
        and server.metric("vllm:num_requests_waiting") == 0
    )


def vanish(connection: socket.socket) -> None:
    """Closes with a reset, as a killed client does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "n": 4},
                                    {"prompt": ["ban", "mest", "tu"]}])  # fmt: skip
def test_a_request_ends_when_its_client_goes_away(server: RunningServer, fields: Any) -> None:
    wait_until(lambda: is_idle(server))
    before = server.metric(ABORTED)
    connection = server.connect()
    server.send_completion(connection, temperature=1.0, **fields)
    wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
    if "stream" in fields:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    vanish(connection)
    start = time.monotonic()
    wait_until(lambda: is_idle(server), 20)
    assert time.monotonic() - start < 1.5 * slowness()
    assert server.metric(ABORTED) > before


def test_a_request_that_waits_leaves_the_queue_with_its_client(server: RunningServer) -> None:
    running = [server.connect() for _ in range(64)]
    for connection in running:
        server.send_completion(connection)
    waiting = server.connect()
    server.send_completion(waiting)
    wait_until(lambda: server.metric("vllm:num_requests_waiting") == 1)
    vanish(waiting)
    wait_until(lambda: server.metric("vllm:num_requests_waiting") == 0, 20)
    assert server.metric("vllm:num_requests_running") == 64
    for connection in running:
        vanish(connection)
    wait_until(lambda: is_idle(server), 30)


@pytest.mark.slow
def test_hundreds_of_clients_that_never_read_stall_nobody(server: RunningServer) -> None:
    """Each is sent more than it takes; what it does not take must not pile up here."""
    server.complete()
    before = server.memory()
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_SILENT):
            connection = stack.enter_context(server.connect(receive_buffer=4096))
            server.send_completion(connection, stream=True, logprobs=5, max_tokens=60)
        assert server.get("/health").status == 200  # behind all of them in the queue
        slowest = 0.0
        for _ in range(20):
            start = time.monotonic()
            assert server.get("/health").status == 200
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.1)
        assert slowest < 2
        assert server.complete(max_tokens=4)["usage"]["completion_tokens"] == 4
        wait_until(lambda: is_idle(server), 40)
        assert server.memory() - before < NUM_SILENT * 200_000
    wait_until(lambda: is_idle(server), 30)


def test_a_client_that_takes_nothing_of_its_stream_loses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No event is made while the one before waits."""
    monkeypatch.setattr(http, "_SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    made, sent, is_closed = [], [], []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            for number in range(100):
                made.append(number)
                yield b"%d" % number
        finally:
            is_closed.append(True)

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 5:
            await asyncio.sleep(60)

    async def receive() -> Any:
        await asyncio.sleep(60)

    scope = {"type": "http", "state": {"vllm.send": send}}
    asyncio.run(http.EventStream(b"first", events())(scope, receive, send))
    assert made == [0, 1, 2]
    assert is_closed == [True]
    assert "a client took nothing for" in caplog.text


def test_silent_connections_are_only_connections(server: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        for i in range(NUM_SILENT):
            connection = stack.enter_context(server.connect())
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"[: i % 40])
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_requests_side_by_side_get_their_own_answers(server: RunningServer) -> None:
    prompts = [f"ban {word}" for word in ("mest", "tu", "lon", "fick", "past", "rin")] * 4
    expected = {prompt: server.complete(prompt=prompt)["choices"] for prompt in set(prompts)}
    got: list[tuple[str, Any]] = []
    threads = [
        threading.Thread(target=lambda p=p: got.append((p, server.complete(prompt=p)["choices"])))
        for p in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(prompts)
    assert all(choices == expected[prompt] for prompt, choices in got)


def test_one_connection_carries_many_requests(server: RunningServer) -> None:
    body = b'{"prompt": "ban", "max_tokens": 1}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    with server.connect() as connection:
        connection.sendall(request * 3)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 3:
            piece = connection.recv(65536)
            assert piece
            received += piece
