"""Grammars are tried apart from the engine: one that never compiles holds up nobody for long."""

import time
from types import SimpleNamespace

import pytest
from tiny_models import make_tokenizer

import vllm.engine.structured_output as structured_output
from vllm import LLM, SamplingParams
from vllm.config.model import ModelConfig
from vllm.core.request import EngineRequest
from vllm.engine.grammar import GrammarChecker
from vllm.engine.structured_output import StructuredOutputs
from vllm.errors import GrammarError, RequestError
from vllm.sampling_params import StructuredOutputsParams

# xgrammar 0.2.8 does not come to an end with this one.
ENDLESS = '{"anyOf":[' * 4000 + "{}" + "]}" * 4000
xgrammar = pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def checker():
    info = xgrammar.TokenizerInfo.from_huggingface(make_tokenizer(), vocab_size=512)
    checker = GrammarChecker(info.serialize_json())
    yield checker
    checker.close()


def test_a_grammar_that_compiles_passes_and_another_is_refused_with_its_fault(checker):
    checker.check("regex", "a+")
    with pytest.raises(GrammarError, match="parenthesis"):
        checker.check("regex", "(")
    checker.check("choice", '["a", "b"]')


def test_a_grammar_that_takes_too_long_is_ended_and_the_next_one_is_tried(checker):
    started = time.monotonic()
    with pytest.raises(GrammarError, match="more than 1 s to compile; simplify it"):
        checker.check("json", ENDLESS, timeout=1.0)
    assert time.monotonic() - started < 60
    checker.check("regex", "a+")


def test_a_compiler_that_dies_refuses_its_grammar_and_the_next_one_is_tried(checker):
    checker.check("regex", "a+")
    checker._child._process.kill()
    with pytest.raises(GrammarError, match="more than its compiler can take"):
        checker.check("regex", "b+")
    checker.check("regex", "b+")


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


@pytest.mark.slow
def test_endless_grammars_do_not_keep_others_from_being_compiled(text_checkpoint, monkeypatch):
    from vllm.config.model import ModelConfig

    monkeypatch.setattr(structured_output.GrammarChecker.check, "__defaults__", (2.0,))
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


@pytest.mark.slow
def test_slow_grammars_of_one_client_do_not_hold_up_those_of_another(own_grammars):
    for number in range(6):
        asked = StructuredOutputsParams(json=ENDLESS + " " * number)
        submit(own_grammars, f"slow{number}", asked, client="a")
    submit(own_grammars, "quick", StructuredOutputsParams(regex="a+"), client="b")
    ready, refused = collect(own_grammars, 3)
    assert ready == ["quick"], "before a third slow one is ended"
    assert all("took more than 10 s to compile" in why for why in refused.values())


def submit(grammars, request_id, asked, client=""):
    sampling = SamplingParams(structured_outputs=asked)
    grammars.submit(EngineRequest(request_id, [1], sampling, 0, [], 16, client=client))


def collect(grammars, count):
    ready, refused, deadline = [], {}, time.monotonic() + 120
    while len(ready) + len(refused) < count and time.monotonic() < deadline:
        new, bad = grammars.collect()
        ready += [request.request_id for request in new]
        refused |= bad
        time.sleep(0.01)
    return ready, refused


def test_a_grammar_is_followed_where_steps_run_ahead(text_checkpoint):
    llm = LLM(text_checkpoint)
    core = llm.llm_engine.core
    core.executor.async_scheduling = core.runner.async_scheduling = True
    asked = StructuredOutputsParams(regex="(ab){3,9}c")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=32, structured_outputs=asked)
    text = llm.generate("the quick brown", params, use_tqdm=False)[0].outputs[0].text
    assert text.removesuffix("c").replace("ab", "") == ""


@pytest.fixture
def own_grammars(text_checkpoint):
    own = StructuredOutputs(ModelConfig.load(str(text_checkpoint)))
    yield own
    own.close()


@pytest.mark.slow
def test_grammars_that_passed_are_forgotten_before_they_are_too_many(own_grammars, monkeypatch):
    monkeypatch.setattr(structured_output, "_MAX_PASSED", 2)
    for number in range(5):
        submit(own_grammars, str(number), StructuredOutputsParams(regex="a" * (number + 1)))
    collect(own_grammars, 5)
    assert 0 < len(own_grammars._passed) <= 2


def test_a_grammar_that_takes_long_to_move_on_ends_too(own_grammars, monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_STEP_SECONDS", 0.02)

    def accept(token):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return True

    own_grammars._matchers["slow"] = SimpleNamespace(
        accept_token=accept,
        is_terminated=lambda: False,
        fill_next_token_bitmask=lambda mask: mask.fill_(-1),
    )
    own_grammars.bitmask("slow")
    assert not own_grammars.accept("slow", 5)
    with pytest.raises(GrammarError, match="all other requests wait meanwhile"):
        own_grammars.bitmask("slow")


@pytest.fixture(scope="module")
def grammars(text_checkpoint):
    """For tests that leave nothing behind but what passed; a process for grammars takes seconds."""
    shared = StructuredOutputs(ModelConfig.load(str(text_checkpoint)))
    yield shared
    shared.close()


def test_a_grammar_that_is_too_long_is_refused_unread(grammars):
    submit(grammars, "long", StructuredOutputsParams(regex="a" * 200_001))
    _, refused = collect(grammars, 1)
    assert "200001 characters; at most 200000" in refused["long"]


def test_white_space_in_json_is_limited(grammars):
    submit(
        grammars,
        "json",
        StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}}),
    )
    collect(grammars, 1)
    matcher = grammars._matchers["json"]
    assert matcher.accept_string("[" + 16 * " ") and not matcher.accept_string(" ")
