"""Requests made to stall a server, and a watch over how fast it answers /health meanwhile."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .serving import RunningServer

MIB = 1 << 20
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = b'{"role": "user", "content": "hi"}'


def _list(item: bytes, count: int) -> bytes:
    return b"[" + b", ".join([item] * count) + b"]"


def _chat(name: bytes, value: bytes) -> bytes:
    return b'{"messages": [' + USER + b'], "' + name + b'": ' + value + b"}"


def _said(content: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + content + b'"}]}'


def _text(name: bytes, value: bytes) -> bytes:
    return b'{"prompt": "a", "max_tokens": 1, "' + name + b'": ' + value + b"}"


def _objects(count: int, make: Callable[[int], bytes]) -> bytes:
    return b",".join(map(make, range(count)))


def _tool(number: int) -> bytes:
    return b'{"type": "function", "function": {"name": "f%d"}}' % number


def _schema(size: int) -> bytes:
    field = b'"p%d": {"type": "string", "description": "%b"}'
    many = _objects(size // 180, lambda i: field % (i, b"d" * 140))
    return b'{"type": "object", "properties": {"in": {"type": "object"}, ' + many + b"}}"


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "800,000 wrong messages": (CHAT, lambda: b'{"messages": ' + _list(b'{"x": 1}', 800_000) + b"}"),
    "49,000 wrong messages": (CHAT, lambda: b'{"messages": ' + _list(b'{"x": 1}', 49_000) + b"}"),
    "99,000 messages": (CHAT, lambda: b'{"messages": ' + _list(USER, 99_000) + b"}"),
    "64 MiB of {}": (CHAT, lambda: b'{"messages": [' + b"{}," * (21 * MIB) + b"{}]}"),
    "8 MiB of numbers": (TEXT, lambda: b'{"prompt": [' + b"1," * (4 * MIB - 99) + b"1]}"),
    "4,000,000 stop_token_ids": (TEXT, lambda: _text(b"stop_token_ids", _list(b"1", 2_600_000))),
    "1,000,000 wrong stop_token_ids":
        (TEXT, lambda: _text(b"stop_token_ids", _list(b'"a"', 1_000_000))),
    "1,000,000 prompts": (TEXT, lambda: b'{"prompt": ' + _list(b'"ab"', 1_000_000) + b"}"),
    "2,048 prompts": (TEXT, lambda: b'{"prompt": ' + _list(b'"ab"', 2048) + b"}"),
    "1,000,000 stop texts": (TEXT, lambda: _text(b"stop", _list(b'"ab"', 1_000_000))),
    "480,000 logit_bias":
        (TEXT, lambda: _text(b"logit_bias", b"{%b}" % _objects(480_000, lambda i: b'"%d":1' % i))),
    "1,000,000 logit_bias": (CHAT, lambda: _chat(
        b"logit_bias", b"{%b}" % _objects(1_000_000, lambda i: b'"%d":1' % i))),
    "7,000 unknown fields": (TEXT, lambda: b'{"prompt": "a", %b}' % _objects(
        6000, lambda i: b'"k%d":1' % i)),
    "16,000 unknown fields": (TEXT, lambda: b'{"prompt": "a", %b}' % _objects(
        16_000, lambda i: b'"key%d":1' % i)),
    "100,000 tools": (CHAT, lambda: _chat(b"tools", b"[%b]" % _objects(100_000, _tool))),
    "49,000 tools": (CHAT, lambda: _chat(b"tools", b"[%b]" % _objects(49_000, _tool))),
    "49,000 tools, one named": (CHAT, lambda: _chat(
        b"tool_choice", b'{"type": "function", "function": {"name": "nosuch"}}, "tools": [%b]'
        % _objects(49_000, _tool))),
    "5 MiB schema": (TEXT, lambda: _text(b"guided_json", _schema(5 * MIB))),
    "1.5 MiB schema": (TEXT, lambda: _text(b"guided_json", _schema(3 * MIB // 2))),
    "100,000 x [": (TEXT, lambda: b'{"prompt": %b' % (b"[" * 100_000)),
    "[[[[ of 8 MiB": (TEXT, lambda: b"[" * (8 * MIB)),
    "a number of 8 MiB": (TEXT, lambda: b'{"prompt": %b}' % (b"1" * (8 * MIB - 99))),
    "a key of 7 MiB": (TEXT, lambda: b'{"%b": 1}' % (b"k" * (7 * MIB))),
    "60 MiB message": (CHAT, lambda: _said(b"ban " * (15 * MIB))),
    "60 MiB message of emoji": (CHAT, lambda: _said("\U0001f600".encode() * (15 * MIB))),
    "60 MiB message of \\n": (CHAT, lambda: _said(b"\\n" * (30 * MIB))),
    "60 MiB message of {": (CHAT, lambda: _said(b"{" * (60 * MIB))),
    "60 MiB message of \\\\\\\"": (CHAT, lambda: _said(b'\\"{\\\\' * (12 * MIB))),
    "7 MiB prompt": (TEXT, lambda: b'{"prompt": "%b"}' % (b"ban " * (7 * MIB // 4))),
    "4 MiB prompt, truncated": (TEXT, lambda: b'{"prompt": "%b", "truncate_prompt_tokens": 9}'
        % (b"ban " * (MIB - 9))),
    "1 MiB prompt, truncated": (TEXT, lambda: b'{"prompt": "%b", "truncate_prompt_tokens": 9}'
        % (b"ban " * (MIB // 4))),
    "25 KiB prompt of one word": (TEXT, lambda: b'{"prompt": "%b"}' % (b"a" * 25_000)),
    "8 MiB to /detokenize": ("/detokenize", lambda: b'{"tokens": %b}' % _list(b"5", 2_700_000)),
    "99,000 items": ("/v1/responses", lambda: b'{"input": %b}' % _list(USER, 99_000)),
    "99,000 messages of messages":
        ("/v1/messages", lambda: b'{"max_tokens": 1, "messages": %b}' % _list(USER, 99_000)),
}  # fmt: skip


@dataclass
class Watch:
    """slowest: seconds of the slowest answer of /health."""

    slowest: float = 0.0
    num_asked: int = 0
    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched_health(server: RunningServer, path: str = "/health") -> Iterator[Watch]:
    """Asks for /health all the time, over new connections."""
    watch, ended = Watch(), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            start = time.monotonic()
            try:
                if (status := server.get(path).status) != 200:
                    watch.failures.append(f"status {status}")
            except OSError as error:
                watch.failures.append(repr(error))
            watch.slowest = max(watch.slowest, time.monotonic() - start)
            watch.num_asked += 1
            ended.wait(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
