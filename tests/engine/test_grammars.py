"""Grammars are tried apart from the engine: one that never compiles holds up nobody for long."""

import time

import pytest
from tiny_models import make_tokenizer

import vllm.engine.structured_output as structured_output
from vllm import LLM
from vllm.engine.grammar_trial import GrammarError, GrammarTrial
from vllm.engine.request import EngineRequest
from vllm.engine.structured_output import StructuredOutputs
from vllm.errors import RequestError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

# xgrammar 0.2.8 does not come to an end with this one.
ENDLESS = '{"anyOf":[' * 4000 + "{}" + "]}" * 4000
xgrammar = pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def trial():
    info = xgrammar.TokenizerInfo.from_huggingface(make_tokenizer(), vocab_size=512)
    trial = GrammarTrial(info.serialize_json())
    yield trial
    trial.close()


def test_a_grammar_that_compiles_passes_and_another_is_refused_with_its_fault(trial):
    trial.check("regex", "a+")
    with pytest.raises(GrammarError, match="parenthesis"):
        trial.check("regex", "(")
    trial.check("choice", '["a", "b"]')


def test_a_grammar_that_takes_too_long_is_ended_and_the_next_one_is_tried(trial):
    started = time.monotonic()
    with pytest.raises(GrammarError, match="more than 1 s to compile; simplify it"):
        trial.check("json", ENDLESS, timeout=1.0)
    assert time.monotonic() - started < 60
    trial.check("regex", "a+")


def test_a_compiler_that_dies_refuses_its_grammar_and_the_next_one_is_tried(trial):
    trial.check("regex", "a+")
    trial._process.kill()
    with pytest.raises(GrammarError, match="more than its compiler can take"):
        trial.check("regex", "b+")
    trial.check("regex", "b+")


def test_a_grammar_that_keeps_others_waiting_ends_alone(text_checkpoint, monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_STEP_SECONDS", -1.0)
    llm = LLM(str(text_checkpoint))
    engine = llm.llm_engine
    slow = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="a+"))
    engine.add_request("slow", "ban", slow)
    engine.add_request("plain", "ban", SamplingParams(max_tokens=9, ignore_eos=True))
    found, errors = {}, []
    while engine.has_unfinished:
        try:
            found |= {output.request_id: output for output in engine.step()}
        except RequestError as error:
            errors.append(str(error))
    assert len(found["plain"].outputs[0].token_ids) == 9 and "slow" not in found
    (error,) = errors
    assert "all other requests wait meanwhile" in error
    engine.core.check_idle()


def test_endless_grammars_do_not_keep_others_from_being_compiled(text_checkpoint, monkeypatch):
    from vllm.config.model import ModelConfig

    monkeypatch.setattr(structured_output.GrammarTrial.check, "__defaults__", (2.0,))
    grammars = StructuredOutputs(ModelConfig.load(str(text_checkpoint)))
    try:
        for number in range(3):
            submit(grammars, f"bad{number}", StructuredOutputsParams(json=ENDLESS + " " * number))
        submit(grammars, "good", StructuredOutputsParams(regex="a+"))
        ready, refused = collect(grammars, 4)
    finally:
        grammars.close()
    assert ready == ["good"]
    assert set(refused) == {"bad0", "bad1", "bad2"}
    assert all("to compile; simplify it" in why for why in refused.values())


def submit(grammars, request_id, asked):
    sampling = SamplingParams(structured_outputs=asked)
    grammars.submit(EngineRequest(request_id, [1], sampling, 0, [], 16))


def collect(grammars, count):
    ready, refused, deadline = [], {}, time.monotonic() + 120
    while len(ready) + len(refused) < count and time.monotonic() < deadline:
        new, bad = grammars.collect()
        ready += [request.request_id for request in new]
        refused |= bad
        time.sleep(0.01)
    return ready, refused
