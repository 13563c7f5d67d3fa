"""Anthropic's own client against a server: messages, streams, tools, thinking, errors.

Skipped where the package `anthropic` is not installed; the wire format is tested without it in
tests/entrypoints/test_translated_apis.py.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from entrypoints.serving import started_server
from entrypoints.test_tools import check_call
from entrypoints.test_translated_apis import CUSTOM, KEY, THINKING_TEMPLATE, USER
from entrypoints.tiny_model import write_tiny_llama

anthropic: Any = pytest.importorskip("anthropic")

ONE: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    template = folder / "tools.jinja"
    template.write_text(THINKING_TEMPLATE)
    flags = ["--chat-template", str(template), "--max-model-len", "1024", "--api-key", KEY,
             "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]  # fmt: skip
    with started_server(folder, folder / "log", *flags) as running:
        yield running.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_message_and_its_tokens(client: Any) -> None:
    fields = {"model": "tiny", "messages": [USER], "system": "be"}
    message = client.messages.create(max_tokens=6, **fields)
    (block,) = message.content
    assert (block.type, message.role, message.stop_reason) == ("text", "assistant", "max_tokens")
    count = client.messages.count_tokens(**fields).input_tokens
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert message._request_id


@pytest.mark.slow
def test_a_tool_loop_streamed_and_not(client: Any) -> None:
    fields = {"model": "tiny", "max_tokens": 300, "tools": CUSTOM, "tool_choice": ONE}
    with client.messages.stream(messages=[USER], **fields) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"message_start", "content_block_start", "input_json", "content_block_stop",
            "message_delta", "message_stop"} <= kinds  # fmt: skip
    history: list[Any] = [USER]
    for _ in range(2):
        (use,) = message.content
        assert (use.type, message.stop_reason) == ("tool_use", "tool_use")
        check_call({"function": {"name": use.name, "arguments": json.dumps(use.input)}})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "17"}
        history += [{"role": "assistant", "content": message.content},
                    {"role": "user", "content": [result]}]  # fmt: skip
        message = client.messages.create(messages=history, **fields)


def test_thinking_comes_before_the_text_and_goes_back(client: Any) -> None:
    with client.messages.stream(
        model="tiny", messages=[USER], max_tokens=40,
        thinking={"type": "enabled", "budget_tokens": 5},
    ) as stream:  # fmt: skip
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    thinking, answer = message.content
    assert thinking.type == "thinking"
    assert thinking.signature
    assert answer.text == text
    history = [USER, {"role": "assistant", "content": message.content}, USER]
    assert client.messages.create(model="tiny", messages=history, max_tokens=4).content


def test_errors_are_those_of_the_client(client: Any, url: str) -> None:
    body = {"model": "tiny", "messages": [USER], "max_tokens": 4}
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers is not supported"):
        client.messages.create(**body, extra_body={"mcp_servers": [{"url": "x"}]})
    with pytest.raises(anthropic.NotFoundError, match="'nix' is not served"):
        client.messages.create(**{**body, "model": "nix"})
    for arguments in ({"api_key": "wrong"}, {"auth_token": "wrong"}):
        other = anthropic.Anthropic(base_url=url, max_retries=0, **arguments)
        with pytest.raises(anthropic.AuthenticationError, match="a valid API key"):
            other.messages.create(**body)
    bearer = anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)
    assert bearer.messages.create(**body).content
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        list(client.messages.create(**body, stream=True, tools=[{"type": "bash_20250124"}]))
