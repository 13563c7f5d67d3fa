"""`/v1/responses` and Anthropic's `/v1/messages` of a running server: translations of chat."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from .serving import Answer, RunningServer, started_server, wait_until
from .test_tools import DAYS, TEMPLATE, check_call
from .test_tools import TOOLS as CHAT_TOOLS

KEY = "sesame"
BEARER = {"Authorization": f"Bearer {KEY}"}
FUNCTIONS = [tool["function"] for tool in CHAT_TOOLS]
TOOLS: list[Any] = [{"type": "function", "strict": True, **one} for one in FUNCTIONS]
CUSTOM = [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]
USER = {"role": "user", "content": "ban fick"}
QUIET: Any = {"chat_template_kwargs": {"think": False}}
# As Qwen's: thinking is told by enable_thinking.
THINKING_TEMPLATE = TEMPLATE.replace(
    "{% if think %}<think>",
    "{% set think = enable_thinking | default(think) %}{% if think %}<think>",
)


class Days(pydantic.BaseModel):
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("translated")
    (folder / "template.jinja").write_text(THINKING_TEMPLATE)
    flags = ["--chat-template", str(folder / "template.jinja"), "--max-model-len", "1024",
             "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
             "--api-key", KEY]  # fmt: skip
    with started_server(tiny_model, folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def post(server: RunningServer, path: str, **fields: Any) -> Answer:
    return server.post(f"/v1/{path}", fields, **BEARER)


def respond(server: RunningServer, **fields: Any) -> dict[str, Any]:
    defaults = {"input": "ban fick", "temperature": 0, "max_output_tokens": 8, **QUIET}
    answer = post(server, "responses", **{**defaults, **fields})
    assert answer.status == 200, answer.body
    return dict(answer.json)


def message(server: RunningServer, **fields: Any) -> dict[str, Any]:
    defaults = {"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 8}
    answer = post(server, "messages", **{**defaults, **fields})
    assert answer.status == 200, answer.body
    return dict(answer.json)


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    defaults = {"messages": [USER], "temperature": 0, "max_tokens": 8, **QUIET}
    answer = post(server, "chat/completions", **{**defaults, **fields})
    assert answer.status == 200, answer.body
    return dict(answer.json)


def sse(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.body.decode().split("\n\n")
    assert end == ""
    found = []
    for event in events:
        name, _, data = event.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    return str(item["content"][0]["text"])


def test_each_api_gives_the_text_and_counts_of_chat(server: RunningServer) -> None:
    system = {"role": "system", "content": "be"}
    of_chat = chat(server, messages=[system, USER])
    content = of_chat["choices"][0]["message"]["content"]
    response = respond(server, instructions="be")
    told = message(server, system=[{"type": "text", "text": "be", "cache_control": {}}])
    assert text_of(response) == content
    assert told["content"] == [{"type": "text", "text": content, "citations": None}]
    usage = of_chat["usage"]
    assert response["usage"]["total_tokens"] == usage["total_tokens"]
    assert response["usage"]["output_tokens"] == told["usage"]["output_tokens"] == 8
    cached = told["usage"]["cache_read_input_tokens"]
    assert told["usage"]["input_tokens"] + cached == usage["prompt_tokens"]
    assert (response["status"], told["stop_reason"]) == ("incomplete", "max_tokens")
    events = sse(post(server, "responses", input="ban fick", instructions="be", temperature=0,
                      max_output_tokens=8, stream=True, **QUIET))  # fmt: skip
    assert text_of(events[-1]["response"]) == content
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == content


def test_a_conversation_goes_on_from_a_stored_response(
    server: RunningServer, client: openai.OpenAI
) -> None:
    first = client.responses.create(model="tiny", input="ban", max_output_tokens=6,
                                    temperature=0, instructions="be", extra_body=QUIET)  # fmt: skip
    again = client.responses.create(
        model="tiny", input="more", previous_response_id=first.id, max_output_tokens=6,
        temperature=0, extra_body=QUIET,
    )  # fmt: skip
    history = [{"role": "user", "content": "ban"},
               {"role": "assistant", "content": first.output_text},
               {"role": "user", "content": "more"}]  # fmt: skip
    # Instructions are those of one response.
    whole = chat(server, messages=history, max_tokens=6)
    assert again.output_text == whole["choices"][0]["message"]["content"]
    items = [{"role": "user", "content": "ban"},
             {"type": "item_reference", "id": first.output[0].id},
             {"role": "user", "content": [{"type": "input_text", "text": "more"}]}]  # fmt: skip
    assert text_of(respond(server, input=items, max_output_tokens=6)) == again.output_text
    assert client.responses.retrieve(again.id).output == again.output
    (item,) = client.responses.input_items.list(again.id).data
    assert item.content[0].text == "more"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(again.id)
    client.responses.delete(again.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            use(again.id)
    with pytest.raises(openai.BadRequestError, match="is not stored"):
        client.responses.create(model="tiny", input="x", previous_response_id=again.id)
    unstored = client.responses.create(model="tiny", input="x", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_the_openai_client_calls_tools_and_gets_parsed_outputs(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input=[USER], tools=TOOLS, tool_choice="required", temperature=1.0,
        parallel_tool_calls=False, extra_body={**QUIET, "seed": 1},
    ) as stream:  # fmt: skip
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress",
                         "response.output_item.added"]  # fmt: skip
    (call,) = answer.output
    assert call.type == "function_call"
    check_call({"function": {"name": call.name, "arguments": call.arguments}})
    items: list[Any] = [USER, call.model_dump(exclude={"parsed_arguments"})]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "17"}]
    named: Any = {"type": "function", "name": "now"}
    only: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, only):
        answer = client.responses.create(
            model="tiny", input=items, tools=TOOLS, tool_choice=choice, extra_body=QUIET,
            parallel_tool_calls=False,
        )  # fmt: skip
        assert [item.name for item in answer.output] == ["now"]  # type: ignore[union-attr]
    parsed = client.responses.parse(model="tiny", input="x", text_format=Days,
                                    max_output_tokens=200, extra_body=QUIET)  # fmt: skip
    assert isinstance(parsed.output_parsed, Days)


def test_reasoning_is_an_item_before_the_text_that_a_schema_holds(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"days": DAYS}, "required": ["days"],
              "additionalProperties": False}  # fmt: skip
    fields = {"text": {"format": {"type": "json_schema", "name": "s", "schema": schema}},
              "chat_template_kwargs": {"think": True}, "thinking_token_budget": 5,
              "max_output_tokens": 300}  # fmt: skip
    reasoning, said = respond(server, **fields)["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"][0]["type"] == "reasoning_text"
    assert json.loads(said["content"][0]["text"])["days"] in (1, 2, 3)
    plain = respond(server, max_output_tokens=4, reasoning={"effort": "none", "summary": "auto"},
                    chat_template_kwargs=None)  # fmt: skip
    assert [item["type"] for item in plain["output"]] == ["message"]
    back = [USER, reasoning, said, USER]
    assert len(respond(server, input=back, max_output_tokens=2)["output"]) == 1


def test_beside_tools_that_may_be_called_a_format_holds_all_else(server: RunningServer) -> None:
    shape = {"type": "json_schema", "name": "days", "schema": Days.model_json_schema()}
    kinds = set()
    for seed in range(6):
        (item,) = respond(server, tools=TOOLS[1:], parallel_tool_calls=False, seed=seed,
                          temperature=1.0, max_output_tokens=300,
                          text={"format": shape})["output"]  # fmt: skip
        kinds.add(item["type"])
        if item["type"] == "function_call":
            assert json.loads(item["arguments"]).keys() == {"utc"}
        else:
            assert json.loads(item["content"][0]["text"])["days"] in (1, 2, 3)
    assert kinds == {"function_call", "message"}


def test_log_probabilities_are_those_of_the_text(server: RunningServer) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = respond(server, **fields)["output"]
    entries = item["content"][0]["logprobs"]
    of_chat = chat(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert entries == of_chat
    events = sse(post(server, "responses", input="ban fick", temperature=0, max_output_tokens=8,
                      stream=True, **fields, **QUIET))  # fmt: skip
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == of_chat


def test_tools_of_anthropic_are_called_and_answered(server: RunningServer) -> None:
    one = {"type": "any", "disable_parallel_tool_use": True}
    told = message(server, tools=CUSTOM, tool_choice=one, max_tokens=300, temperature=1.0)
    (use,) = told["content"]
    check_call({"function": {"name": use["name"], "arguments": json.dumps(use["input"])}})
    assert (use["type"], told["stop_reason"]) == ("tool_use", "tool_use")
    result = {"type": "tool_result", "tool_use_id": use["id"],
              "content": [{"type": "text", "text": "17"}]}  # fmt: skip
    history = [USER, {"role": "assistant", "content": told["content"]},
               {"role": "user", "content": [result, {"type": "text", "text": "and?"}]}]  # fmt: skip
    body = {"model": "tiny", "messages": history, "tools": CUSTOM}
    count = post(server, "messages/count_tokens", **body).json
    arguments = json.dumps(use["input"])
    function = {"name": use["name"], "arguments": arguments}
    same = [USER, {"role": "assistant", "content": None, "tool_calls": [
                {"id": use["id"], "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": use["id"], "content": "17"},
            {"role": "user", "content": "and?"}]  # fmt: skip
    fields = {"messages": same, "tools": CHAT_TOOLS, "chat_template_kwargs": {"think": False}}
    tokens = server.post("/tokenize", fields, **BEARER).json
    assert count == {"input_tokens": tokens["count"]}
    for choice, kinds in (({"type": "none"}, {"text"}), ({"type": "tool", "name": "now"},
                          {"tool_use"})):  # fmt: skip
        answer = message(server, messages=history, tools=CUSTOM, tool_choice=choice,
                         max_tokens=8 if "text" in kinds else 300)  # fmt: skip
        assert {block["type"] for block in answer["content"]} == kinds


def test_thinking_is_a_block_where_it_is_asked_for(server: RunningServer) -> None:
    # Without a budget: this model ends its reasoning only where a grammar says so.
    asked = {"thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 40}
    thinking, *rest = message(server, **asked)["content"]
    assert thinking["type"] == "thinking"
    assert thinking["thinking"] != "" != thinking["signature"]
    assert [block["type"] for block in rest] == ["text"]
    events = sse(post(server, "messages", messages=[USER], temperature=0, stream=True, **asked))
    assert [event["type"] for event in events[:3]] == ["message_start", "ping",
                                                       "content_block_start"]  # fmt: skip
    thoughts = [event["delta"].get("thinking", "") for event in events
                if event["type"] == "content_block_delta"]  # fmt: skip
    assert "".join(thoughts) == thinking["thinking"]
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        assert [block["type"] for block in message(server, **fields)["content"]] == ["text"]
    back = [USER, {"role": "assistant", "content": [thinking, *rest]}, USER]
    assert message(server, messages=back)["content"]


def test_a_message_ends_for_the_reason_told(server: RunningServer) -> None:
    whole = message(server, max_tokens=40)["content"][0]["text"]
    letter = next(char for char in whole[1:] if char.isalpha())
    cut = message(server, max_tokens=40, stop_sequences=[letter])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", letter)
    assert cut["content"][0]["text"] == whole[: whole.index(letter)]
    # Words of one token or two; the context holds 1024.
    long = [{"role": "user", "content": "ban " * 300}]
    count = post(server, "messages/count_tokens", messages=long).json["input_tokens"]
    long[0]["content"] = "ban " * (300 * 980 // count)
    full = message(server, messages=long, max_tokens=100_000, ignore_eos=True)
    assert full["stop_reason"] == "model_context_window_exceeded"
    # The text of the assistant that comes last goes on.
    begun = [USER, {"role": "assistant", "content": "ban"}]
    answer = message(server, messages=begun, max_tokens=4)["content"][0]["text"]
    continued = chat(server, messages=begun, max_tokens=4, continue_final_message=True)
    assert answer == continued["choices"][0]["message"]["content"]


def test_a_key_is_taken_from_either_header(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": [USER], "max_tokens": 2}
    for headers, status in (({"x-api-key": KEY}, 200), (BEARER, 200), ({"x-api-key": "no"}, 401),
                            ({}, 401), ({"Authorization": f"Basic {KEY}"}, 401)):  # fmt: skip
        answer = server.post("/v1/messages", body, **{"anthropic-version": "2023-06-01"}, **headers)
        assert answer.status == status
        assert answer.headers["request-id"]
    assert answer.json["error"]["type"] == "authentication_error"
    assert server.get("/v1/models", **{"x-api-key": KEY}).status == 200


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_a_stream_that_its_client_cuts_ends_the_request(server: RunningServer, path: str) -> None:
    limit = {"max_output_tokens": 900} if path == "responses" else {"max_tokens": 900}
    fields = {"responses": {"input": "ban"}, "messages": {"messages": [USER]}}[path]
    data = {**fields, **limit, "stream": True, "ignore_eos": True, "temperature": 1.0}
    body = json.dumps(data).encode()
    head = (f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n")  # fmt: skip
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    before = server.metric(aborted)
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 20)
    assert server.metric(aborted) == before + 1


TOO_LONG = "ban " * 9000
BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input is missing"),
    ({"input": []}, "input is empty"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input.0 should be an object, not 5"),
    ({"input": [{"type": "computer_call"}]}, "input.0.type is 'computer_call'"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content is missing"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "content.0.text"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"}]},
     "input: arguments of a call"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id is missing"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "is of no stored item"),
    ({"input": TOO_LONG}, "the prompt has"),
    ({"background": True}, "background is not supported"),
    ({"conversation": "conv_1"}, "conversation is not supported"),
    ({"prompt": {"id": "p"}}, "prompt is not supported"),
    ({"previous_response_id": "resp_x"}, "'resp_x' is not stored"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search'"),
    ({"tools": ["x"]}, "tools.0 should be an object"),
    ({"tools": [{"type": "function"}]}, "tools.0.name is missing"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "twice"),
    ({"tool_choice": "always"}, "'always' is none of none, auto and required"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type is 'file_search'"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice names 'x'"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}},
     "tool_choice names 'x'"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/x"}}}}, "#/x"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"truncation": "middle"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
]  # fmt: skip
BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages.0 should be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "is 'tool_use'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b",
                                                      "input": "{}"}]}]}, "content.0.input"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "user", "content": TOO_LONG}]}, "the prompt has"),
    ({"system": [{"type": "image"}]}, "system.0.type is 'image'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type is 'bash_20250124'"),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema is missing"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"tool_choice": {"type": "tool"}}, "needs a name"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens should"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"top_k": -7}, "top_k"),
]  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_bad_input_gets_a_400_that_names_it(server: RunningServer, streams: bool) -> None:
    for fields, words in BAD_RESPONSES:
        answer = post(server, "responses", **{"input": "x", **fields, "stream": streams})
        assert (answer.status, words in answer.error) == (400, True), (fields, answer.body)
    for fields, words in BAD_MESSAGES:
        body = {"messages": [USER], "max_tokens": 4, **fields, "stream": streams}
        answer = post(server, "messages", **body)
        error = answer.json
        assert answer.status == 400, (fields, answer.body)
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert words in error["error"]["message"], fields
    assert post(server, "messages", messages=[USER], max_tokens=2).status == 200


def test_errors_of_other_statuses_have_the_form_of_the_api(server: RunningServer) -> None:
    missing = post(server, "messages", model="nix", messages=[USER], max_tokens=2)
    assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")
    wrong = server.get("/v1/messages", **BEARER)
    assert (wrong.status, wrong.json["error"]["type"]) == (405, "invalid_request_error")
    broken = server.post("/v1/messages", b"{", **BEARER)
    assert (broken.status, broken.json["type"]) == (400, "error")
    assert post(server, "responses", model="nix", input="x").status == 404
