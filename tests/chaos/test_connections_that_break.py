"""Connections that are dropped, half open, or slow."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
from pathlib import Path

import pytest
from entrypoints.serving import RunningServer

from .harness import Fault, descriptors, tokens, wait_for

pytestmark = pytest.mark.chaos


def is_idle(server: RunningServer) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return all(server.metric(name) == 0 for name in names)


def test_connections_dropped(fault: Fault, server: RunningServer) -> None:
    """200 connections are reset in the middle of their streams."""
    expected, before = tokens(server), descriptors(server.process.pid)
    connections = [server.connect() for _ in range(200)]
    for connection in connections:
        with contextlib.suppress(OSError):
            server.send_completion(connection, stream=True)
    fault.begins()
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    wait_for(lambda: is_idle(server), 60)
    fault.recovered()
    assert tokens(server) == expected
    wait_for(lambda: descriptors(server.process.pid) <= before + 5, 30)


def test_connections_half_open(fault: Fault, server: RunningServer) -> None:
    """500 connections send half a request and stay."""
    expected = tokens(server)
    connections = [server.connect() for _ in range(500)]
    fault.begins()
    for number, connection in enumerate(connections):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        body = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        connection.sendall(head + body if number % 2 else head)
    assert tokens(server) == expected
    fault.recovered()
    for connection in connections:
        connection.close()


def test_readers_slow(fault: Fault, server: RunningServer) -> None:
    """30 readers ask for long streams with logprobs and read nothing."""
    expected, before = tokens(server), server.memory()
    connections = [server.connect(receive_buffer=4096) for _ in range(30)]
    fault.begins()
    for connection in connections:
        server.send_completion(connection, stream=True, logprobs=5)
    assert tokens(server) == expected
    fault.recovered()
    wait_for(lambda: is_idle(server), 120)
    assert server.memory() - before < 200 << 20
    for connection in connections:
        connection.close()


def test_log_not_read(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """The reader of the log's pipe is stopped (SIGSTOP) under requests that are logged."""
    log = tmp_path / "log"
    log.touch()
    with log.open("ab") as file:
        reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    assert reader.stdin is not None
    try:
        with fault.server(tiny_model, log, log_pipe=reader.stdin.fileno()) as server:
            expected = tokens(server)
            os.kill(reader.pid, signal.SIGSTOP)
            fault.begins()
            for _ in range(1000):
                assert server.post("/v1/completions", {"prompt": 5}).status == 400
            assert tokens(server) == expected
            os.kill(reader.pid, signal.SIGCONT)
            wait_for(lambda: server.get("/health").status == 200 and _says_lost(server), 10)
            fault.recovered()
    finally:
        reader.kill()
        reader.wait()


def _says_lost(server: RunningServer) -> bool:
    server.post("/v1/completions", {"prompt": 5})
    return "as nobody read the log" in server.log.read_text()
