"""Answers as blocks, and the events of the two APIs that show them, without a model."""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from slowness import slowness

from entrypoints.test_tools import TEMPLATE, TOOLS, USER
from vllm.engine.admission import Admission
from vllm.entrypoints.openai.answer_format import AnswerFormats
from vllm.entrypoints.openai.anthropic_messages import _MessageAnswer
from vllm.entrypoints.openai.anthropic_protocol import MessagesRequest
from vllm.entrypoints.openai.blocks import Begin, Blocks, Delta, End
from vllm.entrypoints.openai.caller import Caller
from vllm.entrypoints.openai.prompts import Prompts
from vllm.entrypoints.openai.response_store import Responses
from vllm.entrypoints.openai.responses import _ResponseAnswer
from vllm.entrypoints.openai.responses_protocol import ResponsesRequest
from vllm.entrypoints.openai.translated import TranslatedAnswer
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.reasoning.registry import reasoning_format
from vllm.tool_parsers.parser import Arguments, Call, Content, Reasoning
from vllm.tool_parsers.registry import known

CALL = '<tool_call>\n{"name": "now", "arguments": {"utc": true}}\n</tool_call>'
ANSWER = f"<think>\nhm, \u00fc\n</think>\n\nNow:\n{CALL}\n{CALL}"


@dataclass
class _Engine:
    """Answers with outputs of `texts`, and ends as `reason` says or with an error."""

    texts: Sequence[str] = ()
    reason: str | None = "stop"

    async def generate(self, prompt: Any, params: Any, request_id: str, **others: Any) -> Any:
        self.max_tokens = params.max_tokens
        for place, text in enumerate(self.texts):
            is_last = place == len(self.texts) - 1
            new = CompletionOutput(0, text, [5], finish_reason=self.reason if is_last else None)
            yield RequestOutput(request_id, None, prompt, None, [new], is_last)
        if self.reason is None:
            raise ValueError("broken")


def _service() -> Any:
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [0] * len(text))
    return SimpleNamespace(
        engine=_Engine(), prompts=Prompts(tokenizer, 1000), sampling_defaults={},
        model_names=("tiny",), max_model_len=1000, response_role="assistant",
        responses=Responses(), numbers=itertools.count(),
        admission=Admission(1, None), caller=Caller(),
    )  # fmt: skip


def _answer(api: str, **fields: Any) -> TranslatedAnswer:
    service = _service()
    formats = AnswerFormats(known()["hermes"], reasoning_format("qwen3"))
    functions = [tool["function"] for tool in TOOLS]
    if api == "responses":
        tools = [{"type": "function", **one} for one in functions]
        request = ResponsesRequest.model_validate({"input": "x", "tools": tools, **fields})
        chat = request.to_chat([USER])
        form = formats.of(chat, TEMPLATE, "")
        return _ResponseAnswer(service, chat, "resp_1", [[1, 2]], form, streams=True,
                               source=request, items=[], turns=[USER])  # fmt: skip
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    body = {"messages": [USER], "max_tokens": 999, "tools": tools,
            "thinking": {"type": "adaptive"}, **fields}  # fmt: skip
    message = MessagesRequest.model_validate(body)
    chat = message.to_chat()
    form = formats.of(chat, TEMPLATE, "")
    return _MessageAnswer(service, chat, "msg_1", [[1, 2]], form, streams=True, source=message)


def _told(answer: TranslatedAnswer, texts: Sequence[str], reason: str | None = "stop") -> list[Any]:
    """The events for an engine whose outputs have `texts`."""
    answer.service.engine = _Engine(texts, reason)  # type: ignore[assignment]

    async def all_of() -> bytes:
        return b"".join([part async for part in answer._parts()])

    events = []
    for text in asyncio.run(all_of()).decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_blocks_begin_and_end_one_after_the_other() -> None:
    blocks = Blocks(keeps_space=False)
    events = [Reasoning("a"), Reasoning("b"), Content("\n"), Call(0, "c", "f"), Arguments(0, "{}"),
              Content(" "), Call(1, "d", "g"), Content("t"), Content("\n")]  # fmt: skip
    steps = [step for event in events for step in blocks.add([event])] + blocks.end()
    assert [(block.kind, block.text) for block in blocks.found] == [
        ("reasoning", "ab"), ("call", "{}"), ("call", ""), ("text", "t\n"),
    ]  # fmt: skip
    is_open = None
    for step in steps:
        if isinstance(step, Begin):
            assert is_open is None
            is_open = step.block
        assert step.block is is_open
        if isinstance(step, End):
            is_open = None
    assert is_open is None
    assert sum(isinstance(step, Delta) for step in steps) == 5


@pytest.mark.parametrize("keeps_space", [True, False])
def test_white_space_that_is_the_whole_answer_is_its_text(keeps_space: bool) -> None:
    blocks = Blocks(keeps_space)
    steps = [*blocks.add([Content(" ")]), *blocks.add([Content("\n")]), *blocks.end()]
    assert [block.text for block in blocks.found] == [" \n"]
    assert isinstance(steps[-1], End)


def test_an_answer_without_text_and_calls_may_need_a_text() -> None:
    for needs_text, kinds in ((True, ["reasoning", "text"]), (False, ["reasoning"])):
        blocks = Blocks(keeps_space=False)
        blocks.add([Reasoning("a")])
        blocks.end(needs_text)
        assert [block.kind for block in blocks.found] == kinds


def _without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ids(one) for one in value]
    if isinstance(value, dict):
        gone = ("id", "call_id", "created_at", "completed_at", "usage")
        return {name: _without_ids(one) for name, one in value.items() if name not in gone}
    return value


def test_a_response_is_the_same_however_its_text_is_cut() -> None:
    whole = _without_ids(_told(_answer("responses"), [ANSWER])[-1]["response"])
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    for size in (1, 2, 5, 11):
        texts = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
        answer = _answer("responses")
        events = _told(answer, texts)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        last = events[-1]["response"]
        assert _without_ids(last) == whole
        assert last["usage"]["output_tokens"] == len(texts)
        assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == 7
        _check_items(events, last["output"])


def _check_items(events: list[Any], output: list[Any]) -> None:
    """Each item is added, grows by its deltas, and is done, before the next one is added."""
    order = {
        "reasoning": ["output_item.added", "content_part.added", "reasoning_text.delta",
                      "reasoning_text.done", "content_part.done", "output_item.done"],
        "message": ["output_item.added", "content_part.added", "output_text.delta",
                    "output_text.done", "content_part.done", "output_item.done"],
        "function_call": ["output_item.added", "function_call_arguments.delta",
                          "function_call_arguments.done", "output_item.done"],
    }  # fmt: skip
    inner = events[2:-1]
    assert [event["output_index"] for event in inner] == sorted(e["output_index"] for e in inner)
    for place, item in enumerate(output):
        own = [event for event in inner if event["output_index"] == place]
        names = [event["type"].removeprefix("response.") for event in own]
        assert list(dict.fromkeys(names)) == order[item["type"]]
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        done = own[-1]["item"]
        assert done == item
        text = item.get("arguments") or item["content"][0]["text"]
        assert deltas == text
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}


def test_a_message_is_the_same_however_its_text_is_cut() -> None:
    for size in (1, 2, 5, 11, 1000):
        texts = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
        answer = _answer("messages")
        start, ping, *inner, delta, stop = _told(answer, texts)
        assert (start["type"], ping["type"], stop["type"]) == (
            "message_start", "ping", "message_stop",
        )  # fmt: skip
        assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert delta["usage"]["output_tokens"] == len(texts)
        blocks = _blocks_of(inner)
        body = json.loads(json.dumps(answer.body(), default=lambda raw: json.loads(bytes(raw))))
        assert blocks == body["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert blocks[2]["input"] == {"utc": True}
        assert blocks[2]["id"] != blocks[3]["id"]
        assert blocks[1]["text"] == "Now:\n"


def _blocks_of(events: list[Any]) -> list[Any]:
    """As a client adds them up."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            continue
        assert event["index"] == len(blocks) - 1
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
            continue
        delta = event["delta"]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "input_json_delta":
                block["json"] += delta["partial_json"]
    return blocks


def test_a_call_that_is_cut_off_is_incomplete_and_not_part_of_the_conversation() -> None:
    answer = _answer("responses", store=True)
    text = ANSWER[: ANSWER.rindex(": true")]
    last = _told(answer, list(text), "length")[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    statuses = [item["status"] for item in last["response"]["output"]]
    assert statuses == ["completed", "completed", "completed", "incomplete"]
    assert json.loads(last["response"]["output"][2]["arguments"]) == {"utc": True}
    (turn,) = answer.service.responses.store.previous("resp_1")[1:]
    (call,) = turn["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"utc": True}
    assert turn["reasoning_content"] == "\nhm, \u00fc\n"
    message = _answer("messages")
    _told(message, list(text), "length")
    assert message.body()["content"][3]["input"] == {}
    assert message.body()["stop_reason"] == "model_context_window_exceeded"


def test_an_error_after_the_first_event_is_an_event() -> None:
    for api, last in (("responses", "response.failed"), ("messages", "error")):
        event = _told(_answer(api), ["a"], reason=None)[-1]
        assert event["type"] == last
        error = event["response"]["error"] if api == "responses" else event["error"]
        assert "internal error (ValueError)" in error["message"]


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_tokens_asked_for_beyond_the_context_are_an_upper_bound(api: str) -> None:
    for asked, given in ((10, 10), (5000, 998)):
        name = {"responses": "max_output_tokens", "messages": "max_tokens"}[api]
        answer = _answer(api, **{name: asked})
        _told(answer, ["a"], "length")
        assert answer.service.engine.max_tokens == given  # type: ignore[attr-defined]


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_translating_takes_little_time_beside_a_step(api: str) -> None:
    """Time of this process, the best of several: under 20 us for a token."""
    times = []
    for _ in range(7):
        answer = _answer(api)
        answer.opening()
        start = time.process_time()
        for _ in range(500):
            b"".join(map(answer.events, answer.blocks.add([Content("some text")])))
        times.append((time.process_time() - start) / 500)
    assert min(times) < 20e-6 * slowness()
