"""Requests that must be answered in time, and who their clients are."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.openai.caller import Caller
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.http import Gate

from .serving import RunningServer, started_server, wait_until

LONG = {"prompt": "ban", "max_tokens": 2000, "ignore_eos": True, "temperature": 1, "n": 8}
RESPONSE = {"input": "ban", "max_output_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def one_place(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("deadlines") / "log"
    flags = ("--max-num-seqs", "1", "--request-timeout", "4", "--max-waiting", "none")
    with started_server(tiny_model, log, *flags) as server:
        yield server


def check_late(server: RunningServer, status: int, error: dict[str, Any], source: str) -> None:
    assert status == 504
    assert error["code"] == "request_timeout" and error["type"] == "server_error"
    assert f"the limit that {source} sets" in error["message"]
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_request_that_is_late_ends_and_gives_its_place_back(one_place: RunningServer) -> None:
    for path, body in (("/v1/completions", LONG), ("/v1/responses", RESPONSE)):
        answer = one_place.post(path, body, **{"X-Request-Timeout": "0.3"})
        check_late(one_place, answer.status, answer.json["error"], "X-Request-Timeout")
    assert one_place.complete()["usage"]["completion_tokens"] > 0


def test_a_stream_that_is_late_ends_with_an_error(one_place: RunningServer) -> None:
    body = {**LONG, "n": 1, "stream": True}
    answer = one_place.post("/v1/completions", body, **{"X-Request-Timeout": "0.3"})
    assert answer.status == 200
    *chunks, last, end = [line for line in answer.body.decode().split("\n\n") if line]
    assert chunks and end == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    check_late(one_place, 504, error, "X-Request-Timeout")


def test_the_servers_limit_holds_where_a_request_asks_for_more(one_place: RunningServer) -> None:
    answer = one_place.post("/v1/completions", {**LONG, "n": 64}, **{"X-Request-Timeout": "1e6"})
    check_late(one_place, answer.status, answer.json["error"], "--request-timeout")


def test_a_timeout_that_is_none_is_refused(one_place: RunningServer) -> None:
    for given in ("soon", "0", "-1", "nan", "inf", ""):
        answer = one_place.post("/v1/completions", LONG, **{"X-Request-Timeout": given})
        assert answer.status == 400
        assert f"X-Request-Timeout {given!r}: it takes a number of seconds" in answer.error


def test_what_ends_for_another_reason_is_not_called_late() -> None:
    async def items() -> AsyncGenerator[int, None]:
        yield 1
        raise TimeoutError("another one")

    async def run() -> list[int]:
        caller = Caller.of({"type": "http", "headers": []}, "a", 60.0)
        return [one async for one in caller.in_time(items())]

    with pytest.raises(TimeoutError, match="another one"):
        asyncio.run(run())


def test_items_that_are_late_are_closed() -> None:
    closed = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def run() -> None:
        caller = Caller.of({"type": "http", "headers": []}, "a", 0.05)
        async for _ in caller.in_time(items()):
            assert not closed

    with pytest.raises(ApiError, match=r"not finished within 0\.05 s"):
        asyncio.run(run())
    assert closed


# ---------------------------------------------------------------- clients


def client(gate: Gate, address: str = "1.2.3.4", **headers: str) -> str:
    pairs = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    return gate.client({"type": "http", "path": "/", "client": (address, 5), "headers": pairs})


def test_a_client_is_its_key_or_else_its_address() -> None:
    gate, open_gate = Gate((b"one", b"two")), Gate()
    one = client(gate, authorization="Bearer one")
    assert one == client(gate, "5.6.7.8", x_api_key="one") and "one" not in one
    assert one == client(gate, authorization="Bearer one", x_api_key="whatever 1")
    assert one != client(gate, authorization="Bearer two")
    assert client(open_gate, authorization="Bearer one") == "1.2.3.4"
    assert client(open_gate, "5.6.7.8") == "5.6.7.8"
    assert open_gate.client({"type": "http", "headers": [], "client": None}) == ""
