"""`/v1/chat/completions` and the paths around it, as clients see them."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

import vllm

from .serving import RunningServer, started_server, wait_until
from .tiny_model import MAX_MODEL_LEN

USER = {"role": "user", "content": "ban fick"}


def test_the_openai_client_gets_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[USER],
        max_completion_tokens=6,
        temperature=0,  # type: ignore[list-item]
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_the_openai_client_gets_a_stream(client: openai.OpenAI, server: RunningServer) -> None:
    whole = server.chat(max_tokens=12)["choices"][0]["message"]["content"]
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[USER], max_tokens=12, temperature=0, stream=True,  # type: ignore[call-overload]
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_messages_become_the_templates_text(server: RunningServer) -> None:
    messages = [{"role": "system", "content": "lon"}, USER]
    answer = server.chat(messages=messages, return_token_ids=True)
    text = "<|im_start|>system\nlon<|im_end|>\n<|im_start|>user\nban fick<|im_end|>\n"
    prompt = text + "<|im_start|>assistant\n"
    tokens = server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json
    assert answer["prompt_token_ids"] == tokens["tokens"]
    continued = server.complete(prompt=tokens["tokens"])["choices"][0]["text"]
    assert answer["choices"][0]["message"]["content"] == continued


def test_several_choices_are_streamed_side_by_side(server: RunningServer) -> None:
    fields = {"messages": [USER], "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 10}
    whole = server.chat(**fields)["choices"]
    events = server.events("/v1/chat/completions", **fields)
    for choice in whole:
        deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [d["role"] for d in deltas if "role" in d] == ["assistant"]
        assert "".join(d.get("content", "") for d in deltas) == choice["message"]["content"]


def test_logprobs_name_each_token_with_its_bytes(server: RunningServer) -> None:
    choice = server.chat(logprobs=True, top_logprobs=3, max_tokens=6)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 6
    joined = bytes(byte for entry in entries for byte in entry["bytes"])
    assert joined.decode(errors="replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        likeliest = entry["top_logprobs"][0]
        assert (entry["token"], entry["logprob"]) == (likeliest["token"], likeliest["logprob"])


def test_the_last_message_can_be_continued(server: RunningServer) -> None:
    messages = [USER, {"role": "assistant", "content": "mest lon"}]
    fields = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    answer = server.chat(**fields)
    prompt = "<|im_start|>user\nban fick<|im_end|>\n<|im_start|>assistant\nmest lon"
    assert server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json == {
        "prompt": prompt
    }
    content = answer["choices"][0]["message"]["content"]
    echoed = server.chat(**fields, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "mest lon" + content


def test_the_template_gets_what_the_request_gives_it(server: RunningServer) -> None:
    plain, shouted = (
        server.post("/tokenize", {"messages": [USER], "chat_template_kwargs": kwargs}).json["count"]
        for kwargs in ({}, {"shout": "LOUD"})
    )
    assert shouted > plain


def test_json_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    format_: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[USER],
        response_format=format_,
        max_tokens=100,  # type: ignore[list-item]
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)


def test_models_are_listed_under_every_name(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny", "alias"]
    assert models[0].max_model_len == MAX_MODEL_LEN  # type: ignore[attr-defined]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError, match="served: tiny, alias"):
        client.models.retrieve("other")


@pytest.mark.parametrize("name", ["tiny", "alias", None])
def test_a_model_answers_to_each_of_its_names(server: RunningServer, name: str | None) -> None:
    assert server.complete(model=name)["model"] == (name or "tiny")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here; served: tiny"):
        client.completions.create(model="gpt-9", prompt="a")


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    text = "ban fick é漢🙂"
    tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}


def test_status_paths_answer(server: RunningServer) -> None:
    assert server.get("/health").status == 200
    assert server.get("/ping").status == 200
    assert server.post("/ping", {}).status == 200
    assert server.get("/version").json == {"version": vllm.__version__}
    decisions = server.get("/kernels").json["decisions"]
    assert {"linear", "attention"} <= {d["problem"]["family"] for d in decisions}
    assert all(d["chosen"] for d in decisions)


def test_the_api_is_described(server: RunningServer) -> None:
    paths = server.get("/openapi.json").json["paths"]
    assert "/v1/chat/completions" in paths
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert "prompt" in body["schema"]["properties"]


def test_metrics_move_with_requests(server: RunningServer) -> None:
    names = {
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": 10,
        "vllm:request_success_total": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 8,
        "vllm:time_per_output_token_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
    }
    before = {name: server.metric(name) for name in names}
    server.complete(prompt=[5, 6], max_tokens=5, ignore_eos=True)
    server.complete(prompt=[5], max_tokens=5, ignore_eos=True)
    assert {name: server.metric(name) - before[name] for name in names} == names
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:num_requests_waiting") == 0


def test_http_answers_are_counted_by_path_and_status(server: RunningServer) -> None:
    def count(path: str, status: int) -> float:
        line = f'vllm:http_requests_total{{method="POST",path="{path}",status="{status}"}} '
        lines = server.get("/metrics").body.decode().splitlines()
        return sum(float(text.removeprefix(line)) for text in lines if text.startswith(line))

    before = [count("/v1/completions", 200), count("/v1/completions", 400), count("other", 404)]
    server.complete()
    server.post("/v1/completions", {})
    server.post("/no/such/path", {})
    after = [count("/v1/completions", 200), count("/v1/completions", 400), count("other", 404)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]


CHAT = {"messages": [{"role": "user", "content": "ban fick"}], "max_tokens": 6}


def test_a_chat_stream_of_several_choices_tells_of_the_prompt_once(server: RunningServer) -> None:
    events = server.events(
        "/v1/chat/completions", **CHAT, n=3, seed=5, temperature=1.0, return_token_ids=True
    )
    assert ["prompt_token_ids" in event for event in events].count(True) == 1


def test_only_a_message_of_the_assistant_is_echoed(server: RunningServer) -> None:
    plain, echoed = (server.chat(**CHAT, echo=echo)["choices"] for echo in (False, True))
    assert plain == echoed


def test_a_stream_echoes_what_it_continues(server: RunningServer) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "mest lon"}]
    fields: Any = {**CHAT, "messages": messages, "continue_final_message": True,
                   "add_generation_prompt": False, "echo": True}  # fmt: skip
    whole = server.chat(**fields)["choices"][0]["message"]["content"]
    events = server.events("/v1/chat/completions", **fields)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole


def test_a_chat_stream_counts_as_it_goes_where_asked(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/chat/completions", **CHAT, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] > 0


def test_answers_have_the_role_that_was_asked_for(tiny_model, tmp_path) -> None:
    with started_server(tiny_model, tmp_path / "log", "--response-role", "model") as server:
        assert server.chat(**CHAT)["choices"][0]["message"]["role"] == "model"
        first, *_ = server.events("/v1/chat/completions", **CHAT)
        assert first["choices"][0]["delta"]["role"] == "model"


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def test_openai_parses_an_answer_that_a_schema_holds(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "ban fick"}]
    answer = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Weather, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)
