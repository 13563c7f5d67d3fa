"""Answers with tool calls as each family of models writes them, and what they mean."""

import json
from dataclasses import dataclass

from vllm.tool_parsers.schemas import Tool

WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "options": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
)
NOW = Tool("now", "The time.", {"type": "object", "properties": {}})
TOOLS = (WEATHER, NOW)

ARGUMENTS = {
    "city": 'Köln "am Rhein" \\ 東京 🙂',
    "days": 3,
    "exact": True,
    "options": {"units": ["°C", "}"], "deep": {"a": None}},
}
CALLS = [("get_weather", ARGUMENTS), ("now", {})]
TEXT = "Let me look <here> {now} [1]:"


@dataclass(frozen=True)
class Answer:
    """content: what is left of `text` without its calls, but for white space around it."""

    parser: str
    text: str
    content: str = TEXT
    calls: list[tuple[str, dict]] | None = None
    reasoning: str = ""

    @property
    def expected(self) -> list[tuple[str, dict]]:
        return CALLS if self.calls is None else self.calls


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tagged(key: str, value: object, before: str, after: str) -> str:
    text = value if isinstance(value, str) else _json(value)
    return before.replace("KEY", key) + text + after


_A = _json(ARGUMENTS)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_QWEN = "".join(
    _tagged(key, value, "<parameter=KEY>\n", "\n</parameter>\n") for key, value in ARGUMENTS.items()
)
_GLM = "".join(
    _tagged(key, value, "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
    for key, value in ARGUMENTS.items()
)
_MINIMAX = "".join(
    _tagged(key, value, '<parameter name="KEY">', "</parameter>\n")
    for key, value in ARGUMENTS.items()
)
_PYTHON = (
    "[get_weather(city='Köln \"am Rhein\" \\\\ 東京 🙂', days=3, exact=True, "
    "options={'units': ['°C', '}'], 'deep': {'a': None}}), now()]"
)

ANSWERS = (
    Answer(
        "hermes",
        f'{TEXT}\n<tool_call>\n{{"name": "get_weather", "arguments": {_A}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    ),
    Answer(  # in another order, and without the last tag
        "hermes",
        f'{TEXT}<tool_call>{{"arguments": {_A}, "name": "get_weather"}}</tool_call>'
        f'<tool_call>{{"name": "now"}}',
    ),
    Answer(
        "qwen3_coder",
        f"{TEXT}\n\n<tool_call>\n<function=get_weather>\n{_QWEN}</function>\n</tool_call>\n"
        f"<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    Answer(  # without the outer tag
        "qwen3_xml", f"{TEXT}<function=get_weather>{_QWEN}</function><function=now></function>"
    ),
    Answer(
        "glm45",
        f"{TEXT}\n<tool_call>get_weather\n{_GLM}</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    Answer(
        "minimax_m2",
        f'{TEXT}\n<minimax:tool_call>\n<invoke name="get_weather">\n{_MINIMAX}</invoke>\n'
        f'<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    Answer(
        "deepseek_v3",
        f"{TEXT}{_DEEPSEEK[0]}{_CALL[0]}function{_CALL[1]}get_weather\n```json\n{_A}\n```"
        f"{_CALL[2]}\n{_CALL[0]}function{_CALL[1]}now\n```json\n{{}}\n```{_CALL[2]}{_DEEPSEEK[1]}",
    ),
    Answer(
        "deepseek_v31",
        f"{TEXT}{_DEEPSEEK[0]}{_CALL[0]}get_weather{_CALL[1]}{_A}{_CALL[2]}"
        f"{_CALL[0]}now{_CALL[1]}{{}}{_CALL[2]}{_DEEPSEEK[1]}",
    ),
    Answer(
        "kimi_k2",
        f"{TEXT}<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_A}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        f"<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    Answer(
        "mistral",
        f'{TEXT}[TOOL_CALLS][{{"name": "get_weather", "arguments": {_A}}}, '
        f'{{"name": "now", "arguments": {{}}}}]',
    ),
    Answer("mistral", f"{TEXT}[TOOL_CALLS]get_weather[ARGS]{_A}[TOOL_CALLS]now[ARGS]{{}}"),
    Answer(
        "mistral",
        f"{TEXT}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{_A}[TOOL_CALLS]now{{}}",
    ),
    Answer(
        "granite",
        f'{TEXT}<|tool_call|>[{{"name": "get_weather", "arguments": {_A}}}, '
        f'{{"name": "now", "arguments": {{}}}}]',
    ),
    Answer(
        "granite",
        f'{TEXT}<tool_call>{{"name": "get_weather", "arguments": {_A}}}</tool_call>\n'
        f'<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>',
    ),
    Answer(
        "phi4_mini_json",
        f'{TEXT}functools[{{"name": "get_weather", "arguments": {_A}}}, '
        f'{{"name": "now", "arguments": {{}}}}]',
    ),
    Answer(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {_A}}}; {{"name": "now", "parameters": {{}}}}',
        "",
    ),
    Answer(
        "llama3_json",
        f'{TEXT}<|python_tag|>{{"name": "get_weather", "parameters": {_A}}};'
        f'{{"name": "now", "parameters": {{}}}}',
    ),
    Answer("pythonic", _PYTHON, ""),
    Answer("llama4_pythonic", f"<|python_start|>{_PYTHON}<|python_end|>", ""),
    Answer("llama4_pythonic", _PYTHON, ""),
    Answer(
        "openai",
        f"<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary"
        f"<|message|>{TEXT}<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{_A}<|call|><|start|>assistant to=functions.now<|channel|>"
        f"commentary json<|message|>{{}}",
        reasoning="Which city?",
    ),
    Answer(
        "openai",
        f"<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        f"{TEXT}<|return|>",
        calls=[],
        reasoning="Easy.",
    ),
    Answer(
        "json",
        f'[{{"name": "get_weather", "arguments": {_A}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
    ),
    # What looks like calls and is none.
    Answer("hermes", "<tool_call>no</tool_call> <tool_", "<tool_call>no</tool_call> <tool_", []),
    Answer("hermes", '<tool_call>{"nam": 1}', '<tool_call>{"nam": 1}', []),
    Answer("qwen3_coder", "<tool_call> <function", "<tool_call> <function", []),
    Answer("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    Answer("pythonic", "[1, 2, now]", "[1, 2, now]", []),
    Answer("pythonic", "[print(x='a')]", "[print(x='a')]", []),
    Answer("phi4_mini_json", "functools are [1]", "functools are [1]", []),
    Answer("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
)  # fmt: skip
