"""Requests that are refused, each with a clear message, and none of them a harm to others."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from slowness import slowness

from .serving import RunningServer

JSON = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def answers_the_next_request(server: RunningServer) -> Iterator[None]:
    yield
    assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (TEXT, {}, "prompt", "prompt is missing"),
        (TEXT, {"prompt": "a", "bad_words": "b"}, "bad_words", "should be a valid list"),
        (TEXT, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "is empty"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [9999]}, "allowed_token_ids", "9999"),
        (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens must be from 0"),
        (TEXT, {"prompt": "a", "max_tokens": 10**30}, "max_tokens", "max_tokens must be from 0"),
        (TEXT, {"prompt": "a", "max_tokens": 5000}, "max_tokens", "context of 2048"),
        (TEXT, {"prompt": [5] * 5000}, "prompt", "5000 tokens; this server takes at most 2048"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": [9999]}, "prompt", "token id 9999"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature", "temperature must be from 0"),
        (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature", 'not "hot"'),
        (TEXT, {"prompt": "a", "top_p": 0}, "top_p", "top_p must be above 0"),
        (TEXT, {"prompt": "a", "n": 0}, "n", "n must be from 1"),
        (TEXT, {"prompt": "a", "n": 10**9}, "prompt", "split the request"),
        (TEXT, {"prompt": "a", "n": 2, "temperature": 0}, "n", "temperature 0"),
        (TEXT, {"prompt": "a", "seed": 2**70}, "seed", "seed must be from"),
        (TEXT, {"prompt": "a", "logprobs": 10**6}, "logprobs", "logprobs must be from -1"),
        (TEXT, {"prompt": "a", "stop": [""]}, "stop", "none of them empty"),
        (TEXT, {"prompt": "a", "stop_token_ids": [9999]}, "stop_token_ids", "9999"),
        (TEXT, {"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias", "9999"),
        (TEXT, {"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias", "-100 to 100"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of", "best_of (3)"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
        (TEXT, {"prompt": "a", "guided_regex": "(["}, None, "structured output"),
        (TEXT, {"prompt": "a", "guided_json": {"type": "nonsense"}}, None, "structured output"),
        (TEXT, {"prompt": "a", "guided_json": {"$ref": "#/nowhere"}}, None, "structured output"),
        (TEXT, {"prompt": "a", "guided_json": {"type": "integer", "minimum": 10**30}}, None,
         "structured output: "),
        (TEXT, {"prompt": "a", "guided_regex": "("}, None,
         "structured output: Regex parsing error at position 2"),
        pytest.param(
            TEXT, {"prompt": "a", "guided_json": '{"anyOf":[' * 4000 + "{}" + "]}" * 4000}, None,
            "more than 10 s to compile; simplify it", marks=pytest.mark.slow),
        (CHAT, {"messages": []}, "messages", "messages takes at least 1 item, not []"),
        (CHAT, {"messages": [5]}, "messages", "messages.0 should be an object, not 5"),
        (CHAT, {"messages": "hi"}, "messages", "messages should be a valid list"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages", "'user'"),
        (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "refused"),
        (CHAT, {"messages": [USER], "tools": [{}]}, "tools", "tools.0.function is missing"),
        (CHAT, {"messages": [USER], "chat_template": "x"}, "chat_template",
         "--trust-request-chat-template"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"tokenize": True}},
         "chat_template_kwargs", "must not set tokenize"),
        ("/tokenize", {"prompt": 5}, "prompt", "prompt should be a valid string"),
        ("/tokenize", {"text": "a"}, "prompt", "prompt is missing"),
        ("/detokenize", {"tokens": [10**9]}, "tokens", "out of range"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_served_is_refused(
    server: RunningServer, path: str, fields: Any, param: str | None, message: str
) -> None:
    for streams in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
        answer = server.post(path, {**fields, **streams})
        assert answer.status == 400, answer.body
        assert message in answer.error
        assert answer.json["error"]["type"] == "invalid_request_error"
        if param is not None:
            assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'["prompt"]', "must be a JSON object, not an array"),
        (b'"prompt"', "must be a JSON object, not a text"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than"),
        (b'{"guided_json": ' + b'{"a":' * 150 + b"1" + b"}" * 151, "nested deeper than"),
        (b"[" * 50_000, "nested deeper than"),
        (b"[" * 1_000_000, "more than 100000 objects and arrays"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(
    server: RunningServer, body: bytes, message: str
) -> None:
    answer = server.post("/v1/completions", body)
    assert answer.status == 400
    assert message in answer.error


@pytest.mark.parametrize("content_type", [None, "text/plain", "multipart/form-data; boundary=x"])
def test_a_body_of_another_type_is_refused(server: RunningServer, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = server.request("POST", "/v1/completions", b'{"prompt": "a"}', headers)
    assert answer.status == 415
    assert "application/json" in answer.error


def test_json_may_name_its_charset(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert server.request("POST", "/v1/completions", body, headers).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/%2e%2e%2f%2e%2e%2fetc", 404),
    ],
)
def test_other_paths_and_methods_are_told_apart(
    server: RunningServer, method: str, path: str, status: int
) -> None:
    answer = server.request(method, path)
    assert answer.status == status
    assert answer.error


def test_a_body_of_10_mb_is_refused_and_the_client_hears_it(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    answer = server.post("/v1/completions", body)
    assert answer.status == 413
    assert "--max-request-bytes" in answer.error


def test_a_body_without_a_length_is_counted_while_it_arrives(server: RunningServer) -> None:
    before = server.memory()
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(64):
            connection.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert server.memory() - before < 32 << 20


def test_a_body_that_is_announced_as_too_large_is_not_waited_for(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_long_text_is_refused_without_being_tokenised(server: RunningServer) -> None:
    start = time.monotonic()
    answer = server.post("/v1/completions", {"prompt": "ban " * 1_900_000})
    assert answer.status == 400
    assert "the context holds 2048" in answer.error
    assert time.monotonic() - start < 2 * slowness()


@pytest.mark.parametrize("data", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"X" * 100_000])
def test_bytes_that_are_not_http_are_refused(server: RunningServer, data: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(data)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
