"""Drafts by n-grams, how long they are, and whether they pay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm import EngineArgs
from vllm.config.speculative import STEP_DRAFT_TOKENS, SpeculativeConfig
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput
from vllm.core.speculation import DraftTrials, Speculation
from vllm.errors import ConfigError
from vllm.worker.drafts import Proposals
from vllm.worker.ngram import propose
from vllm.worker.speculation import SampledRows, Verification

NGRAM = {"method": "ngram"}


def proposed_slowly(tokens: list[int], most: int, shortest: int, longest: int) -> list[int]:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        places = [
            start + size
            for start in range(len(tokens) - size)
            if tokens[start : start + size] == tokens[-size:]
        ]
        if places:
            whole = [place for place in places if place + most <= len(tokens)]
            start = whole[-1] if whole else places[0]
            return tokens[start : start + most]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    most=st.integers(1, 6),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_a_draft_is_what_followed_the_longest_match_the_last_time(tokens, most, shortest, more):
    expected = proposed_slowly(tokens, most, shortest, shortest + more)
    found = propose(np.array(tokens, np.int32), most, shortest, shortest + more)
    assert found == expected


def test_tokens_are_accepted_up_to_the_first_that_differs():
    drafts = {"a": [5, 6, 7], "c": [5], "d": [9, 9]}
    verification = Verification(drafts, lambda request_ids: Proposals({}))
    sampled = [5, 6, 8, 1, 4, 5, 3, 9, 9, 2]
    assert verification.accepted(["a", "b", "c", "d"], sampled) == [
        [5, 6, 8],
        [4],
        [5, 3],
        [9, 9, 2],
    ]


def test_the_logits_of_a_draft_are_those_of_the_last_known_token_and_of_each_draft_token():
    last, rows, num_drafts = np.array([3, 4, 7]), np.array([2, 0, 1]), np.array([3, 0, 2])
    found = SampledRows.of(last, rows, num_drafts)
    assert found.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found.rows.tolist() == [2, 2, 2, 2, 0, 1, 1, 1]
    assert found.ahead.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]


# ---------------------------------------------------------------- how long, and whether


def run(trials: DraftTrials, num_steps: int, tokens_on: float, seconds_on: float = 1.0) -> float:
    """The share of steps with drafts; a step without them gives a token in a second."""
    num_on = 0
    for _ in range(num_steps):
        is_on = trials.is_on
        num_on += is_on
        trials.record(is_on, tokens_on if is_on else 1, seconds_on if is_on else 1.0)
    return num_on / num_steps


def test_drafts_that_pay_are_made_nearly_always_and_others_nearly_never():
    assert run(DraftTrials(), 3000, tokens_on=2, seconds_on=1.3) > 0.93
    trials = DraftTrials()
    run(trials, 100, tokens_on=1.1, seconds_on=1.3)
    assert run(trials, 3000, tokens_on=1.1, seconds_on=1.3) < 0.03


def test_drafts_that_begin_to_pay_are_made_again():
    trials = DraftTrials()
    run(trials, 500, tokens_on=1, seconds_on=1.3)
    assert run(trials, 1200, tokens_on=3, seconds_on=1.3) > 0.5


def test_drafts_that_pay_no_longer_end_soon():
    trials = DraftTrials()
    run(trials, 300, tokens_on=3, seconds_on=1.3)
    assert trials.is_on
    assert run(trials, 300, tokens_on=1, seconds_on=1.5) < 0.15


@pytest.mark.parametrize("seconds_on", [2.0, 5.0, 12.0])
def test_a_trial_of_drafts_ends_when_it_has_lost_a_few_steps(seconds_on):
    trials, lost, was_on = DraftTrials(), [], False
    for _ in range(40_000):
        is_on = trials.is_on
        if is_on and not was_on:
            lost.append(0.0)
        lost[-1] += (seconds_on - 1.1) * is_on
        trials.record(is_on, 1.1 if is_on else 1, seconds_on if is_on else 1.0)
        was_on = is_on
    assert len(lost) >= 3, "the first is longer: nothing is known of steps without"
    assert max(lost[1:]) < 4 * seconds_on + 2


def test_drafts_last_over_the_beginning_of_an_answer_where_nothing_repeats_itself():
    trials, num_on = DraftTrials(), 0
    for step in range(5000):
        num_tokens, seconds = (1, 1.45) if step % 200 < 15 else (2, 1.5)
        num_on += trials.is_on
        trials.record(*((True, num_tokens, seconds) if trials.is_on else (False, 1, 1.0)))
    assert num_on > 4000


def test_one_slow_step_decides_nothing():
    trials = DraftTrials()
    trials.record(True, 2, 1000.0)
    run(trials, 100, tokens_on=2, seconds_on=1.3)
    assert trials.is_on


def verify(speculation: Speculation, draft: list[int], num_accepted: int, now: float = 0.0) -> None:
    step = SchedulerOutput(
        num_scheduled_tokens={"a": len(draft) + 1},
        scheduled_spec_decode_tokens={"a": draft} if draft else {},
        num_draft_tokens=1,
    )
    speculation.record(step, ModelRunnerOutput(["a"], [[0] * (num_accepted + 1)]), now)


def test_a_draft_grows_while_it_is_accepted_and_shrinks_to_what_was():
    speculation = Speculation(SpeculativeConfig.of(NGRAM | {"num_speculative_tokens": 10}))
    lengths = [speculation.length("a")]
    for num_accepted in (None, None, 2, 0, 0, None):
        length = lengths[-1]
        verify(speculation, [0] * length, length if num_accepted is None else num_accepted)
        lengths.append(speculation.length("a"))
    assert lengths == [4, 8, 10, 3, 1, 1, 2]
    assert speculation.length("b") == 4
    num_drafts, num_tokens, accepted_at = speculation.take_counts()
    assert (num_drafts, num_tokens) == (6, 4 + 8 + 10 + 3 + 1 + 1)
    assert accepted_at == {0: 4, 1: 3, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1}
    assert speculation.take_counts() == (0, 0, {})
    speculation.forget("a")
    assert speculation.length("a") == 4


def test_time_between_steps_counts_where_nothing_but_decoding_was_in_it():
    speculation = Speculation(SpeculativeConfig.of(NGRAM))
    for second in range(66):  # drafts that give a token more in a second
        verify(speculation, [0], 1, now=second)
    assert speculation.max_draft_tokens(1) == 0, "steps without drafts are timed now"
    for second in range(66, 90):
        step = SchedulerOutput(num_scheduled_tokens={"a": 1})
        speculation.record(step, ModelRunnerOutput(["a"], [[0]]), second)
    assert speculation.max_draft_tokens(1) > 0
    assert speculation.max_draft_tokens(9) > 0, "another load has trials of its own"


def test_a_rank_without_requests_learns_nothing_from_the_steps_of_its_peers():
    speculation = Speculation(SpeculativeConfig.of(NGRAM))
    for second in range(200):
        step = SchedulerOutput(num_scheduled_tokens={}, num_draft_tokens=1)
        speculation.record(step, ModelRunnerOutput([], []), second)
    assert speculation.max_draft_tokens(0) == 0 and speculation.max_draft_tokens(1) > 0


def test_tokens_that_the_last_draft_gave_are_not_those_of_steps_without():
    """Drafts of eight that are right in steps of seven times the length: they pay."""
    speculation, now, num_on = Speculation(SpeculativeConfig.of(NGRAM)), 0.0, 0
    was_on = False
    for _ in range(3000):
        is_on = speculation.max_draft_tokens(1) > 0
        draft = [0] * 8 if was_on else []
        num_on += is_on
        now += 7.0 if draft else 1.0
        step = SchedulerOutput(
            num_scheduled_tokens={"a": len(draft) + 1},
            scheduled_spec_decode_tokens={"a": draft} if draft else {},
            num_draft_tokens=int(is_on),
        )
        speculation.record(step, ModelRunnerOutput(["a"], [[0] * (len(draft) + 1)]), now)
        was_on = is_on
    assert num_on > 2500


def test_a_rate_is_that_of_each_request():
    """Drafts that give half as much again in a tenth more time, of four and of seven requests."""
    speculation, now, num_on = Speculation(SpeculativeConfig.of(NGRAM)), 0.0, 0
    for number in range(6000):
        num_rows = 7 if number // 60 % 2 else 4
        ids = [str(i) for i in range(num_rows)]
        is_on = speculation.max_draft_tokens(num_rows) > 0
        num_on += is_on
        now += 1.1 if is_on else 1.0
        # Every second one drafts a token that is right.
        drafts = {one: [0] for one in ids[::2]} if is_on else {}
        step = SchedulerOutput(
            num_scheduled_tokens={one: 1 + len(drafts.get(one, ())) for one in ids},
            scheduled_spec_decode_tokens=drafts, num_draft_tokens=int(is_on),
        )  # fmt: skip
        tokens = [[0] * (1 + len(drafts.get(one, ()))) for one in ids]
        speculation.record(step, ModelRunnerOutput(ids, tokens), now)
    assert num_on > 5000


def test_what_a_drafter_owes_is_paid_off_while_prompts_are_computed():
    trials = DraftTrials()
    run(trials, 300, tokens_on=2.5, seconds_on=1.0)
    for _ in range(5000):
        if trials.is_on:
            trials.owe(1.0)
        trials.pass_by()
    assert run(trials, 3000, tokens_on=2.5, seconds_on=1.0) > 0.8


def test_drafts_of_a_model_are_as_long_as_the_longest_that_a_request_takes():
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=6)
    speculation = Speculation(config)
    assert speculation.max_draft_tokens(2, ["a", "b"]) == 4
    verify(speculation, [0] * 4, 1)
    assert speculation.max_draft_tokens(1, ["a"]) == 2
    assert speculation.max_draft_tokens(2, ["a", "b"]) == 4
    assert Speculation(SpeculativeConfig.of(NGRAM)).max_draft_tokens(1, ["a"]) == 16


@pytest.mark.parametrize("owed", [0.1, 0.4, 0.55, 0.7, 2.0, 9.0])
def test_what_a_drafter_takes_for_prompts_counts(owed):
    """Drafts that give half as much again, less what it takes to compute prompts for them."""
    trials, seconds, num_tokens, num_on = DraftTrials(), 0.0, 0.0, 0
    for _ in range(40_000):
        is_on = trials.is_on
        num_on += is_on
        seconds += 1 + owed * is_on
        num_tokens += 1.5 if is_on else 1
        if is_on:
            trials.owe(owed)
        trials.record(is_on, 1.5 if is_on else 1, 1.0)
    assert (num_on > 20_000) == (owed < 0.5)
    assert seconds / num_tokens < 1.025


@pytest.mark.parametrize("seconds_on", [1.1, 1.6, 4.0, 30.0])
def test_trials_of_drafts_that_never_pay_lose_about_two_percent_at_most(seconds_on):
    trials, spent = DraftTrials(), []
    for _ in range(40_000):
        spent.append(seconds_on if trials.is_on else 1.0)
        trials.record(trials.is_on, 1, spent[-1])
    assert sum(spent[2000:]) / len(spent[2000:]) < 1.025


def test_no_more_requests_than_asked_for_draft():
    speculation = Speculation(SpeculativeConfig.of(NGRAM | {"disable_by_batch_size": 3}))
    assert speculation.max_draft_tokens(3) > 0 and speculation.max_draft_tokens(4) == 0


# ---------------------------------------------------------------- configuration


def test_defaults_and_what_one_length_of_n_grams_says_of_the_other():
    found = SpeculativeConfig.of(NGRAM)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (2, 5)
    assert found.num_speculative_tokens == 16
    assert SpeculativeConfig.of(NGRAM | {"num_speculative_tokens": "auto"}) == found
    for given_, expected in (
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ):
        found = SpeculativeConfig.of(NGRAM | given_)
        assert (found.prompt_lookup_min, found.prompt_lookup_max) == expected


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (
            {},
            'no method is given: it takes ngram, draft_model, mtp, eagle3, as in {"method": ',
        ),
        ({"method": "ngrams"}, "method 'ngrams' is unknown; did you mean ngram?"),
        ({"method": "mimo_mtp"}, "method 'mimo_mtp' is not supported here: it takes ngram"),
        (
            NGRAM | {"model": "x"},
            "key 'model' belongs to method draft_model or eagle3, and the method is",
        ),
        ({"method": "draft_model"}, "model None: method draft_model takes the folder or hub name"),
        ({"method": "eagle", "model": "x"}, "method 'eagle' is not supported here"),
        (NGRAM | {"num_speculative_token": 3}, "did you mean num_speculative_tokens?; it takes"),
        ({"num_spec": 3}, "unknown key 'num_spec'"),
        (NGRAM | {"num_speculative_tokens": 0}, "0 is out of range: it takes 1 to 32 or auto"),
        (NGRAM | {"num_speculative_tokens": 100}, "100 is out of range: it takes 1 to 32"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens True"),
        (NGRAM | {"num_speculative_tokens": "4"}, "num_speculative_tokens '4'"),
        (NGRAM | {"prompt_lookup_max": 0}, "prompt_lookup_max 0 is out of range: it takes 1 to 64"),
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "swap them, or leave one out"),
        (NGRAM | {"disable_by_batch_size": 0}, "disable_by_batch_size 0"),
    ],
)
def test_a_wrong_configuration_is_refused_with_what_it_takes(given_, said):
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig.of(given_)
    assert str(error.value).startswith("--speculative-config: ") and said in str(error.value)


@pytest.mark.parametrize(
    ("name", "given_", "expected"),
    [
        ("qwen3_5", {"num_speculative_tokens": 3}, 7 * 3),
        ("qwen3_5", {}, 7 * 16),
        ("qwen3_5", {"num_speculative_tokens": 32}, STEP_DRAFT_TOKENS),
        ("qwen3_5", {"num_speculative_tokens": 3, "disable_by_batch_size": 2}, 2 * 3),
        ("llama", {}, 0),
    ],
)
def test_a_step_keeps_as_many_states_of_draft_tokens_as_it_can_have(
    checkpoint, name, given_, expected
):
    args = EngineArgs(
        model=str(checkpoint(name)), max_num_seqs=7, speculative_config=NGRAM | given_,
        enable_prefix_caching=True,
    )  # fmt: skip
    config = args.create_engine_config()
    assert config.num_draft_states == expected
    if name == "qwen3_5":
        assert config.snapshot_slots == range(8 + expected, 8 + expected + 32)


def test_rows_of_logits_are_limited(checkpoint):
    model = str(checkpoint("llama"))
    config = EngineArgs(model=model, max_num_seqs=7).create_engine_config()
    assert config.max_num_logits == 7
    args = EngineArgs(model=model, max_num_seqs=7, speculative_config=NGRAM)
    assert args.create_engine_config().max_num_logits == 7 + STEP_DRAFT_TOKENS
