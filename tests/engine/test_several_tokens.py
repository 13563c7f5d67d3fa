"""Steps that give a request no token, one or several, and draft tokens that are taken back: what
a client gets is what it would have got token by token."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer

from tests.engine.test_scheduler import BLOCK, STOP, request, scheduler
from vllm import SamplingParams
from vllm.core.outputs import EngineOutput, ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from vllm.core.request import FinishReason, Request
from vllm.core.scheduler import Scheduler
from vllm.engine.input_processor import ProcessedInput
from vllm.engine.output_processor import OutputProcessor
from vllm.outputs import CompletionOutput

VOCABULARY = 40


def next_token(tokens: list[int]) -> int:
    """The model: the next token is a function of all tokens so far."""
    return (31 * sum(tokens) + 7 * len(tokens)) % VOCABULARY


def continued(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[-count:] if count else []


class Device:
    """Runs steps on a KV cache of token ids: a slot holds the token whose K and V it would.

    num_tokens() : how many tokens a step gives a request without drafts. drafts(): how many draft
    tokens it proposes for the next; each is wrong with probability 0.3.
    """

    def __init__(self, s: Scheduler, seed: int, num_tokens=lambda: 1, drafts=lambda: 0):
        self.s, self.rng, self.num_tokens, self.drafts = s, random.Random(seed), num_tokens, drafts
        self.kv: dict[int, int] = {}
        self.num_accepted = self.num_rejected = 0

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        assert sum(step.num_scheduled_tokens.values()) <= self.s.config.max_num_batched_tokens
        for request_id, count in step.num_scheduled_tokens.items():
            r = self.s.requests[request_id]
            proposed = step.scheduled_spec_decode_tokens.get(request_id, [])
            known = r.all_token_ids
            end = r.num_computed_tokens + count
            for position, token in enumerate((known + proposed)[:end]):
                slot = r.block_ids[0][position // BLOCK] * BLOCK + position % BLOCK
                if position >= r.num_computed_tokens:
                    self.kv[slot] = token
                assert self.kv[slot] == token, "a kept K or V is another token's"
            if end - len(proposed) == len(known):
                output.request_ids.append(request_id)
                output.sampled_token_ids.append(self.sample(known, proposed))
                output.draft_token_ids[request_id] = self.propose(
                    known + output.sampled_token_ids[-1]
                )
        return output

    def sample(self, known: list[int], proposed: list[int]) -> list[int]:
        if not proposed:
            return continued(known, self.num_tokens())
        right = continued(known, len(proposed) + 1)
        num_right = next((i for i, t in enumerate(proposed) if t != right[i]), len(proposed))
        self.num_accepted += num_right
        self.num_rejected += len(proposed) - num_right
        return right[: num_right + 1]

    def propose(self, tokens: list[int]) -> list[int]:
        right = continued(tokens, self.drafts())
        return [t if self.rng.random() < 0.7 else (t + 1) % VOCABULARY for t in right]


def run_all(s: Scheduler, device: Device) -> None:
    for _ in range(3000):
        step = s.schedule()
        s.prepare_update(step)
        if not step.is_empty:
            s.update(step, device.run(step))
        if not s.has_requests:
            break
    assert not s.has_requests
    s.pool.check_idle()


def expected(r: Request, prompt: list[int]) -> tuple[list[int], FinishReason]:
    tokens: list[int] = []
    while len(tokens) < r.max_tokens:
        tokens.append(next_token(prompt + tokens))
        if tokens[-1] in r.stop_token_ids and len(tokens) >= r.sampling.min_tokens:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 24),
    max_drafts=st.integers(0, 5),
    counts=st.sampled_from([(1,), (0, 1), (3,), (0, 1, 3)]),
)
def test_whatever_steps_give_and_take_back_tokens_are_those_of_one_by_one(
    seed, num_blocks, max_drafts, counts
):
    rng = random.Random(seed)
    s = scheduler(num_blocks, 4, 14, max_model_len=num_blocks * BLOCK)
    device = Device(s, seed, lambda: rng.choice(counts), lambda: rng.randint(0, max_drafts))
    shared, requests = [rng.randrange(VOCABULARY) for _ in range(12)], []
    for i in range(8):
        prompt = [*shared[: rng.randrange(13)], rng.randrange(VOCABULARY)]
        r = request(str(i), prompt, rng.randint(1, 20), min_tokens=rng.randint(0, 1))
        r.stop_token_ids = frozenset({rng.randrange(VOCABULARY)})
        requests.append((r, list(prompt)))
        s.add(r)
    run_all(s, device)
    for r, prompt in requests:
        assert (r.all_token_ids[len(prompt) :], r.finish_reason) == expected(r, prompt)


def test_draft_tokens_that_are_not_accepted_are_not_computed_and_their_slots_are_used_again():
    s = scheduler()
    r = request("a", [1, 2, 3], max_tokens=9)
    s.add(r)
    s.update(s.schedule(), ModelRunnerOutput(["a"], [[4]], draft_token_ids={"a": [5, 6, 7, 8]}))
    step = s.schedule()
    assert step.num_scheduled_tokens == {"a": 5}
    assert step.scheduled_spec_decode_tokens == {"a": [5, 6, 7, 8]}
    blocks = list(r.block_ids[0])
    assert s.schedule().is_empty, "the next tokens are not known before the drafts are verified"
    [(_, tokens)] = s.update(step, ModelRunnerOutput(["a"], [[5, 9]]))
    assert tokens == [5, 9] and r.all_token_ids == [1, 2, 3, 4, 5, 9]
    assert r.num_computed_tokens == 5
    step = s.schedule()
    assert step.num_scheduled_tokens == {"a": 1} and not step.new_block_ids
    assert r.block_ids == [blocks]


def test_a_request_that_got_no_token_computes_its_last_one_again():
    s = scheduler()
    r = request("a", [1, 2, 3], max_tokens=2)
    s.add(r)
    s.update(s.schedule(), ModelRunnerOutput(["a"], [[]]))
    assert r.num_computed_tokens == 2
    step = s.schedule()
    assert step.num_scheduled_tokens == {"a": 1}
    s.update(step, ModelRunnerOutput(["a"], [[7, 8, 9]]))
    assert r.all_token_ids == [1, 2, 3, 7, 8] and r.finish_reason == FinishReason.LENGTH


def test_drafts_end_where_the_request_the_context_or_the_budget_does():
    for options, max_tokens, wanted in (
        ({}, 4, 2),
        ({"max_model_len": 6}, 9, 1),
        ({"budget": 8}, 9, 7),
    ):
        s = scheduler(**options)
        s.add(request("a", [1, 2, 3], max_tokens=max_tokens))
        output = ModelRunnerOutput(["a"], [[4]], draft_token_ids={"a": list(range(20))})
        s.update(s.schedule(), output)
        step = s.schedule()
        drafts = step.scheduled_spec_decode_tokens.get("a", [])
        assert len(drafts) == wanted and step.num_scheduled_tokens == {"a": wanted + 1}


def test_a_preempted_request_keeps_what_its_drafts_gave_and_drops_what_comes_next():
    s = scheduler(num_blocks=5, max_model_len=20)
    s.add(request("first", [1] * 7, 9))
    r = request("last", [2] * 7, 9)
    s.add(r)
    output = ModelRunnerOutput(["first", "last"], [[3], [3]], draft_token_ids={"last": [4, 5]})
    s.update(s.schedule(), output)
    in_flight = s.schedule()
    assert in_flight.scheduled_spec_decode_tokens == {"last": [4, 5]}
    s._preempt(r)
    output = ModelRunnerOutput(["last"], [[4, 5, 6]], draft_token_ids={"last": [7]})
    s.update(in_flight, output)
    assert r.all_token_ids == [2] * 7 + [3, 4, 5, 6]
    assert r.num_computed_tokens == 0 and r.spec_token_ids == [] and r.num_pending_tokens == 0


def test_a_grammar_ends_a_request_in_the_middle_of_a_run():
    s = scheduler()
    r = request("a", [1, 2, 3], max_tokens=9)
    r.sampling.structured_outputs = object()
    s.add(r)
    seen = []

    def is_complete(request_id: str, token: int) -> bool:
        seen.append((request_id, token))
        return token == 5

    [(_, tokens)] = s.update(s.schedule(), ModelRunnerOutput(["a"], [[4, 5, 6]]), is_complete)
    assert tokens == [4, 5] and seen == [("a", 4), ("a", 5)]
    assert r.finish_reason == FinishReason.STOP and r.stop_reason is None


# ---------------------------------------------------------------- with the output processor


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def complete(
    tokenizer, ids: list[int], sizes: list[int], params: SamplingParams
) -> CompletionOutput:
    """What a client gets when the model answers `ids` in steps of `sizes` tokens."""
    s, outputs = scheduler(), OutputProcessor(tokenizer)
    r = request("a#0", [1, 2], params.max_tokens, min_tokens=params.min_tokens)
    s.add(r)
    state = outputs.add("a", ProcessedInput(None, [1, 2], []), params)
    left, steps = list(ids), list(sizes)
    while s.has_requests:
        assert left, "the answer is too short"
        step = s.schedule()
        sampled = [left.pop(0) for _ in range(min(steps.pop(0) if steps else 1, len(left)))]
        [(_, tokens)] = s.update(step, ModelRunnerOutput(["a#0"], [sampled]))
        logprobs = [TokenLogprobs([token], [-float(token)], 1) for token in sampled]
        output = EngineOutput(
            "a#0", tokens, logprobs[: len(tokens)], None, r.finish_reason, r.stop_reason
        )
        _, to_abort = outputs.process([output])
        for request_id in to_abort:
            s.abort(request_id)
    s.pool.check_idle()
    return state.take().outputs[0]


@pytest.mark.parametrize("sizes", [[3] * 9, [0, 3, 1, 0, 3, 3], [9]])
@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5},
        {"stop": ["row"]},
        {"stop": ["row"], "include_stop_str_in_output": True},
        {"stop": ["qu", "x"], "min_tokens": 3},
        {"stop": ["k brown"], "max_tokens": 9},
        {"stop_token_ids": [STOP], "max_tokens": 30},
    ],
)
def test_a_client_gets_the_same_however_many_tokens_a_step_gives(tokenizer, options, sizes):
    params = SamplingParams(**{"max_tokens": 30, "logprobs": 0} | options)
    ids = [*tokenizer("quick brown fox").input_ids, STOP, *tokenizer("lazy dog").input_ids]
    one_by_one = complete(tokenizer, ids, [], params)
    assert one_by_one.finish_reason is not None and len(one_by_one.token_ids) < len(ids)
    assert complete(tokenizer, ids, sizes, params) == one_by_one
