"""The two shapes in which log-probabilities are told."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vllm.entrypoints.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    positions,
    prompt_logprobs_json,
)
from vllm.entrypoints.openai.prompts import Prompts
from vllm.outputs import Logprob


def test_a_completion_lists_tokens_with_offsets_into_the_text() -> None:
    first = {5: Logprob(-1.0, 1, "ab"), 6: Logprob(-2.0, 2, "c")}
    second = {6: Logprob(-3.0, 2, "c"), 7: Logprob(-0.5, 1, "d")}
    assert completion_logprobs(positions([5, 6], [first, second]), 10) == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-1.0, -3.0],
        "top_logprobs": [{"ab": -1.0, "c": -2.0}, {"d": -0.5, "c": -3.0}],
        "text_offset": [10, 12],
    }


def test_the_first_token_of_an_echoed_prompt_has_text_but_no_logprobs() -> None:
    second = {6: Logprob(-3.0, 2, "c")}
    shape = completion_logprobs(positions([5, 6], [None, second]), 0, first_text="abc")
    assert shape["tokens"] == ["abc", "c"]
    assert shape["token_logprobs"] == [None, -3.0]
    assert shape["top_logprobs"] == [None, {"c": -3.0}]
    assert shape["text_offset"] == [0, 3]


def test_of_tokens_with_equal_text_the_likeliest_is_kept() -> None:
    place = {5: Logprob(-4.0, 3, "\ufffd"), 6: Logprob(-0.1, 1, "\ufffd")}
    shape = completion_logprobs(positions([5], [place]), 0)
    assert shape["top_logprobs"] == [{"\ufffd": -0.1}]
    assert shape["token_logprobs"] == [-4.0]


def test_minus_infinity_stays_a_number_in_json() -> None:
    place = {5: Logprob(-math.inf, 9, "a")}
    shapes = [completion_logprobs(positions([5], [place]), 0), prompt_logprobs_json([None, place])]
    assert json.loads(json.dumps(shapes, allow_nan=False)) == shapes


def test_tokens_without_text_are_named_by_id() -> None:
    place = {5: Logprob(-1.0, 1, None)}
    assert completion_logprobs(positions([5], [place]), 0)["tokens"] == ["token_id:5"]


def test_chat_reports_the_likeliest_tokens_and_the_one_taken() -> None:
    place = {5: Logprob(-3.0, 3, "a"), 6: Logprob(-1.0, 1, "b"), 7: Logprob(-2.0, 2, "é")}
    (entry,) = chat_logprobs(positions([5], [place]), 2, Prompts(None, 10))["content"]
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
