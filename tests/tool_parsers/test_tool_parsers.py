"""Parsers of tool calls: the calls of each family's answers, however these are cut or broken."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slowness import slowness
from tool_parsers.answers import ANSWERS, CALLS, TOOLS, Answer

from vllm.errors import ConfigError
from vllm.tool_parsers.parser import Arguments, Call, Content, Parser, Reasoning, typed
from vllm.tool_parsers.registry import known, parser_of_template, tool_parser
from vllm.tool_parsers.schemas import Tool


def read(parser: Parser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls with the text of their arguments."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.feed("", is_last=True)
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, Call):
            assert event.index == len(calls)
            assert event.id
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return content, reasoning, [(name, text) for name, text in calls]


def _id(answer: Answer) -> str:
    return f"{answer.parser}-{ANSWERS.index(answer)}"


@pytest.mark.parametrize("answer", ANSWERS, ids=_id)
def test_calls_are_read_from_the_text_of_each_family(answer):
    content, reasoning, calls = read(known()[answer.parser](TOOLS), [answer.text])
    assert [(name, json.loads(text)) for name, text in calls] == answer.expected
    assert content.strip() == answer.content
    assert reasoning == answer.reasoning


@pytest.mark.parametrize("answer", ANSWERS, ids=_id)
def test_an_answer_cut_at_any_character_gives_the_same(answer):
    cls = known()[answer.parser]
    whole = read(cls(TOOLS), [answer.text])
    assert read(cls(TOOLS), list(answer.text)) == whole
    for at in range(len(answer.text)):
        assert read(cls(TOOLS), [answer.text[:at], answer.text[at:]]) == whole


@pytest.mark.parametrize("answer", ANSWERS, ids=_id)
def test_an_answer_that_ends_early_raises_nothing_and_loses_no_content(answer):
    cls = known()[answer.parser]
    for end in range(len(answer.text)):
        content, _, calls = read(cls(TOOLS), [answer.text[:end]])
        assert read(cls(TOOLS), list(answer.text[:end])) == (content, _, calls)
        assert [name for name, _ in calls] == [name for name, _ in answer.expected][: len(calls)]


_MARKS = sorted(
    {answer.text[at : at + 12] for answer in ANSWERS for at in range(0, len(answer.text), 5)}
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_text_makes_a_parser_raise_and_cuts_change_nothing(data):
    answer = data.draw(st.sampled_from(ANSWERS))
    parts = data.draw(
        st.lists(st.one_of(st.sampled_from(_MARKS), st.text(max_size=8)), max_size=12)
    )
    at = data.draw(st.integers(0, len(answer.text)))
    text = answer.text[:at] + "".join(parts) + answer.text[at:]
    cls = known()[data.draw(st.sampled_from(sorted(known())))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert read(cls(TOOLS), pieces) == read(cls(TOOLS), [text])


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": "\\ud800"}</tool_call>', "?"),
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "{}"),
        ("qwen3_coder", '<function=get_weather><parameter=options>{"a": "\\ud800"}</parameter>',
         '{"options": {"a": "?"}}'),
        ("qwen3_coder", "<function=get_weather><parameter=days>NaN</parameter>",
         '{"days": "NaN"}'),
        ("pythonic", "[get_weather(city='\\ud800')]", '{"city": "?"}'),
    ],
)  # fmt: skip
def test_arguments_are_json_in_utf_8_whatever_the_model_writes(parser, text, arguments):
    _, _, ((_, found),) = read(known()[parser](TOOLS), [text])
    assert found == arguments
    assert found.encode()


@pytest.mark.parametrize("parser", sorted(set(known()) - {"json"}))
def test_white_space_before_plain_text_is_kept(parser):
    assert read(known()[parser](TOOLS), [" ", " 42."]) == ("  42.", "", [])


def test_what_is_no_json_is_no_python_call_either():
    text = "[get_weather(city=1e999)]"
    assert read(known()["pythonic"](TOOLS), [text]) == (text, "", [])


@pytest.mark.parametrize("recipient", [" ", "<", ""])
def test_a_harmony_call_of_nothing_is_content(recipient):
    text = f"<|channel|>commentary to=functions.{recipient}<|message|>x<|call|>"
    assert read(known()["openai"](TOOLS), [text]) == ("x", "", [])


def test_text_goes_out_as_it_comes_unless_it_may_begin_a_call():
    parser = known()["hermes"](TOOLS)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <tool_") == [Content(" ")]
    assert parser.feed("box>") == [Content("<tool_box>")]


def test_arguments_go_out_as_they_come():
    parser = known()["hermes"](TOOLS)
    call, first = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Kö')
    assert (call.name, first) == ("get_weather", Arguments(0, '{"city": "Kö'))
    assert parser.feed("ln") == [Arguments(0, "ln")]
    assert parser.feed('"}') == [Arguments(0, '"}')]


def test_arguments_in_tags_get_the_types_of_the_schema():
    tool = Tool("t", parameters={"properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "flag": {"type": "boolean"},
        "maybe": {"type": ["string", "null"]}, "list": {"type": "array"},
        "either": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "kind": {"enum": ["1", "2"]},
        "five": {"const": 5},
    }})  # fmt: skip
    cases = {
        ("text", "12"): "12", ("count", "12"): 12, ("count", "many"): "many",
        ("flag", "true"): True, ("flag", "True"): True, ("maybe", "null"): None,
        ("maybe", "x"): "x", ("list", "[1, 2]"): [1, 2], ("either", "1.5"): 1.5,
        ("either", "null"): None, ("kind", "1"): "1", ("five", " 5"): 5, ("unknown", "12"): "12",
    }  # fmt: skip
    for (name, text), value in cases.items():
        assert typed(text, tool, name) == value, (name, text)


def test_128_calls_in_one_answer_are_all_read():
    one = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    _, _, calls = read(known()["hermes"](TOOLS), [one * 128])
    assert calls == [("now", "{}")] * 128


def test_a_token_costs_a_parser_little():
    """20 us a token is the most that streaming may cost; a token is about four characters."""
    for answer in ANSWERS:
        text = "word " * 500 + answer.text
        pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
        took = min(_seconds(known()[answer.parser](TOOLS), pieces) for _ in range(3))
        assert took / len(pieces) < 20e-6 * slowness(), answer.parser


def test_the_time_of_a_long_answer_grows_with_its_length():
    for name in ("hermes", "qwen3_coder", "granite"):
        answer = next(one for one in ANSWERS if one.parser == name)
        short, long = (
            min(_seconds(known()[name](TOOLS), [answer.text * count]) for _ in range(3))
            for count in (100, 1600)
        )
        assert long < 16 * 2 * short, name


def _seconds(parser: Parser, pieces: list[str]) -> float:
    start = time.perf_counter()
    for piece in pieces:
        parser.feed(piece)
    return time.perf_counter() - start


def test_the_parser_is_found_by_the_chat_template():
    templates = {
        "hermes": "<tool_call>\n{{tool_call | tojson}}",
        "qwen3_coder": "<tool_call><function=x><parameter=",
        "glm45": "<tool_call>{{name}}<arg_key>k</arg_key><arg_value>", "mistral": "[TOOL_CALLS]",
        "llama3_json": '<|start_header_id|>...{"name": ..., "parameters": ...}',
        "deepseek_v3": "<｜tool▁sep｜>\n```json", "deepseek_v31": "<｜tool▁sep｜>",
        "kimi_k2": "<|tool_calls_section_begin|>", "minimax_m2": "<minimax:tool_call>",
        "openai": "<|channel|>commentary", "granite": "<|tool_call|>",
    }  # fmt: skip
    for name, template in templates.items():
        found = parser_of_template(template)
        assert found is not None
        assert found.name == name
    assert parser_of_template("{{ messages }}") is None


def test_an_unknown_parser_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'hermse' is unknown: it takes .*did you mean.*hermes"):
        tool_parser("hermse")


_PLUGIN = """
from vllm.tool_parsers.parser import Parser

class Mine(Parser):
    name = "mine"

    def parse(self):
        while (yield from self.until("CALL ", emit=self.content)) is not None:
            name = yield from self.name_before("!")
            self.call(name)("{}")
"""


def test_a_plugin_file_adds_a_parser(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(_PLUGIN)
    cls = tool_parser("mine", str(file))
    assert read(cls(TOOLS), ["now CALL now! and"]) == ("now  and", "", [("now", "{}")])
    file.write_text("raise OSError('no')")
    with pytest.raises(ConfigError, match=r"--tool-parser-plugin .*OSError: no"):
        tool_parser("mine", str(file))
    file.write_text("x = 1")
    with pytest.raises(ConfigError, match="defines no subclass"):
        tool_parser("mine", str(file))


def test_every_parser_has_an_answer_here():
    assert {answer.parser for answer in ANSWERS} == set(known())
    assert CALLS
