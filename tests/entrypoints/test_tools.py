"""Tools and reasoning in `/v1/chat/completions`: a grammar holds calls to the tools' schemas."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from slow import quick
from slowness import slowness

from vllm.entrypoints.openai.protocol import ChatCompletionRequest

from .serving import RunningServer, run_cli, started_server

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or () %}<call>{{ call.function.name }} "
    "{{ call.function.arguments.items() | list }}</call>{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}"
    "{% if think is defined and not think %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "ban fick"}
DAYS = {"type": "integer", "enum": [1, 2, 3]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rom", "Köln"]}, "days": DAYS},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {
                "type": "object",
                "properties": {"utc": {"type": "boolean"}},
                "required": ["utc"],
                "additionalProperties": False,
            },
        },
    },
]
# One for each way in which calls are written: JSON, text in tags, and a list for all other models.
PARSERS = ("hermes", "qwen3_coder", "mistral")


@pytest.fixture(scope="module", params=quick(PARSERS, ["hermes"]))
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ["--chat-template", str(folder / "template.jinja"), "--max-model-len", "1024",
             "--tool-call-parser", request.param, "--enable-auto-tool-choice",
             "--reasoning-parser", "qwen3"]  # fmt: skip
    with started_server(tiny_model, folder / "log", *flags) as running:
        yield running


def check_call(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Rom", "Köln")
        assert arguments["days"] in (1, 2, 3)
    else:
        assert call["function"]["name"] == "now"
        assert arguments in ({"utc": True}, {"utc": False})


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    defaults = {"tools": TOOLS, "max_tokens": 300, "chat_template_kwargs": {"think": False}}
    answer: dict[str, Any] = server.chat(**{**defaults, **fields})["choices"][0]
    return answer


def streamed(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The choice that the deltas of a stream add up to."""
    defaults = {"messages": [USER], "tools": TOOLS, "max_tokens": 300,
                "chat_template_kwargs": {"think": False}}  # fmt: skip
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    choice: dict[str, Any] = {"message": message}
    for event in server.events("/v1/chat/completions", **{**defaults, **fields}):
        for one in event["choices"]:
            choice["finish_reason"] = one["finish_reason"]
            for name in ("content", "reasoning"):
                message[name] += one["delta"].get(name) or ""
            for call in one["delta"].get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], "function": call["function"]})
                else:
                    own = message["tool_calls"][call["index"]]["function"]
                    own["arguments"] += call["function"]["arguments"]
    return choice


@pytest.mark.parametrize("seed", quick(range(4), [0]))
def test_a_required_call_fits_one_of_the_tools(server: RunningServer, seed: int) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0,
              "seed": seed}  # fmt: skip
    choice = ask(server, **fields)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    check_call(call)
    assert call["type"] == "function"
    same = streamed(server, **fields)
    assert same["finish_reason"] == "tool_calls"
    (own,) = same["message"]["tool_calls"]
    assert own["function"] == call["function"]


def test_a_named_tool_is_called(server: RunningServer) -> None:
    for name in ("now", "get_weather"):
        choice = ask(server, tool_choice={"type": "function", "function": {"name": name}})
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name
        check_call(call)
        assert choice["message"]["content"] is None


def test_the_openai_client_gets_calls_and_sends_their_results_back(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [USER]
        for turn in range(3):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, tools=TOOLS, tool_choice="required",  # type: ignore[call-overload]
                parallel_tool_calls=False, max_tokens=300, seed=turn, temperature=1.0,
                extra_body={"chat_template_kwargs": {"think": False}},
            )  # fmt: skip
            message = answer.choices[0].message
            (call,) = message.tool_calls
            check_call(call.model_dump())
            # As litellm does, with fields of its own.
            messages.append({**message.model_dump(), "provider_specific_fields": {"x": 1}})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "17 °C"})
        last = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4,
            extra_body={"chat_template_kwargs": {"think": False}},
        )  # fmt: skip
        assert last.choices[0].message.tool_calls is None


def test_the_template_is_told_of_tools_and_of_earlier_calls(server: RunningServer) -> None:
    arguments = json.dumps({"city": "Rom", "days": 2})
    call = {"id": "c1", "type": "function",
            "function": {"name": "get_weather", "arguments": arguments}}  # fmt: skip
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1",
                 "content": [{"type": "text", "text": "x"}]}]  # fmt: skip
    tokens = server.post("/tokenize", {"messages": messages, "tools": TOOLS[1:]}).json["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert prompt.startswith('<tools>[{"type": "function", "function": {"name": "now"')
    assert "<call>get_weather [('city', 'Rom'), ('days', 2)]</call><|im_end|>" in prompt
    assert "<|im_start|>tool\nx for c1<|im_end|>" in prompt


def test_reasoning_comes_apart_from_the_answer_that_a_schema_holds(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    fields = {"tools": None, "response_format": shape, "chat_template_kwargs": {"think": True},
              "thinking_token_budget": 7}  # fmt: skip
    answer = server.chat(max_tokens=300, **fields)
    message = answer["choices"][0]["message"]
    assert json.loads(message["content"]) in ({"ok": True}, {"ok": False})
    assert message["reasoning"] == message["reasoning_content"] != ""
    details = answer["usage"]["completion_tokens_details"]
    # Counted by encoding the text: halves of characters, which this model writes, count thrice.
    assert 0 < details["reasoning_tokens"] <= 3 * 7
    same = streamed(server, **fields)["message"]
    assert (same["content"], same["reasoning"]) == (message["content"], message["reasoning"])
    hidden = server.chat(max_tokens=300, include_reasoning=False, **fields)
    assert "reasoning" not in hidden["choices"][0]["message"]


def test_a_call_after_reasoning_is_read(server: RunningServer) -> None:
    choice = ask(server, tool_choice="required", parallel_tool_calls=False, max_tokens=400,
                 chat_template_kwargs={"think": True}, thinking_token_budget=5)  # fmt: skip
    # Grammars of the model's own format have no budget for reasoning: it may use all tokens up.
    if choice["finish_reason"] != "length":
        (call,) = choice["message"]["tool_calls"]
        check_call(call)
    assert choice["message"]["reasoning"]


def test_without_a_call_tools_change_nothing_of_the_answer(server: RunningServer) -> None:
    plain = ask(server, tools=None, max_tokens=24)["message"]["content"]
    with_none = ask(server, tools=TOOLS, tool_choice="none", max_tokens=24)["message"]["content"]
    assert with_none == plain
    choice = ask(server, max_tokens=24)
    assert choice["message"]["content"] == streamed(server, max_tokens=24)["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "twice"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": None, "tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nix"}}}, "'nix'; tools offers"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"functions": [{"name": "x"}]}, "give the functions as tools"),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [
                {"function": {"name": "now", "arguments": "{broken"}}]}]},
            "JSON object",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [
                {"function": {"name": "now", "arguments": '{"a":' + "[" * 5000}}]}]},
            "JSON object",
        ),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "content is missing"),
        ({"tools": None, "thinking_token_budget": 2**70}, "thinking_token_budget"),
        *[
            ({"tools": None, "chat_template_kwargs": {"think": True},
              "structured_outputs": {"structural_tag": tag}}, "structural_tag")
            for tag in ("{", "[1]", "5", "null", '{"format": 5}', {"format": None})
        ],
    ],
)  # fmt: skip
def test_a_malformed_request_gets_a_400_that_says_why(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    defaults = {"model": "tiny", "messages": [USER], "tools": TOOLS, "max_tokens": 4}
    answer = server.post("/v1/chat/completions", {**defaults, **fields})
    assert answer.status == 400, answer.body
    assert words in answer.error
    assert ask(server, tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]


def test_tools_with_a_schema_that_no_grammar_holds_are_offered_but_not_forced(
    server: RunningServer,
) -> None:
    values = {"type": "array", "uniqueItems": True}
    parameters = {"type": "object", "properties": {"a": values}}
    tool = {"type": "function", "function": {"name": "x", "parameters": parameters}}
    assert ask(server, tools=[tool], max_tokens=4)["finish_reason"] == "length"
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert "'x'" in answer.error


def test_numbers_over_64_bits_in_schemas_are_taken(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 2**70}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
    (call,) = ask(server, tools=[tool], tool_choice="required", parallel_tool_calls=False)[
        "message"
    ]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2**70}
    shape = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = ask(server, tools=None, response_format=shape, thinking_token_budget=3,
                 chat_template_kwargs={"think": True})  # fmt: skip
    assert json.loads(answer["message"]["content"]) == {"a": 2**70}


def test_many_tools_do_not_keep_other_requests_waiting() -> None:
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(50_000)]
    request = ChatCompletionRequest.model_validate({"messages": [USER], "tools": tools})
    start = time.perf_counter()
    request.check()
    assert time.perf_counter() - start < 1 * slowness()


def test_wrong_names_of_parsers_are_refused_at_the_start(tiny_model: Path) -> None:
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        done = run_cli("serve", str(tiny_model), flag, "hermse")
        assert done.returncode == 2, done.stderr
        assert f"{flag} 'hermse' is unknown: it takes" in done.stderr
