"""Reasoning is told from the answer, however the answer is cut and whatever the prompt opened."""

import pytest
from tool_parsers.test_tool_parsers import read

from vllm.errors import ConfigError
from vllm.reasoning.parser import ReasoningParser
from vllm.reasoning.registry import known, reasoning_format

FORMATS = sorted(known())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_open", [True, None, False])
def test_reasoning_and_content_come_apart_at_any_cut(name, is_open):
    form = known()[name]
    begin = "" if is_open else form.begins[0]
    text = f"{begin}I think < that\n{form.end}\n\nThe answer is <42>."
    whole = read(ReasoningParser(form, is_open), [text])
    expected = ("The answer is <42>.", "I think < that\n", [])
    assert whole == ((text, "", []) if is_open is False else expected)
    for at in range(len(text)):
        assert read(ReasoningParser(form, is_open), [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_marks_is_content_unless_the_prompt_opened_reasoning(name):
    form = known()[name]
    assert read(ReasoningParser(form, None), ["Just this."]) == ("Just this.", "", [])
    assert read(ReasoningParser(form, True), ["Just this."]) == ("", "Just this.", [])


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_before_an_answer_without_reasoning_is_kept(name):
    """Such an answer may continue a message."""
    assert read(ReasoningParser(known()[name], None), [" ", " 42."]) == ("  42.", "", [])


def test_the_prompt_tells_whether_the_answer_begins_within_reasoning():
    qwen, r1 = known()["qwen3"], known()["deepseek_r1"]
    assert qwen.is_open_after("<|im_start|>assistant\n") is None
    assert qwen.is_open_after("<|im_start|>assistant\n<think>\n") is True
    assert qwen.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n") is False
    assert qwen.is_open_after("user: what does <think> mean, in all models?\nassistant:") is None
    assert r1.is_open_after("<｜Assistant｜>") is True


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'qwen' is unknown: it takes .*qwen3"):
        reasoning_format("qwen")
