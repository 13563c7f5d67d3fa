"""The two shapes in which log-probabilities are told."""

import asyncio
import json
import math
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from vllm.entrypoints.openai.generation import built
from vllm.entrypoints.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    positions,
    prompt_logprobs_json,
)
from vllm.entrypoints.openai.prompts import Prompts
from vllm.outputs import Logprob


def told(shape: Any) -> Any:
    """As a client reads it."""
    return json.loads(msgspec.json.encode(shape))


def test_a_completion_lists_tokens_with_offsets_into_the_text() -> None:
    first = {5: Logprob(-1.0, 1, "ab"), 6: Logprob(-2.0, 2, "c")}
    second = {6: Logprob(-3.0, 2, "c"), 7: Logprob(-0.5, 1, "d")}
    assert told(completion_logprobs(positions([5, 6], [first, second]), 10)[0]) == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-1.0, -3.0],
        "top_logprobs": [{"ab": -1.0, "c": -2.0}, {"d": -0.5, "c": -3.0}],
        "text_offset": [10, 12],
    }


def test_the_first_token_of_an_echoed_prompt_has_text_but_no_logprobs() -> None:
    second = {6: Logprob(-3.0, 2, "c")}
    places = positions([5, 6], [None, second])
    shape = told(completion_logprobs(places, 0, first_text="abc")[0])
    assert shape["tokens"] == ["abc", "c"]
    assert shape["token_logprobs"] == [None, -3.0]
    assert shape["top_logprobs"] == [None, {"c": -3.0}]
    assert shape["text_offset"] == [0, 3]


def test_of_tokens_with_equal_text_the_likeliest_is_kept() -> None:
    place = {5: Logprob(-4.0, 3, "\ufffd"), 6: Logprob(-0.1, 1, "\ufffd")}
    shape = told(completion_logprobs(positions([5], [place]), 0)[0])
    assert shape["top_logprobs"] == [{"\ufffd": -0.1}]
    assert shape["token_logprobs"] == [-4.0]


def test_minus_infinity_stays_a_number_in_json() -> None:
    place = {5: Logprob(-math.inf, 9, "a")}
    shape = told(completion_logprobs(positions([5], [place]), 0)[0])
    assert shape["top_logprobs"] == [{"a": shape["token_logprobs"][0]}] == [{"a": -9999.0}]
    entry = {"logprob": -9999.0, "rank": 9, "decoded_token": "a"}
    assert told(prompt_logprobs_json([None, place])) == [None, {"5": entry}]


@pytest.mark.parametrize("count", [0, 1, 64, 65, 200])
def test_lists_of_any_length_are_whole(count: int) -> None:
    places = [{i: Logprob(-float(i), 1, f"t{i}")} for i in range(count)]
    shape = told(completion_logprobs(positions(range(count), places), 0)[0])
    assert shape["top_logprobs"] == [{f"t{i}": -float(i)} for i in range(count)]
    content = told(chat_logprobs(positions(range(count), places), 1, Prompts(None, 10)))["content"]
    assert [entry["top_logprobs"][0]["token"] for entry in content] == shape["tokens"]
    assert [int(*place) for place in told(prompt_logprobs_json(places))] == [*range(count)]


@pytest.mark.parametrize(("count", "is_aside"), [(1, False), (199, False), (200, True)])
def test_many_logprobs_are_put_together_beside_other_requests(count: int, is_aside: bool) -> None:
    """Of a prompt, or of one of the choices: 10 at each of `count` places."""
    places = [{i: Logprob(-1.0) for i in range(10)}] * count
    for told in ([None, *places], None), (None, places):
        thread = asyncio.run(built(told, threading.current_thread))
        assert (thread is not threading.current_thread()) == is_aside


def test_tokens_without_text_are_named_by_id() -> None:
    place = {5: Logprob(-1.0, 1, None)}
    assert completion_logprobs(positions([5], [place]), 0)[0]["tokens"] == ["token_id:5"]


def test_tokens_are_named_by_id_where_asked_with_offsets_into_the_text() -> None:
    first = {5: Logprob(-1.0, 1, "ab"), 6: Logprob(-2.0, 2, "c")}
    second = {6: Logprob(-3.0, 2, "c")}
    places = positions([5, 6], [first, second])
    shape, num_chars = completion_logprobs(places, 4, as_ids=True)
    assert told(shape) == {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-1.0, -3.0],
        "top_logprobs": [{"token_id:5": -1.0, "token_id:6": -2.0}, {"token_id:6": -3.0}],
        "text_offset": [4, 6],
    }
    assert num_chars == 3
    content = told(chat_logprobs(places, 1, Prompts(None, 10), as_ids=True))["content"]
    assert [entry["token"] for entry in content] == ["token_id:5", "token_id:6"]
    assert content[0]["bytes"] == [97, 98]


def test_chat_reports_named_tokens_besides_the_likeliest() -> None:
    place = {5: Logprob(-1.0, 1, "a"), 6: Logprob(-2.0, 2, "b"), 7: Logprob(-9.0, 80, "c")}
    (entry,) = told(chat_logprobs(positions([5], [place]), 1, Prompts(None, 10), {7}))["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["a", "c"]


def test_chat_reports_the_likeliest_tokens_and_the_one_taken() -> None:
    place = {5: Logprob(-3.0, 3, "a"), 6: Logprob(-1.0, 1, "b"), 7: Logprob(-2.0, 2, "é")}
    (entry,) = told(chat_logprobs(positions([5], [place]), 2, Prompts(None, 10)))["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -3.0, [97])
    assert [top["token"] for top in entry["top_logprobs"]] == ["b", "é"]
    assert entry["top_logprobs"][1]["bytes"] == [0xC3, 0xA9]


@pytest.mark.parametrize("character", ["é", "漢", "🙂"])
def test_bytes_of_tokens_that_hold_part_of_a_character_join_to_it(
    tiny_model: Path, character: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = Prompts(tokenizer, 2048)
    token_ids = tokenizer.encode(character, add_special_tokens=False)
    assert len(token_ids) > 1
    data = b"".join(bytes(prompts.token_bytes(t, tokenizer.decode([t]))) for t in token_ids)
    assert data.decode() == character
