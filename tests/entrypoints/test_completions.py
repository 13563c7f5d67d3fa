"""`/v1/completions` as clients see it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from .serving import RunningServer
from .tiny_model import VOCAB_SIZE

PROMPT = "ban fick"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def test_the_openai_client_gets_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_greedy_text_is_that_of_transformers(
    server: RunningServer, tokenizer: Any, reference: LlamaForCausalLM
) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = reference.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    choice = server.complete(max_tokens=24, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == expected.tolist()
    assert choice["prompt_token_ids"] == ids[0].tolist()


def test_a_prompt_as_token_ids_gives_the_text_of_the_same_prompt(
    server: RunningServer, tokenizer: Any
) -> None:
    as_ids = server.complete(prompt=tokenizer.encode(PROMPT))
    assert as_ids["choices"] == server.complete(prompt=PROMPT)["choices"]


@pytest.mark.parametrize("kind", ["texts", "token ids"])
def test_many_prompts_are_answered_in_order(
    server: RunningServer, tokenizer: Any, kind: str
) -> None:
    texts = ["ban", "fick lon", "mest", "tu"]
    prompts = texts if kind == "texts" else [tokenizer.encode(text) for text in texts]
    together = server.complete(prompt=prompts)
    alone = [server.complete(prompt=prompt) for prompt in prompts]
    assert [c["index"] for c in together["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in together["choices"]] == [a["choices"][0]["text"] for a in alone]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][count] == sum(a["usage"][count] for a in alone)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "seed": 7, "n": 3},
        {"prompt": ["ban", "mest"], "temperature": 0},
        {"prompt": ["ban", "mest"], "temperature": 1.0, "seed": 7, "n": 2},
        {"echo": True, "temperature": 0},
        {"temperature": 0, "stop": ["e"]},
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(server: RunningServer, fields: Any) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 24, **fields}
    whole = server.complete(**fields)
    events = server.events("/v1/completions", **fields, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        assert text_of(events, choice["index"]) == choice["text"]
        ends = [c for e in events for c in e["choices"]
                if c["index"] == choice["index"] and c["finish_reason"]]  # fmt: skip
        assert [(e["finish_reason"], e["stop_reason"]) for e in ends] == [
            (choice["finish_reason"], choice["stop_reason"])
        ]
    assert events[-1]["choices"] == []
    for count in ("prompt_tokens", "completion_tokens"):
        assert events[-1]["usage"][count] == whole["usage"][count]
    assert all(event["usage"] is None for event in events[:-1])


def test_a_stream_tells_usage_only_when_asked(server: RunningServer) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 4}
    assert all("usage" not in e for e in server.events("/v1/completions", **fields))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/completions", **fields, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_streamed_logprobs_add_up_to_those_of_the_whole_answer(server: RunningServer) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 2, "echo": True}
    whole = server.complete(**fields)["choices"][0]["logprobs"]
    events = server.events("/v1/completions", **fields)
    parts = [c["logprobs"] for e in events for c in e["choices"]]
    for name in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[name]] == whole[name]
    streamed = [value for part in parts for value in part["token_logprobs"]]
    assert streamed[0] is None
    assert streamed[1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-4)


def test_echo_puts_the_prompt_before_the_text(server: RunningServer, tokenizer: Any) -> None:
    plain = server.complete()["choices"][0]["text"]
    assert server.complete(echo=True)["choices"][0]["text"] == PROMPT + plain
    as_ids = server.complete(echo=True, prompt=tokenizer.encode(PROMPT))
    assert as_ids["choices"][0]["text"] == PROMPT + plain


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_are_those_of_transformers(
    server: RunningServer, tokenizer: Any, reference: LlamaForCausalLM, max_tokens: int
) -> None:
    ids = tokenizer.encode("ban fick lon mest")
    answer = server.complete(prompt=[ids], echo=True, logprobs=3, max_tokens=max_tokens)
    shape = answer["choices"][0]["logprobs"]
    assert {len(values) for values in shape.values()} == {len(ids) + max_tokens}
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert shape["token_logprobs"][0] is None
    assert shape["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        expected = logprobs[place - 1]
        assert shape["token_logprobs"][place] == pytest.approx(
            expected[ids[place]].item(), abs=2e-3
        )
        best = max(shape["top_logprobs"][place].values())
        assert best == pytest.approx(expected.max().item(), abs=2e-3)
        is_greedy = expected.argmax().item() == ids[place]
        assert (shape["token_logprobs"][place] == best) == is_greedy
    assert "".join(shape["tokens"]) == answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == max_tokens


def test_prompt_logprobs_have_one_entry_a_token_and_none_for_the_first(
    server: RunningServer,
) -> None:
    answer = server.complete(prompt=[5, 6, 7], prompt_logprobs=1)
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [token in place for token, place in zip(("6", "7"), others, strict=True)] == [True] * 2
    assert set(others[0]["6"]) == {"logprob", "rank", "decoded_token"}


def test_choices_differ_and_repeat_with_the_seed(server: RunningServer) -> None:
    fields = {"n": 4, "temperature": 1.0, "seed": 11, "max_tokens": 16}
    first, second = (server.complete(**fields)["choices"] for _ in range(2))
    assert first == second
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in first}) == 4
    assert server.complete(**{**fields, "seed": 12})["choices"] != first


def test_a_stop_text_ends_the_text_and_is_not_part_of_it(server: RunningServer) -> None:
    whole = server.complete(max_tokens=24)["choices"][0]["text"]
    stop = whole[5:8]
    choice = server.complete(max_tokens=24, stop=stop)["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = server.complete(max_tokens=24, stop=[stop], include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == choice["text"] + stop


def test_a_stop_token_ends_the_text(server: RunningServer) -> None:
    whole = server.complete(max_tokens=24, return_token_ids=True)["choices"][0]
    stop = whole["token_ids"][4]
    choice = server.complete(max_tokens=24, stop_token_ids=[stop], return_token_ids=True)
    ids = whole["token_ids"]
    assert choice["choices"][0]["token_ids"] == ids[: ids.index(stop) + 1]
    assert choice["choices"][0]["stop_reason"] == stop


def test_logit_bias_decides_the_token(server: RunningServer) -> None:
    answer = server.complete(logit_bias={"77": 100}, max_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [77, 77, 77]


def test_the_end_token_ends_unless_it_is_ignored_or_too_early(server: RunningServer) -> None:
    fields = {"logit_bias": {"2": 100}, "max_tokens": 6, "return_token_ids": True}
    ended = server.complete(**fields)["choices"][0]
    assert (ended["token_ids"], ended["finish_reason"], ended["text"]) == ([2], "stop", "")
    assert len(server.complete(**fields, ignore_eos=True)["choices"][0]["token_ids"]) == 6
    late = server.complete(**fields, min_tokens=3)["choices"][0]
    assert (len(late["token_ids"]), late["token_ids"][-1]) == (4, 2)
    shape = server.complete(**fields, logprobs=1)["choices"][0]["logprobs"]
    assert len(shape["tokens"]) == 1


@pytest.mark.parametrize("name", ["guided_choice", "structured_outputs"])
def test_a_choice_is_one_of_those_given(server: RunningServer, name: str) -> None:
    choices = ["red", "green"]
    value = choices if name == "guided_choice" else {"choice": choices}
    answer = server.complete(**{name: value}, max_tokens=20, temperature=1.0, seed=3)
    assert answer["choices"][0]["text"] in choices


def test_a_regex_is_matched(server: RunningServer) -> None:
    text = server.complete(guided_regex="[ab]{3}-[0-9]{2}", max_tokens=20)["choices"][0]["text"]
    assert re.fullmatch("[ab]{3}-[0-9]{2}", text)


def test_json_follows_its_schema(server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    text = server.complete(response_format=format_, max_tokens=200)["choices"][0]["text"]
    value = json.loads(text)
    assert set(value) == {"a", "b"}
    assert value["b"] in ("x", "y")


def test_cached_tokens_are_told(server: RunningServer) -> None:
    prompt = [(7 * i) % (VOCAB_SIZE - 10) + 5 for i in range(64)]
    first, second = (server.complete(prompt=prompt)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 32


def test_the_whole_context_can_be_used(server: RunningServer) -> None:
    answer = server.complete(prompt=[5] * 2040, max_tokens=8, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 2048


def test_a_client_can_name_its_request(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    answer = server.post("/v1/completions", body, **{"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json["id"] == "cmpl-mine-1"
    for unfit in ("with space", "x" * 200, 'quo"te'):
        other = server.post("/v1/completions", body, **{"X-Request-Id": unfit})
        assert re.fullmatch("[0-9a-f]{32}", other.headers["x-request-id"])
        assert other.json["id"] == f"cmpl-{other.headers['x-request-id']}"


def test_lm_eval_reads_loglikelihoods(
    server: RunningServer, tokenizer: Any, reference: LlamaForCausalLM
) -> None:
    """The request and the reading of lm_eval's local-completions model, on a batch."""
    contexts, continuations = ["ban fick", "mest"], [" lon", " tu bast"]
    encoded = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in zip(contexts, continuations)]
    answer = server.post(
        "/v1/completions",
        {"model": "tiny", "prompt": [a + b for a, b in encoded], "temperature": 0,
         "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True},
    ).json  # fmt: skip
    for choice, (context, continuation) in zip(answer["choices"], encoded, strict=True):
        shape, start = choice["logprobs"], len(context)
        total = sum(shape["token_logprobs"][start:-1])
        is_greedy = all(
            own == max(top.values())
            for own, top in zip(
                shape["token_logprobs"][start:-1], shape["top_logprobs"][start:-1], strict=True
            )
        )
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            logprobs = reference(ids).logits[0].log_softmax(-1)[start - 1 : -1]
        expected = logprobs[range(len(continuation)), continuation].sum().item()
        assert math.isclose(total, expected, abs_tol=5e-3)
        assert is_greedy == (logprobs.argmax(-1).tolist() == continuation)


def test_a_default_length_fits_what_the_prompt_leaves(server: RunningServer) -> None:
    limit = server.get("/v1/models").json["data"][0]["max_model_len"]
    prompt = [5] * (limit - 3)
    answer = server.post("/v1/completions", {"prompt": prompt, "ignore_eos": True})
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 3
    refused = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 16})
    assert refused.status == 400 and "ask for at most 3" in refused.error


def test_cached_tokens_of_all_prompts_are_told(server: RunningServer) -> None:
    prompts = [[(k * i) % 90 + 5 for i in range(64)] for k in (11, 13)]
    server.complete(prompt=prompts)
    together, *alone = (
        server.complete(prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for prompt in (prompts, *prompts)
    )
    assert together == sum(alone) > max(alone)


def test_one_prompt_of_several_that_cannot_be_served_refuses_all(server: RunningServer) -> None:
    refused = server.post("/v1/completions", {"prompt": [[5], [5] * 3000], "max_tokens": 4})
    assert refused.status == 400 and "3000 tokens" in refused.error


def test_a_default_length_never_goes_below_min_tokens(server: RunningServer) -> None:
    refused = server.post("/v1/completions", {"prompt": [5] * 2045, "min_tokens": 5})
    assert refused.status == 400 and "ask for at most 3" in refused.error


def test_a_stream_tells_of_the_prompt_once(server: RunningServer) -> None:
    fields = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "return_token_ids": True}
    events = server.events("/v1/completions", **fields, max_tokens=200, ignore_eos=True)
    choices = [choice for event in events for choice in event["choices"]]
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert [name in choice for choice in choices] == [True] + [False] * (len(choices) - 1)
    assert len(choices) > 1


def test_answers_are_in_the_order_of_the_prompts_whichever_ends_first(
    server: RunningServer,
) -> None:
    prompts = ["ban", "mest"]
    first, second = (
        server.complete(prompt=prompt, max_tokens=24)["choices"][0]["text"] for prompt in prompts
    )
    stop = next(second[i : i + 3] for i in range(9) if second[i : i + 3] not in first)
    choices = server.complete(prompt=prompts, max_tokens=24, stop=stop)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["text"] for choice in choices] == [first, second[: second.index(stop)]]


def test_a_prompt_alone_is_streamed_too(server: RunningServer) -> None:
    events = server.events("/v1/completions", prompt="ban", echo=True, max_tokens=0)
    assert text_of(events) == "ban"
    assert [c["finish_reason"] for e in events for c in e["choices"]] == ["length"]
