"""From an engine's tokens to what a client is told: stop texts, choices, counts."""

import pytest
from tiny_models import make_tokenizer

from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.core.outputs import EngineOutput
from vllm.core.request import FinishReason
from vllm.engine.input_processor import ProcessedInput
from vllm.engine.output_processor import OutputProcessor
from vllm.errors import ConfigError
from vllm.sampling_params import RequestOutputKind


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


def told(state, outputs: OutputProcessor, *steps: EngineOutput) -> list[int]:
    """Tokens of each output that is due, after each step."""
    counts = []
    for step in steps:
        outputs.process([step])
        if state.is_due and (output := state.take()) is not None:
            counts.append(sum(len(new.token_ids) for new in output.outputs))
    return counts


def test_an_event_has_the_tokens_of_the_interval_after_the_first_and_before_the_last():
    outputs = OutputProcessor(None, stream_interval=3)
    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA)
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    steps = [EngineOutput("a#0", [5]) for _ in range(8)]
    last = EngineOutput("a#0", [5], finish_reason=FinishReason.LENGTH)
    assert told(state, outputs, *steps, last) == [1, 3, 3, 2]


def test_the_end_of_a_choice_is_told_at_once():
    outputs = OutputProcessor(None, stream_interval=10)
    params = SamplingParams(n=2, detokenize=False, output_kind=RequestOutputKind.DELTA)
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    ended = EngineOutput("a#1", [5], finish_reason=FinishReason.STOP)
    assert told(state, outputs, EngineOutput("a#0", [5]), EngineOutput("a#0", [5]), ended) == [1, 2]


@pytest.mark.parametrize(("interval", "counts"), [(1, [1] * 6), (3, [3, 3])])
def test_choices_that_have_ended_or_wait_are_not_waited_for(interval, counts):
    outputs = OutputProcessor(None, stream_interval=interval)
    params = SamplingParams(n=4, detokenize=False, output_kind=RequestOutputKind.DELTA)
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    outputs.process([EngineOutput("a#0", [5])])  # the last one has no place yet
    ended = [EngineOutput(f"a#{i}", [5], finish_reason=FinishReason.STOP) for i in (1, 2)]
    outputs.process(ended)
    assert state.is_due and state.take() is not None
    assert told(state, outputs, *[EngineOutput("a#0", [5]) for _ in range(6)]) == counts


def test_a_request_that_is_answered_whole_is_due_at_its_end():
    outputs = OutputProcessor(None)
    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    assert told(state, outputs, *[EngineOutput("a#0", [5]) for _ in range(4)]) == []
    assert told(state, outputs, EngineOutput("a#0", [5], finish_reason=FinishReason.STOP)) == [5]


@pytest.mark.parametrize("interval", [0, -1, 2**21])
def test_an_interval_of_no_tokens_is_refused(interval):
    with pytest.raises(ConfigError, match=f"--stream-interval {interval} is out of range"):
        SchedulerConfig(stream_interval=interval)


def test_text_alone_is_taken_as_an_output_would_tell_it(tokenizer):
    """In turns with outputs, and from the end on by outputs alone."""
    params = SamplingParams(stop=["fox"], output_kind=RequestOutputKind.DELTA)
    ids = tokenizer("quick brown 🦜 fo, fix it").input_ids
    outputs = OutputProcessor(tokenizer)
    one, other = (
        outputs.add(name, ProcessedInput(None, [1], []), params) for name in ("one", "other")
    )
    for place, token in enumerate(ids):
        is_last = place == len(ids) - 1
        reason = FinishReason.LENGTH if is_last else None
        outputs.process(
            [EngineOutput(f"{name}#0", [token], finish_reason=reason) for name in ("one", "other")]
        )
        assert one.is_due and other.is_due
        expected = one.take().outputs[0]
        if is_last:
            assert other.take_text() is None and other.is_due
        if is_last or place % 3 == 0:
            found = other.take().outputs[0]
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        else:
            assert other.take_text() == (expected.text, 1)
            assert not other.is_due and other.take() is None
    assert expected.finish_reason == "length"


def test_text_of_a_failed_request_is_not_taken(tokenizer):
    outputs = OutputProcessor(tokenizer)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    state = outputs.add("a", ProcessedInput(None, [1], []), params)
    outputs.process([EngineOutput("a#0", tokenizer("fox").input_ids)])
    outputs.process([EngineOutput("a#0", [], error="broken")])
    assert state.take_text() is None and state.error is not None
