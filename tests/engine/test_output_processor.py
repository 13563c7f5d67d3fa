"""From an engine's tokens to what a client is told: stop texts, choices, counts."""

import pytest
from tiny_models import make_tokenizer

from vllm import SamplingParams
from vllm.core.outputs import EngineOutput
from vllm.engine.input_processor import ProcessedInput
from vllm.engine.output_processor import OutputProcessor


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_cached_tokens_are_those_of_the_choice_with_the_most():
    outputs = OutputProcessor(None)
    state = outputs.add("a", ProcessedInput(None, [1, 2], []), SamplingParams(n=2))
    outputs.process([EngineOutput("a#0", [5], num_cached_tokens=16), EngineOutput("a#1", [5])])
    assert state.num_cached_tokens == 16


def test_what_comes_after_a_stop_text_is_not_told(tokenizer):
    outputs = OutputProcessor(tokenizer)
    ids = tokenizer("quick brown fox").input_ids
    params = SamplingParams(stop=["row"], detokenize=True)
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    _, to_abort = outputs.process([EngineOutput("a#0", ids)])
    assert to_abort == ["a#0"]
    outputs.process([EngineOutput("a#0", ids)])
    output = state.take().outputs[0]
    assert output.text == "quick b"
    assert tokenizer.decode(output.token_ids) == "quick brown" and output.token_ids == ids[:3]


def test_a_stop_text_before_min_tokens_does_not_end_later(tokenizer):
    outputs = OutputProcessor(tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(c) for c in "xyz"]
    params = SamplingParams(stop=["x"], min_tokens=2)
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    outputs.process([EngineOutput("a#0", [token]) for token in ids])
    assert state.choices[0].finish_reason is None and state.choices[0].text == "xyz"


def test_a_stop_text_counts_from_min_tokens_on(tokenizer):
    outputs = OutputProcessor(tokenizer)
    ids = tokenizer("quick fox").input_ids
    params = SamplingParams(stop=["fox"], min_tokens=len(ids))
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    outputs.process([EngineOutput("a#0", [token]) for token in ids])
    assert state.choices[0].stop_reason == "fox"
