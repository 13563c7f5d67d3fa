"""How answers are read, without a model."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoints.test_tools import TEMPLATE, TOOLS, USER
from vllm.entrypoints.openai.answer_format import AnswerFormats
from vllm.entrypoints.openai.chat import ChatAnswer
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.errors import RequestError
from vllm.outputs import CompletionOutput
from vllm.tool_parsers.parser import Call
from vllm.tool_parsers.registry import known


def _request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER], "tools": TOOLS, **fields})


def test_a_template_of_one_request_says_nothing_of_the_calls_of_another() -> None:
    formats = AnswerFormats()
    for mark, name in (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes")):
        found = formats.of(_request(), TEMPLATE + mark, "").parser
        assert found is not None
        assert found.name == name


def test_parallel_tool_calls_false_gives_one_call_of_formats_without_a_grammar_too() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    for is_parallel, count in ((None, 2), (True, 2), (False, 1)):
        request = _request(parallel_tool_calls=is_parallel)
        form = AnswerFormats(known()["mistral"]).of(request, TEMPLATE, "")
        service: Any = SimpleNamespace()
        answer = ChatAnswer(service, request, "x", [[1]], form)
        whole = CompletionOutput(index=0, text=text, token_ids=[], finish_reason="stop")
        events = asyncio.run(answer.read(whole))
        assert sum(isinstance(event, Call) for event in events) == count


def test_auto_needs_a_parser_where_the_template_tells_of_tools() -> None:
    with pytest.raises(RequestError, match="need a parser of this model's calls"):
        AnswerFormats().of(_request(), TEMPLATE, "")
    plain = _request()
    form = AnswerFormats().of(plain, "{{ messages }}", "")
    assert (form.parser, form.grammar, len(plain.warnings)) == (None, None, 1)
    with pytest.raises(RequestError, match="does not tell the model of tools: leave tools out"):
        AnswerFormats().of(_request(tool_choice="required"), "{{ messages }}", "")


def test_a_forced_call_of_a_model_that_never_reasons_begins_at_once() -> None:
    for template, mode in ((TEMPLATE.replace("think", "muse"), "disabled"), (TEMPLATE, "auto")):
        form = AnswerFormats(known()["hermes"]).of(_request(tool_choice="required"), template, "")
        assert form.grammar is not None
        assert form.grammar["tool_calls"]["reasoning"] == mode
