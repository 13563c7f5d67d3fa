"""No request stalls the server: /health and /metrics answer while hostile ones are worked on."""

import asyncio
import contextlib
import gzip
import json
import threading
from typing import Any

import pytest
import uvicorn
from slowness import slowness
from uvicorn.server import ServerState

from vllm.entrypoints.openai import bodies, http_protocol, prompts
from vllm.entrypoints.openai.bodies import LIMITS, parse_object
from vllm.entrypoints.openai.errors import MAX_MESSAGE_CHARS, ApiError
from vllm.entrypoints.openai.field_policy import read_request
from vllm.entrypoints.openai.prompts import Prompts
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from vllm.errors import QueueFullError, RequestError

from .hostile import CHAT, HOSTILE, TEXT, USER, watched_health
from .serving import RunningServer

QUICK = (
    "800,000 wrong messages", "99,000 messages of messages", "49,000 tools, one named",
    "16,000 unknown fields", "60 MiB message", "480,000 logit_bias",
)  # fmt: skip
JSON = "Content-Type: application/json\r\n"


def check_hostile(server: RunningServer, name: str, watched: str) -> None:
    path, make = HOSTILE[name]
    body = make()
    with watched_health(server, watched) as watch:
        answer = server.post(path, body)
    assert watch.failures == []
    assert watch.slowest < slowness()
    assert answer.status in (200, 400, 413), answer.body[:300]
    if answer.status != 200:
        assert len(answer.body) < MAX_MESSAGE_CHARS + 200
    assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", QUICK)
def test_health_answers_while_a_hostile_request_is_refused(
    server: RunningServer, name: str
) -> None:
    check_hostile(server, name, "/health")


@pytest.mark.slow
@pytest.mark.parametrize("watched", ["/health", "/metrics"])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_request_stalls_the_server(
    server: RunningServer, name: str, watched: str
) -> None:
    check_hostile(server, name, watched)


@pytest.mark.slow
@pytest.mark.parametrize("watched", ["/health", "/metrics"])
def test_hostile_requests_at_once_stall_nobody(server: RunningServer, watched: str) -> None:
    names = ("800,000 wrong messages", "49,000 tools", "60 MiB message of \\n", "99,000 items",
             "1 MiB prompt, truncated", "8 MiB to /detokenize")  # fmt: skip
    requests = [(path, make()) for path, make in (HOSTILE[name] for name in names)]
    with watched_health(server, watched) as watch:
        threads = [threading.Thread(target=server.post, args=request) for request in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watch.failures == []
    assert watch.slowest < slowness()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a": [' + b"{}," * 100_000 + b"{}]}", "objects and arrays"),
        (b'{"a": [' + b'"",' * 1_000_000 + b'""]}', "texts"),
        (b'{"a": [' + b"1," * 4_000_001 + b"1]}", "values"),
        (b'{"a": {' + b'"b":1,' * 500_000 + b'"b":1}}', "fields"),
        # Texts that hold what is counted change nothing about that.
        (b'{"t": "\\"{\\\\", "a": [' + b"{}," * 100_000 + b"{}]}", "objects and arrays"),
        (b'{"t": "' + b"{" * 200_000 + b'", "a": [' + b"{}," * 100_000 + b"{}]}", "objects"),
        # Until its first mistake even what is no JSON is counted.
        (b'{"a": [' + b"{}," * 100_000 + b'{}], "\\', "objects and arrays"),
    ],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(body: bytes, told: str) -> None:
    with pytest.raises(ApiError, match=f"more than [0-9]+ {told}") as caught:
        parse_object(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "text",
    ["{[" * 100_000, '"' * 3_000_000, ":" * 600_000, "\\" * 100_001 + '"{' * 100_000 + "\\",
     '\\"' * 100_000 + "{" * 200_000],
)  # fmt: skip
def test_texts_may_hold_any_number_of_marks(text: str) -> None:
    body = json.dumps({"prompt": text, "after": "x"}).encode()
    assert parse_object(body) == {"prompt": text, "after": "x"}


def test_a_gzip_body_may_have_some_members_and_not_any_number() -> None:
    """400,000 of them would take hours."""
    member = gzip.compress(b" ")
    assert bodies._inflated(bytearray(member * 64), 1 << 20) == b" " * 64
    with pytest.raises(ApiError, match="more than 64 members"):
        bodies._inflated(bytearray(gzip.compress(b"") * 400_000), 1 << 20)


def test_a_body_at_the_limits_is_parsed() -> None:
    many = LIMITS["objects and arrays"][1] - 2
    assert len(parse_object(b'{"a": [' + b"{}," * (many - 1) + b"{}]}")["a"]) == many


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (ChatCompletionRequest, {"messages": [{"x": 1}] * 50_000}, "messages.0.role is missing"),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}],
                                 "tools": [{"type": "function"}] * 50_000},
         "tools.0.function is missing"),
        (CompletionRequest, {"prompt": "a", "bad_words": [1] * 900_000}, "bad_words.0 "),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 900_000},
         "stop_token_ids.0 "),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * 900_000}, "guided_choice.0 "),
    ],
)  # fmt: skip
def test_of_many_wrong_items_the_first_is_told(kind: Any, fields: Any, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(kind, fields)
    assert caught.value.message.startswith(told)
    assert ";" not in caught.value.message


def test_an_error_is_short_whatever_it_quotes() -> None:
    tools = [{"type": "function", "function": {"name": f"tool{i}"}} for i in range(1000)]
    choice = {"type": "function", "function": {"name": "x"}}
    message = {"role": "user", "content": "a"}
    request, _ = read_request(
        ChatCompletionRequest, {"messages": [message], "tools": tools, "tool_choice": choice}
    )
    with pytest.raises(RequestError) as caught:
        request.check()
    assert len(ApiError(400, str(caught.value)).message) == MAX_MESSAGE_CHARS


def test_names_like_unknown_fields_are_looked_for_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(
        "vllm.entrypoints.openai.errors.did_you_mean", lambda *names: calls.append(names) or ""
    )
    unknown = {f"field{i}": 1 for i in range(1000)}
    _, left_out = read_request(CompletionRequest, {"prompt": "a", **unknown})
    assert left_out.keys() == unknown.keys()
    assert len(calls) < 20


@pytest.mark.parametrize(
    ("path", "num_mib", "status"),
    [(CHAT, 9, 400), (CHAT, 65, 413), ("/v1/messages", 9, 400), ("/v1/responses", 9, 400),
     (TEXT, 9, 413), ("/tokenize", 9, 413)],
)  # fmt: skip
def test_chat_may_send_64_mib_and_others_8(
    server: RunningServer, path: str, num_mib: int, status: int
) -> None:
    answer = server.post(path, b'{"x": "' + b"a" * (num_mib << 20) + b'"}')
    assert answer.status == status, answer.body[:300]


def test_all_bodies_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 100)
    reader = bodies.BodyReader()
    first, second = bodies._Held(reader), bodies._Held(reader)
    first.take(60)
    with pytest.raises(ApiError) as caught:
        second.take(60)
    assert caught.value.status == 503 and "Retry-After" in caught.value.headers
    second.release()
    first.release()
    second.take(60)


@pytest.mark.parametrize(
    "part", [b"X: " + b"a" * 990 + b"\r\n", b"a" * 1000], ids=["many headers", "one header"]
)
def test_a_head_without_end_is_refused(server: RunningServer, part: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nY: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(2000):
                connection.sendall(part)
        answered = b""
        with contextlib.suppress(ConnectionError):
            answered = connection.recv(4096)
    assert answered == b"" or answered.startswith(b"HTTP/1.1 400 ")


def test_the_parser_that_bounds_no_head_is_bounded() -> None:
    """Body bytes are no head; neither are several requests of one connection."""
    pytest.importorskip("httptools")
    kind = http_protocol.http_protocol()
    for pieces, status in (
        ([b"GET / HTTP/1.1\r\n", *[b"X: " + b"a" * 990 + b"\r\n"] * 99], b"400"),
        ([b"GET / HTTP/1.1\r\nX: ", *[b"a" * 1000] * 99], b"400"),
        ([b"POST / HTTP/1.1\r\nContent-Length: 99000\r\n\r\n", *[b"a" * 1000] * 99], b"204"),
        ([b"GET / HTTP/1.1\r\nX: " + b"a" * 990 + b"\r\n\r\n"] * 99, b"204"),
    ):
        answered = asyncio.run(answered_by(kind, pieces))
        # A reset may overtake the answer to whoever goes on sending.
        assert answered.startswith(b"HTTP/1.1 " + status) or (status, answered) == (b"400", b"")


async def answered_by(kind: Any, pieces: list[bytes]) -> bytes:
    async def no_content(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(no_content, http=kind, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                return await reader.read(4096)
        return b""


class SlowTokenizer:
    """chat_template: none. Counts the characters that it is given."""

    chat_template = None

    def __init__(self, tokens_per_char: float):
        self._rate = tokens_per_char
        self.num_chars = 0
        self.ending = threading.Event()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.num_chars += len(text)
        if text == "stuck":
            self.ending.wait(30)
        return [1] * int(len(text) * self._rate)


@pytest.mark.parametrize(("rate", "least", "most"), [(0.25, 0, 1.1), (1 / 32, 1, 4)])
def test_a_text_that_is_too_long_is_tokenised_in_part(
    rate: float, least: float, most: float
) -> None:
    """The tokenizer has no vocabulary to tell from its longest token."""
    tokenizer = SlowTokenizer(rate)
    size = 16 * 1000
    with pytest.raises(RequestError, match="the context holds 1000"):
        asyncio.run(Prompts(tokenizer, 1000).encode("a" * 20_000_000, False))
    assert least * size <= tokenizer.num_chars <= most * 5 * size


def test_a_long_text_of_few_tokens_is_tokenised_whole() -> None:
    tokenizer = SlowTokenizer(1 / 400)
    assert len(asyncio.run(Prompts(tokenizer, 1000).encode("a" * 200_000, False))) == 500


def test_a_text_that_is_truncated_has_a_bound_too() -> None:
    text = "a" * (prompts.MAX_TRUNCATED_CHARS + 1)
    with pytest.raises(RequestError, match="leave out its begin"):
        asyncio.run(Prompts(SlowTokenizer(1), 10).encode(text, False, is_truncated=True))


def test_a_prompt_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_SECONDS", 0.1)
    tokenizer = SlowTokenizer(1)
    with pytest.raises(QueueFullError, match=r"was not tokenised within"):
        asyncio.run(Prompts(tokenizer, 100).encode("stuck", False))
    tokenizer.ending.set()


def test_a_wrong_key_is_refused_before_the_body_arrives(keyed: RunningServer) -> None:
    """60 MiB are announced, and none of them is sent."""
    for key in ("", "Authorization: Bearer no\r\n", "x-api-key: secre\r\n"):
        for length in ("Content-Length: 62914560\r\n", "Transfer-Encoding: chunked\r\n"):
            with keyed.connect() as connection:
                head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{JSON}{key}{length}\r\n"
                connection.settimeout(5)
                connection.sendall(head.encode())
                assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_the_body_of_a_refused_request_takes_no_memory(keyed: RunningServer) -> None:
    body = b'{"messages": [' + USER + b'], "x": "' + b"a" * (60 << 20) + b'"}'
    before = keyed.memory()
    assert keyed.post(CHAT, body).status == 401
    assert keyed.memory() - before < 8 << 20
