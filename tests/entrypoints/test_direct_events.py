"""Events that are written when tokens arrive have the bytes of those that a generator yields."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm import AsyncLLM
from vllm.entrypoints.openai.direct_events import DirectEvents
from vllm.entrypoints.openai.http_protocol import Connection, http_protocol
from vllm.entrypoints.openai.server import Server
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.entrypoints.openai.stop import Stop

TOKENS = 60
SETTINGS = {
    **dict.fromkeys(ServerSettings.__dataclass_fields__), "api_key": (), "allowed_origins": (),
    "api_server_count": 1, "default_chat_template_kwargs": {}, "generation_config": "auto",
    "override_generation_config": {}, "max_waiting": 0, "max_request_bytes": 1 << 20,
    "shutdown_timeout": 5.0, "root_path": "", "ssl_cert_reqs": 0, "uvicorn_log_level": "warning",
    "disable_log_requests": True, "response_role": "assistant",
}  # fmt: skip
COMPLETION = ("/v1/completions", {"prompt": "ban fick"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ban fick"}]})
WITH_USAGE = {"stream_options": {"include_usage": True}}
BODIES = {
    "completion": COMPLETION,
    "completion with usage": (COMPLETION[0], COMPLETION[1] | WITH_USAGE),
    "chat": CHAT,
    "chat with usage and a stop text": (CHAT[0], CHAT[1] | WITH_USAGE | {"stop": ["no such"]}),
    "two choices": (CHAT[0], CHAT[1] | {"n": 2, "temperature": 1, "seed": 5}),
    "logprobs": (CHAT[0], CHAT[1] | {"logprobs": True}),
    "token ids": (COMPLETION[0], COMPLETION[1] | {"return_token_ids": True}),
}
HAVE_MORE_THAN_TEXT = {"two choices", "logprobs", "token ids"}


async def exchange(port: int, path: str, fields: Any) -> bytes:
    """The whole response to a stream of TOKENS tokens, as it is on the wire."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    same = {"stream": True, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    body = json.dumps({**same, **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: same\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    text = await reader.read()
    writer.close()
    return text


def events(response: bytes) -> list[bytes]:
    """Those of a response, which must be whole chunks up to the last, but for their time."""
    head, _, rest = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding: chunked" in head.lower()
    body, size = b"", -1
    while size:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        body, rest = body + rest[:size], rest[size:]
        assert rest.startswith(b"\r\n")
        rest = rest[2:]
    assert rest == b"" and body.endswith(b"\n\n")
    return re.sub(rb'"created":\d+', b'"created":0', body).split(b"\n\n")[:-1]


def shapes(told: list[bytes]) -> set[bytes]:
    """The events without their texts: how many tokens one has depends on the clock."""
    return {re.sub(rb'"(text|content|reasoning|reasoning_content)":"([^"\\]|\\.)*"', rb'"\1":""', e)
            for e in told}  # fmt: skip


def text_of(told: list[bytes]) -> str:
    choices = [choice for event in told if event != b"data: [DONE]"
               for choice in json.loads(event[6:])["choices"] if not choice["index"]]  # fmt: skip
    parts = [choice.get("delta") or choice for choice in choices]
    return "".join(part.get("text") or part.get("content") or part.get("reasoning") or ""
                   for part in parts)  # fmt: skip


def served(model: Path, body: Callable[[int], Awaitable[None]], **settings: Any) -> None:
    """Runs `await body(port)` beside a server in this process."""

    async def run() -> None:
        llm, stop = AsyncLLM(EngineArgs.from_keywords(model=str(model))), Stop()
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                # Else the kernel takes a whole answer, whether its client reads or not.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                ready = asyncio.Event()
                server = Server(llm, ServerSettings(**{**SETTINGS, **settings}), stop)
                serving = asyncio.create_task(server.run(listener, lambda name: ready.set()))
                await asyncio.wait(
                    {serving, asyncio.create_task(ready.wait())},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                await body(listener.getsockname()[1])
                stop.raise_to(1)
                await serving
        finally:
            await llm.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("reasoning", [None, "qwen3"])
def test_direct_events_have_the_bytes_of_those_of_the_generator(
    tiny_model: Path, reasoning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    write, tell = Connection.write, DirectEvents.tell

    def noted(self: Connection, part: bytes) -> None:
        written.append(part)
        write(self, part)

    monkeypatch.setattr(Connection, "write", noted)

    async def body(port: int) -> None:
        for name, (path, fields) in BODIES.items():
            written.clear()
            direct = events(await exchange(port, path, fields))
            num_direct = len(written)
            assert num_direct == 0 if name in HAVE_MORE_THAN_TEXT else num_direct > TOKENS / 3, name
            monkeypatch.setattr(DirectEvents, "tell", lambda self, state: False)
            others = events(await exchange(port, path, fields))
            monkeypatch.setattr(DirectEvents, "tell", tell)
            assert text_of(direct) == text_of(others) != ""
            if name not in HAVE_MORE_THAN_TEXT:
                assert shapes(direct) == shapes(others)
            assert direct[-1] == others[-1] == b"data: [DONE]"
            if "usage" in name:
                assert direct[-2] == others[-2]
                assert json.loads(direct[-2][6:])["usage"]["completion_tokens"] == TOKENS

    served(tiny_model, body, reasoning_parser=reasoning)


def test_a_client_that_reads_nothing_gets_all_of_it_later(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its events wait as text, not as bytes to send."""
    held: list[int] = []
    write = Connection.write

    def noted(self: Connection, part: bytes) -> None:
        write(self, part)
        held.append(self._cycle.transport.get_write_buffer_size())

    monkeypatch.setattr(Connection, "write", noted)

    async def body(port: int) -> None:
        fields = {"prompt": "ban fick", "max_tokens": 1500}
        quick = text_of(events(await exchange(port, "/v1/completions", fields)))
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        asked = json.dumps({**fields, "stream": True, "ignore_eos": True, "temperature": 0})
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\n\r\n"
        )
        slow.sendall((head + asked).encode())
        await asyncio.sleep(3)  # more than it takes to make
        parts = []
        slow.settimeout(20)
        while part := await asyncio.to_thread(slow.recv, 1 << 16):
            parts.append(part)
        assert text_of(events(b"".join(parts))) == quick
        assert 60_000 < max(held) < 70_000

    served(tiny_model, body)


PARTS = [b"one", b"x" * 5000, b"last"]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_parts_past_uvicorn_are_chunks_of_its_response(version: str, method: str) -> None:
    found: list[Connection | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        connection = Connection.of(send)
        found.append(connection)
        for part in PARTS:
            if connection is not None:
                assert connection.is_ready
                connection.write(part)
            await send({"type": "http.response.body", "body": b"," + part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run() -> bytes:
        config = uvicorn.Config(app, http=http_protocol(), lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            ask = f"{method} / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n"
            writer.write(ask.encode())
            text = await reader.read()
            writer.close()
            server.should_exit = True
            await serving
        return text

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    is_direct = (version, method) == ("1.1", "GET")
    assert (found[0] is not None) == is_direct
    if is_direct:
        sent = [given for part in PARTS for given in (part, b"," + part)]
        assert body == b"".join(b"%x\r\n%b\r\n" % (len(s), s) for s in [*sent, b""])
    elif method == "GET":
        assert all(b"," + part in body for part in PARTS)
    else:
        assert body == b""


def test_what_is_no_send_of_uvicorn_has_no_connection() -> None:
    async def send(message: Any) -> None:
        pass

    assert Connection.of(send) is None
    assert Connection.of([].append) is None
