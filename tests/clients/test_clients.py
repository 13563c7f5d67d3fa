"""Clients that people use, each from its own package, against the demo model.

What the model cannot decide is forced by grammar: a tool that must be called, a schema.
"""

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.slow

ASK = "What is the weather in Rome?"
USER = {"role": "user", "content": ASK}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS},
}


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def check(arguments: str) -> None:
    Weather.model_validate_json(arguments)


def test_the_demo_model_says_where_its_weights_are_from(client: openai.OpenAI) -> None:
    (model, _) = client.models.list().data
    assert "4-bit" in model.model_extra["description"]  # type: ignore[index]


def test_openai_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    text = client.completions.create(model="tiny", prompt="One two", max_tokens=4)
    assert text.choices[0].text


def test_openai_calls_a_tool_and_answers_with_its_result(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "tools": [TOOL], "temperature": 0, "max_tokens": 80}
    choice = client.chat.completions.create(messages=[USER], tool_choice="required", **fields)
    message = choice.choices[0].message
    assert choice.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls[:1]
    check(call.function.arguments)
    with client.chat.completions.stream(
        messages=[USER], tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **fields,
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    check(streamed.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = client.chat.completions.create(
        messages=[USER, message, result], tool_choice="none", **fields
    )
    assert last.choices[0].message.content


def test_openai_parses_outputs(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "temperature": 0, "max_tokens": 200}
    parsed = client.chat.completions.parse(messages=[USER], response_format=Weather, **fields)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    called = client.chat.completions.parse(
        messages=[USER], tools=[tool], tool_choice="required", **fields
    )
    function = called.choices[0].message.tool_calls[0].function
    assert isinstance(function.parsed_arguments, Weather)


def test_openai_responses(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "temperature": 0}
    first = client.responses.create(input=ASK, max_output_tokens=12, **fields)
    assert first.output_text
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS,
                 "strict": True}  # fmt: skip
    called = client.responses.create(input=ASK, tools=[tool], tool_choice="required",
                                     max_output_tokens=80, **fields)  # fmt: skip
    call = next(item for item in called.output if item.type == "function_call")
    check(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(input=[result], previous_response_id=called.id,
                                     max_output_tokens=12, **fields)  # fmt: skip
    assert second.output_text
    parsed = client.responses.parse(input=ASK, text_format=Weather, max_output_tokens=60, **fields)
    assert isinstance(parsed.output_parsed, Weather)


def test_anthropic_calls_a_tool(base_url: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    own = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)
    tool = {"name": "get_weather", "description": "Of a city.", "input_schema": PARAMETERS}
    fields: Any = {"model": "tiny", "max_tokens": 80, "tools": [tool]}
    message = own.messages.create(messages=[USER], tool_choice={"type": "any"}, **fields)
    use = next(block for block in message.content if block.type == "tool_use")
    Weather.model_validate(use.input)
    turns = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}]  # fmt: skip
    with own.messages.stream(messages=turns, tool_choice={"type": "none"}, **fields) as stream:
        assert "".join(stream.text_stream)
    assert own.messages.count_tokens(model="tiny", messages=[USER]).input_tokens > 5


def test_langchain_calls_a_tool_and_takes_its_result(base_url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain.ChatOpenAI(model="tiny", base_url=base_url, api_key="none", temperature=0,
                                 max_tokens=80, max_retries=0)  # fmt: skip
    bound = model.bind_tools([TOOL], tool_choice="any")
    question = HumanMessage(ASK)
    answer = bound.invoke([question])
    Weather.model_validate(answer.tool_calls[0]["args"])
    streamed = None
    for chunk in bound.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    Weather.model_validate(streamed.tool_calls[0]["args"])
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert model.invoke([question, answer, *results]).content
    assert isinstance(model.with_structured_output(Weather).invoke(ASK), Weather)


def test_litellm_sends_its_own_answers_back(base_url: str) -> None:
    litellm = pytest.importorskip("litellm")
    for provider in ("hosted_vllm", "openai"):
        fields: Any = {"model": f"{provider}/tiny", "api_base": base_url, "api_key": "none",
                       "temperature": 0, "max_tokens": 80, "tools": [TOOL]}  # fmt: skip
        answer = litellm.completion(messages=[USER], tool_choice="required", **fields)
        message = answer.choices[0].message
        check(message.tool_calls[0].function.arguments)
        results = [{"role": "tool", "tool_call_id": call.id, "name": "get_weather",
                    "content": "sunny"} for call in message.tool_calls]  # fmt: skip
        sent = message.model_dump() | {"provider_specific_fields": {"refusal": None}}
        last = litellm.completion(messages=[USER, sent, *results], tool_choice="none", **fields)
        assert last.choices[0].message.content
        chunks = [*litellm.completion(messages=[USER], tool_choice="required", stream=True,
                                      **fields)]  # fmt: skip
        whole = litellm.stream_chunk_builder(chunks, messages=[USER])
        check(whole.choices[0].message.tool_calls[0].function.arguments)


def test_instructor_in_its_default_mode(client: openai.OpenAI) -> None:
    instructor = pytest.importorskip("instructor")
    patched = instructor.from_openai(client)
    for _ in range(2):
        weather = patched.chat.completions.create(
            model="tiny", messages=[USER], response_model=Weather, max_tokens=80, max_retries=0
        )
        assert isinstance(weather, Weather)


def test_openai_agents_loop_over_two_tools_with_their_default_model_class(base_url: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    calls: list[str] = []

    @agents.function_tool(is_enabled=lambda context, agent: not calls)
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        calls.append("get_weather")
        return "sunny"

    @agents.function_tool(is_enabled=lambda context, agent: bool(calls))
    def finish(sky: Literal["sunny", "grey"]) -> str:
        calls.append("finish")
        return sky

    async def run() -> tuple[Any, Any]:
        own = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
        agents.set_default_openai_client(own, use_for_tracing=False)
        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False,
                                        temperature=0, max_tokens=60)  # fmt: skip
        agent = agents.Agent(
            name="a", model="tiny", tools=[get_weather, finish], model_settings=settings,
            tool_use_behavior={"stop_at_tool_names": ["finish"]}, reset_tool_choice=False,
        )  # fmt: skip
        typed = agents.Agent(name="b", model="tiny", output_type=Weather,
                             model_settings=agents.ModelSettings(max_tokens=60))  # fmt: skip
        return await agents.Runner.run(agent, ASK, max_turns=8), await agents.Runner.run(typed, ASK)

    looped, held = asyncio.run(run())
    assert calls == ["get_weather", "finish"]
    assert looped.final_output in ("sunny", "grey")
    assert isinstance(held.final_output, Weather)


def test_pydantic_ai_with_tools_and_an_output_type(base_url: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    limits = pydantic_ai.UsageLimits(request_limit=12)
    own = {"temperature": 0.8, "max_tokens": 80, "parallel_tool_calls": False}
    agent = pydantic_ai.Agent(model, output_type=Weather, model_settings=own)
    calls: list[str] = []

    async def once(context: Any, tool: Any) -> Any:
        return None if calls else tool

    @agent.tool_plain(prepare=once)
    def list_cities() -> str:
        """Which cities there are."""
        calls.append("list_cities")
        return "Rome, Oslo"

    for seed in range(2):
        settings = {**own, "seed": seed}
        result = agent.run_sync(ASK, model_settings=settings, usage_limits=limits)
        assert isinstance(result.output, Weather)
    native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Weather))
    assert isinstance(native.run_sync(ASK, model_settings=own).output, Weather)


def test_a_loop_of_two_steps_by_hand(client: openai.OpenAI) -> None:
    """As frameworks do it: call, result, call, result, answer; the history is what they hold."""
    messages: list[Any] = [USER]
    for _ in range(2):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, tools=[TOOL], tool_choice="required", max_tokens=80,
            parallel_tool_calls=False,
        ).choices[0].message  # fmt: skip
        messages.append(answer.model_dump())
        for call in answer.tool_calls or []:
            check(call.function.arguments)
            content = json.dumps({"sky": "clear"})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    last = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10)
    assert last.choices[0].message.content is not None
    assert len(messages) == 5
