"""Requests of the two APIs become those of chat that they mean, or an error with a field's name."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from entrypoints.test_tools import TOOLS as CHAT_TOOLS
from vllm.entrypoints.openai.anthropic_protocol import MessagesRequest
from vllm.entrypoints.openai.api_server import validated
from vllm.entrypoints.openai.errors import ApiError, as_api_error
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses_protocol import ResponsesRequest, turns_of
from vllm.errors import RequestError

FUNCTIONS = [tool["function"] for tool in CHAT_TOOLS]
ARGUMENTS = '{"city": "Rom", "days": 2}'
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "instructions": "be",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                     {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather",
         "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "17"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "developer", "content": "c"},
    ],
    "tools": [{"type": "function", **FUNCTIONS[0]}, {"type": "function", **FUNCTIONS[1]}],
    "tool_choice": {"type": "allowed_tools", "mode": "required",
                    "tools": [{"type": "function", "name": "now"}]},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
    "store": True,
    "include": ["reasoning.encrypted_content"],
    "top_logprobs": 2,
    "temperature": 0.5,
    "seed": 5,
    "stream": True,
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "c1", "name": "get_weather",
             "input": {"city": "Rom", "days": 2}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "17"},
            {"type": "tool_result", "tool_use_id": "c2",
             "content": [{"type": "text", "text": "noon"}]}]},
        {"role": "system", "content": "c"},
    ],
    "tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
    "tool_choice": {"type": "tool", "name": "now", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 7, "display": "summarized"},
    "output_config": {"effort": "low"},
    "max_tokens": 9,
    "metadata": {"user_id": "x"},
    "stop_sequences": ["."],
    "temperature": 0.5,
    "seed": 5,
    "stream": True,
}  # fmt: skip
TURNS = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "a\nb"},
    {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [
        {"id": "c1", "type": "function",
         "function": {"name": "get_weather", "arguments": {"city": "Rom", "days": 2}}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}}]},
    {"role": "tool", "content": "17", "tool_call_id": "c1"},
    {"role": "tool", "content": "noon", "tool_call_id": "c2"},
    {"role": "system", "content": "c"},
]  # fmt: skip


def _of_responses(fields: dict[str, Any]) -> ChatCompletionRequest:
    request = validated(ResponsesRequest, fields)
    request.check()
    return request.to_chat(turns_of(request.input_items(), {}))


def _of_messages(fields: dict[str, Any]) -> ChatCompletionRequest:
    request = validated(MessagesRequest, fields)
    request.check()
    return request.to_chat()


BOTH = [(_of_responses, RESPONSES), (_of_messages, MESSAGES)]


@pytest.mark.parametrize(("translate", "fields"), BOTH)
def test_everything_that_chat_knows_arrives(translate: Any, fields: dict[str, Any]) -> None:
    chat = translate(fields)
    assert [message.for_template() for message in chat.messages] == TURNS
    assert chat.template_tools is not None
    assert {tool["function"]["name"] for tool in chat.template_tools} >= {"now"}
    assert chat.choice in ("required", "function:now")
    assert chat.parallel_tool_calls is False
    assert (chat.temperature, chat.seed, chat.stream) == (0.5, 5, True)
    assert chat.own_params()["max_tokens"] == 9
    assert chat.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("effort", "told"), [("none", {"enable_thinking": False, "thinking": False}), ("low", None)]
)
def test_effort_none_tells_the_template_to_leave_thinking_out(effort: str, told: Any) -> None:
    chat = _of_responses({"input": "x", "reasoning": {"effort": effort}})
    assert chat.chat_template_kwargs == told


@pytest.mark.parametrize(
    ("thinking", "is_on", "is_shown", "budget"),
    [
        (None, False, False, None),
        ({"type": "disabled"}, False, False, None),
        ({"type": "adaptive"}, True, True, None),
        ({"type": "enabled", "budget_tokens": 7}, True, True, 7),
        ({"type": "adaptive", "display": "omitted"}, True, False, None),
    ],
)
def test_thinking_is_only_where_it_is_asked_for(
    thinking: Any, is_on: bool, is_shown: bool, budget: int | None
) -> None:
    chat = _of_messages({**MESSAGES, "thinking": thinking})
    assert chat.chat_template_kwargs == {"enable_thinking": is_on, "thinking": is_on}
    assert (chat.include_reasoning, chat.thinking_token_budget) == (is_shown, budget)
    own = _of_messages({**MESSAGES, "chat_template_kwargs": {"thinking": True}})
    assert own.chat_template_kwargs == {"enable_thinking": True, "thinking": True}


def test_a_second_reasoning_begins_a_new_message_of_the_assistant() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    said = {"role": "assistant", "content": "so"}
    turns = turns_of([thought, call, thought, said, said], {})
    assert [sorted(turn) for turn in turns] == [
        ["reasoning_content", "role", "tool_calls"], ["content", "reasoning_content", "role"],
        ["content", "role"],
    ]  # fmt: skip


JUNK = (None, True, -1, 2**70, 0.5, "x", [], {}, [None], [["x"]], {"type": 5},
        [{"type": "text", "text": 5}])  # fmt: skip


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in inner:
        yield (*at, key)
        if isinstance(child, dict | list):
            yield from _places(child, (*at, key))


@pytest.mark.parametrize(("translate", "fields"), BOTH)
def test_any_value_at_any_place_is_taken_or_refused_by_name(
    translate: Any, fields: dict[str, Any]
) -> None:
    num_refused = 0
    for place in _places(fields):
        for junk in JUNK:
            changed = copy.deepcopy(fields)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = junk
            try:
                translate(changed)
            except (ApiError, RequestError) as error:
                num_refused += 1
                told = as_api_error(error)
                assert told.status == 400
                assert told.param is not None, (place, junk, told.message)
                known = {*fields, "tool_choice", "text.format", "max_output_tokens"}
                assert told.param.split(".")[0] in known, (place, junk, told)
    assert num_refused > 200
