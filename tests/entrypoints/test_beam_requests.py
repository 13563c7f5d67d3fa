"""Beam search over HTTP: the beams of `LLM.beam_search`, and what it does not go with."""

from pathlib import Path
from typing import Any

import pytest

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

from .serving import RunningServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "ban fick"}
PROMPTS = ["ban fick", "a longer text of several words"]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model)


@pytest.mark.parametrize("penalty", [1.0, -0.5])
def test_beams_are_those_of_the_library(server: RunningServer, llm: LLM, penalty: float) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=penalty)
    wanted = llm.beam_search(PROMPTS, params)
    got = server.complete(prompt=PROMPTS, use_beam_search=True, n=3, max_tokens=6, logprobs=2,
                          length_penalty=penalty, return_token_ids=True)  # fmt: skip
    beams = [
        (beam, len(llm.get_tokenizer().encode(prompt)))
        for prompt, output in zip(PROMPTS, wanted)
        for beam in output.sequences
    ]
    assert len(got["choices"]) == 6
    for index, (choice, (beam, num_prompt)) in enumerate(zip(got["choices"], beams)):
        assert choice["index"] == index
        assert choice["token_ids"] == beam.tokens[num_prompt:]
        assert choice["finish_reason"] == beam.finish_reason
        assert (beam.text or "").endswith(choice["text"]) and choice["text"]
        told = choice["logprobs"]
        assert sum(told["token_logprobs"]) == pytest.approx(beam.cum_logprob, abs=1e-3)
        assert all(len(place) in (2, 3) for place in told["top_logprobs"])
    assert len({choice["text"] for choice in got["choices"][:3]}) == 3
    assert got["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in got["choices"])


def test_a_chat_has_its_best_beam_first(server: RunningServer) -> None:
    got = server.chat(use_beam_search=True, n=4, max_tokens=5, temperature=None)
    texts = [choice["message"]["content"] for choice in got["choices"]]
    assert len({*texts}) == 4
    alone = server.chat(use_beam_search=True, n=1, max_tokens=5, temperature=None)
    greedy = server.chat(max_tokens=5)
    assert [c["message"]["content"] for c in alone["choices"]] == [
        c["message"]["content"] for c in greedy["choices"]
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True}, "stream"),
        ({"stop": ["a"]}, "stop"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"n": 51}, "n"),
        ({"prompt_logprobs": 0}, "use_beam_search"),
        ({"guided_regex": "a+"}, "use_beam_search"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"length_penalty": 1e308}, "length_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_beams_do_not_heed_is_refused(
    server: RunningServer, fields: dict[str, Any], named: str
) -> None:
    for path in (TEXT, CHAT):
        body = {"prompt": "ban"} if path == TEXT else {"messages": [USER]}
        answer = server.post(path, {"use_beam_search": True, "max_tokens": 3, **body, **fields})
        assert answer.status == 400, answer.body
        assert answer.json["error"]["param"] == named


def test_fields_that_say_nothing_to_a_search_are_told(server: RunningServer) -> None:
    body = {"prompt": "ban", "use_beam_search": True, "max_tokens": 2, "n": 2}
    told = server.post(TEXT, {**body, "temperature": 0.5, "repetition_penalty": 1}).headers
    assert told["warning"] == '299 vllm "temperature has no effect in a beam search"'
    assert "warning" not in server.post(TEXT, body).headers
    told = server.post(TEXT, {"prompt": "ban", "max_tokens": 2, "length_penalty": 2.0}).headers
    assert told["warning"] == '299 vllm "length_penalty has no effect without use_beam_search"'


def test_a_prompt_that_fills_the_context_is_refused_as_without_beams(
    server: RunningServer,
) -> None:
    body = {"prompt": [5] * 100_000, "max_tokens": 2}
    plain = server.post(TEXT, body)
    beams = server.post(TEXT, {**body, "use_beam_search": True, "n": 2})
    assert plain.status == beams.status == 400
    assert plain.error == beams.error
