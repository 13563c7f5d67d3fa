"""The scheduler alone: which tokens are computed when, and that every request ends."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.config import SchedulerConfig
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput
from vllm.core.request import EngineRequest, FinishReason, Request
from vllm.core.scheduler import Scheduler
from vllm.core.state_snapshots import StateSnapshots
from vllm.sampling_params import SamplingParams

BLOCK = 4
STOP = 99


def request(name: str, prompt: list[int], max_tokens: int = 4, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request.of(EngineRequest(name, prompt, params, 0, [STOP], max_tokens))


def scheduler(num_blocks=64, max_num_seqs=8, budget=32, max_model_len=64, prefix_caching=True):
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Scheduler(config, num_blocks, BLOCK, max_model_len, prefix_caching)


def finished(s: Scheduler, step: SchedulerOutput, sampled: dict[str, int]) -> list[Request]:
    """Updates with one token for each of `sampled`; the requests that finish with it."""
    output = ModelRunnerOutput([*sampled], [[token] for token in sampled.values()])
    return [r for r, _ in s.update(step, output) if r.finish_reason is not None]


def advance(s: Scheduler, token=lambda r: 7) -> list[Request]:
    """One step in which every request whose known tokens are all computed gets a next one."""
    step = s.schedule()
    s.prepare_update(step)
    sampled = {}
    for request_id, num_tokens in step.num_scheduled_tokens.items():
        r = s.requests[request_id]
        assert r.num_slots >= r.num_computed_tokens + num_tokens
        if r.num_computed_tokens + num_tokens == len(r.all_token_ids):
            sampled[request_id] = token(r)
    assert sum(step.num_scheduled_tokens.values()) <= s.config.max_num_batched_tokens
    assert len(s.running) <= s.config.max_num_seqs
    return finished(s, step, sampled)


def test_a_request_runs_to_its_length():
    s = scheduler()
    r = request("a", [1, 2, 3], max_tokens=3)
    s.add(r)
    ended = [r for _ in range(3) for r in advance(s)]
    assert ended == [r]
    assert r.all_token_ids == [1, 2, 3, 7, 7, 7]
    assert r.finish_reason == FinishReason.LENGTH
    s.pool.check_idle()


def test_a_stop_token_ends_a_request_but_not_before_min_tokens():
    s = scheduler()
    early, late = request("early", [1], 9), request("late", [1], 9, min_tokens=3)
    s.add(early)
    s.add(late)
    for _ in range(3):
        advance(s, lambda r: STOP)
    assert early.num_output_tokens == 1
    assert late.num_output_tokens == 3
    assert late.stop_reason == STOP and late.finish_reason == FinishReason.STOP


def test_max_tokens_zero_computes_the_prompt_only():
    s = scheduler()
    r = request("a", [1, 2, 3], max_tokens=0)
    s.add(r)
    assert advance(s) == [r]
    assert r.all_token_ids == [1, 2, 3]


def test_a_long_prompt_is_computed_in_chunks_while_others_go_on():
    s = scheduler(budget=10, num_blocks=64)
    s.add(request("short", [1], 20))
    advance(s)
    s.add(request("long", list(range(30)), 4))
    steps = [s.schedule()]
    for _ in range(3):
        step = steps[-1]
        done = {"short": 7} if "short" in step.num_scheduled_tokens else {}
        finished(s, step, done)
        steps.append(s.schedule())
    assert [step.num_scheduled_tokens for step in steps[:4]] == [
        {"short": 1, "long": 9},
        {"short": 1, "long": 9},
        {"short": 1, "long": 9},
        {"short": 1, "long": 3},
    ]


def test_a_step_that_runs_holds_back_only_what_is_sure_to_end_with_it():
    s = scheduler()
    s.add(request("short", [1, 2], 1))
    s.add(request("long", [1, 2], 3))
    first = s.schedule()
    second = s.schedule()
    assert second.num_scheduled_tokens == {"long": 1}
    assert [r.request_id for r in finished(s, first, {"short": 7, "long": 7})] == ["short"]
    third = s.schedule()
    assert third.num_scheduled_tokens == {"long": 1} and third.removed_request_ids == ["short"]
    assert finished(s, second, {"long": STOP})[0].all_token_ids == [1, 2, 7, STOP]
    assert finished(s, third, {"long": 7}) == []
    s.pool.check_idle()


def test_no_more_requests_run_than_allowed_and_the_first_come_first():
    s = scheduler(max_num_seqs=2)
    for name in "abc":
        s.add(request(name, [1]))
    step = s.schedule()
    assert list(step.num_scheduled_tokens) == ["a", "b"]
    assert [r.request_id for r in s.waiting] == ["c"]


def test_equal_prompts_share_blocks_and_compute_only_what_is_left():
    s = scheduler()
    s.add(request("a", list(range(10)), 2))
    while s.has_requests:
        advance(s)
    again = request("b", list(range(10)), 2)
    s.add(again)
    step = s.schedule()
    assert step.num_scheduled_tokens == {"b": 2}
    assert again.num_cached_tokens == 8
    assert (s.prefix_cache.num_queried, s.prefix_cache.num_hit) == (20, 8)


def test_a_block_is_shared_only_after_all_that_stood_before_it():
    s = scheduler(budget=64)
    a, c = [1] * 4 + [2] * 4 + [9], [3] * 4 + [4] * 4 + [9]
    first, second = request("a", a), request("c", c)
    s.add(first)
    s.add(second)
    advance(s)
    # Its first block is one's, its second the other's, where other tokens stood before it.
    mixed = request("b", a[:4] + c[4:])
    assert s.prefix_cache.match(mixed).blocks == [first.block_ids[0][:1]]
    assert s.prefix_cache.match(request("d", c)).blocks == [second.block_ids[0][:2]]


def test_a_launched_step_hashes_what_it_computes_and_new_no_more_than_it_must():
    whole = scheduler()
    whole.add(request("a", list(range(30)), 2))
    advance(whole)
    s = scheduler()
    r = request("b", list(range(30)), 2)
    s.add(r)
    step = s.schedule()
    assert len(r.block_hashes) == 1, "of a prompt that nobody began alike"
    s.prepare_update(step)
    assert r.block_hashes == whole.requests["a"].block_hashes and len(r.block_hashes) == 7
    ahead = s.schedule()  # its one token is not known yet
    s.prepare_update(ahead)
    finished(s, step, {"b": 7})
    again = request("c", list(range(29)))
    assert (
        s.prefix_cache.match(again).blocks == [r.block_ids[0][:7]]
        and again.block_hashes == r.block_hashes
    )


def test_the_last_prompt_token_is_computed_even_when_all_blocks_are_cached():
    s = scheduler()
    s.add(request("a", list(range(8)), 2))
    while s.has_requests:
        advance(s)
    s.add(request("b", list(range(8)), 2))
    assert s.schedule().num_scheduled_tokens == {"b": 4}


def test_prompts_that_differ_early_share_nothing_after_it():
    s = scheduler()
    s.add(request("a", [1, *range(11)], 2))
    while s.has_requests:
        advance(s)
    s.add(request("b", [2, *range(11)], 2))
    assert s.schedule().num_scheduled_tokens == {"b": 12}


def test_prompt_logprobs_need_every_position_and_read_no_cache():
    s = scheduler()
    for name in "ab":
        s.add(request(name, list(range(10)), 1, prompt_logprobs=1))
        assert s.schedule().num_scheduled_tokens == {name: 10}
        s.abort(name)


def test_without_prefix_caching_nothing_is_shared():
    s = scheduler(prefix_caching=False)
    for name in "ab":
        s.add(request(name, list(range(10)), 1))
        assert s.schedule().num_scheduled_tokens == {name: 10}
        s.abort(name)


def test_the_request_admitted_last_is_preempted_and_resumes_with_its_tokens():
    s = scheduler(num_blocks=5, max_model_len=20, prefix_caching=False)
    first, last = request("first", [1] * 7, 9), request("last", [2] * 5, 9)
    s.add(first)
    advance(s)
    s.add(last)
    while s.num_preemptions == 0:
        advance(s)
    assert last in s.waiting and last.num_output_tokens > 0 and last.num_computed_tokens == 0
    tokens_before = list(last.all_token_ids)
    while s.has_requests:
        advance(s)
    assert last.all_token_ids[: len(tokens_before)] == tokens_before
    assert first.num_output_tokens == last.num_output_tokens == 9
    s.pool.check_idle()


def test_what_is_forgotten_of_a_preempted_request_is_not_found_again():
    s = scheduler(num_blocks=5, max_model_len=20)
    s.add(request("first", list(range(7)), max_tokens=10))
    s.add(request("second", list(range(20, 28)), max_tokens=10))
    while s.num_preemptions == 0:
        advance(s)
    assert s.waiting.at(0).request_id == "second"
    assert s.prefix_cache.match(request("like second", list(range(20, 29)))).num_tokens
    s.forget_cached("second")
    assert not s.prefix_cache.match(request("like second", list(range(20, 29)))).num_tokens


def test_abort_in_every_state_gives_the_blocks_back():
    s = scheduler(max_num_seqs=1)
    s.add(request("running", [1, 2, 3]))
    s.add(request("waiting", [1, 2, 3]))
    advance(s)
    s.abort("waiting")
    s.abort("running")
    s.abort("unknown")
    assert not s.has_requests and not s.running and not s.waiting
    s.pool.check_idle()
    s.add(request("next", [5]))
    assert s.schedule().removed_request_ids == ["running"]


class Pipeline:
    """Steps whose results are taken one step later: what a device that runs ahead does.

    texts: the tokens as the device knows them, which is before the scheduler does.
    """

    def __init__(self, s: Scheduler, token):
        self.s, self.token, self.texts = s, token, {}
        self.running: tuple[SchedulerOutput, dict[str, int]] | None = None

    def advance(self) -> list[Request]:
        s, sampled = self.s, {}
        step = s.schedule()
        for request_id in step.num_scheduled_tokens:
            r = s.requests[request_id]
            if r.num_unscheduled_tokens == 1 and r.num_pending_tokens:
                text = self.texts.setdefault(request_id, list(r.all_token_ids))
                sampled[request_id] = self.token(text)
                text.append(sampled[request_id])
        ended = finished(s, *self.running) if self.running else []
        self.running = None if step.is_empty else (step, sampled)
        return ended


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 24),
    caching=st.booleans(),
    ahead=st.booleans(),
)
def test_whatever_comes_every_request_ends_with_its_own_tokens(seed, num_blocks, caching, ahead):
    """The next token is a function of the tokens so far: a mix-up of state would change it."""
    rng = random.Random(seed)
    s = scheduler(num_blocks, 4, 12, max_model_len=num_blocks * BLOCK, prefix_caching=caching)
    shared = [rng.randrange(50) for _ in range(12)]
    requests, ended, aborted = [], {}, set()
    for i in range(12):
        prompt = shared[: rng.randrange(13)] + [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        requests.append(request(str(i), prompt, rng.randint(1, 12)))
    prompts = {r.request_id: list(r.all_token_ids) for r in requests}

    pipeline = Pipeline(s, lambda text: sum(text) % 50)

    def one_step():
        return pipeline.advance() if ahead else advance(s, lambda r: sum(r.all_token_ids) % 50)

    pending = list(requests)
    for _ in range(2000):
        if pending and rng.random() < 0.3:
            s.add(pending.pop())
        if s.requests and rng.random() < 0.05:
            victim = rng.choice(list(s.requests))
            s.abort(victim)
            aborted.add(victim)
        for r in one_step():
            ended[r.request_id] = r
        if not pending and not s.has_requests and not pipeline.running:
            break
    assert set(ended) | aborted == set(prompts)
    for name, r in ended.items():
        tokens = list(prompts[name])
        while len(tokens) < len(r.all_token_ids):
            tokens.append(sum(tokens) % 50)
        assert r.all_token_ids == tokens
        assert r.num_output_tokens == r.max_tokens
    s.pool.check_idle()


def test_a_scheduler_whose_cache_cannot_hold_one_request_is_a_mistake_of_ours():
    with pytest.raises(AssertionError):
        scheduler(num_blocks=2, max_model_len=64)


def test_nobody_is_admitted_into_the_blocks_that_running_ones_need_next():
    s = scheduler(num_blocks=5, max_model_len=20)
    s.add(request("first", [1] * 7, 9))
    advance(s)
    s.add(request("second", [2] * 11, 9))
    for _ in range(4):
        advance(s)
    assert s.num_preemptions == 0


def test_who_left_the_batch_is_told_with_the_next_step_that_computes():
    s = scheduler()
    s.add(request("gone", [1, 2, 3]))
    advance(s)
    s.abort("gone")
    assert s.schedule().is_empty
    s.add(request("next", [5]))
    assert s.schedule().removed_request_ids == ["gone"]


def test_cached_tokens_are_those_of_the_first_new():
    s = scheduler(num_blocks=5, max_model_len=20)
    s.add(request("first", list(range(7)), max_tokens=10))
    second = request("second", list(range(20, 28)), max_tokens=10)
    s.add(second)
    while s.num_preemptions == 0:
        advance(s)
    while s.has_requests:
        advance(s)
    assert second.num_cached_tokens == 0


def test_who_was_preempted_goes_on_before_who_came_later():
    s = scheduler(num_blocks=5, max_model_len=20, prefix_caching=False)
    s.add(request("first", [1] * 7, 9))
    advance(s)
    s.add(request("last", [2] * 5, 9))
    advance(s)
    s.add(request("late", [3] * 12, 9))
    while s.num_preemptions == 0:
        advance(s)
    assert [r.request_id for r in s.waiting] == ["last", "late"]


def test_a_request_ends_where_the_context_does():
    s = scheduler(max_model_len=8, num_blocks=8)
    r = request("a", [1] * 5, max_tokens=9)
    s.add(r)
    while s.has_requests:
        advance(s)
    assert len(r.all_token_ids) == 8 and r.finish_reason == FinishReason.LENGTH


def test_a_prompt_alone_ends_by_length_whatever_would_come_next():
    s = scheduler()
    r = request("a", [1, 2, 3], max_tokens=0)
    s.add(r)
    assert advance(s, lambda r: STOP) == [r]
    assert (r.finish_reason, r.stop_reason) == (FinishReason.LENGTH, None)


# ---------------------------------------------------------------- short prompts beside long ones


def steps_to_first_token(s: Scheduler, r: Request, most: int = 100) -> int:
    for count in range(1, most):
        advance(s)
        if r.num_output_tokens:
            return count
    raise AssertionError(f"{r.request_id} has no token after {most} steps")


def long_prompt(name: str, start: int) -> Request:
    return request(name, [start + i % 50 for i in range(400)])


def test_a_short_prompt_is_answered_beside_long_ones():
    s = scheduler(num_blocks=512, max_model_len=512)
    longs = [long_prompt(f"long {i}", 100 * i) for i in range(3)]
    for r in longs[:2]:
        s.add(r)
    advance(s)
    s.add(longs[2])  # waits in front of the short one
    short = request("short", [1] * 12)
    s.add(short)
    assert steps_to_first_token(s, short) == 1
    wide = request("as wide as a step", [2] * 32)
    s.add(wide)
    assert steps_to_first_token(s, wide) <= 3
    while s.has_requests:
        advance(s)
    s.pool.check_idle()


def test_requests_that_generate_do_so_beside_a_long_prompt_that_came_before():
    s = scheduler(num_blocks=512, max_model_len=512)
    s.add(long_prompt("long", 0))
    advance(s)
    small = request("small", [1] * 4, max_tokens=5)
    s.add(small)
    for count in range(1, 5):
        advance(s)
        assert small.num_output_tokens == count


def test_short_prompts_without_end_leave_a_long_one_half_of_each_step():
    s = scheduler(num_blocks=512, max_model_len=512)
    r = long_prompt("long", 0)
    s.add(r)
    for count in range(30):
        for part in range(3):
            s.add(request(f"{count} {part}", [count, part] * 10, max_tokens=1))
        advance(s)
        if r.num_output_tokens:
            break
    assert r.num_output_tokens and count <= -(-400 // 16)


def test_nothing_is_left_where_nobody_behind_a_long_prompt_can_use_it():
    s = scheduler(num_blocks=110, max_model_len=440)
    s.add(long_prompt("long", 0))
    s.add(request("no block is free for it", [1] * 40))
    for step in range(1, 12):
        assert s.schedule().num_scheduled_tokens["long"] == 32, step
        # ends the step
        r = s.requests["long"]
        r.num_computed_tokens += r.num_scheduled_tokens
        r.num_scheduled_tokens = 0


def test_a_short_prompt_takes_no_block_that_a_long_one_waits_for():
    s = scheduler(num_blocks=210, max_model_len=512)
    s.add(request("once", [1] * 17, max_tokens=1))
    advance(s)
    first, second = long_prompt("first", 0), long_prompt("second", 300)
    s.add(first)
    advance(s)
    s.add(second)  # its 100 blocks are free, and few more
    # Most of its tokens are cached, so that the step has room for more.
    small, large = request("small", [1] * 17), request("large", [2] * 30)
    s.add(small)
    s.add(large)
    advance(s)
    assert small.num_output_tokens == 1 and not large.block_ids and not second.block_ids


def test_a_long_prompt_that_is_cached_is_a_short_one():
    s = scheduler(num_blocks=512, max_model_len=512)
    known = long_prompt("known", 0)
    s.add(known)
    while s.has_requests:
        advance(s)
    s.add(long_prompt("long", 300))
    again = long_prompt("again", 0)
    s.add(again)
    assert steps_to_first_token(s, again) == 1


def test_a_long_prompt_whose_state_is_not_kept_has_a_token_of_the_step_that_admits_it():
    """Its blocks are cached, so it seems short until the snapshot of its state is looked for."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    s = Scheduler(config, 512, BLOCK, 512, True, StateSnapshots(range(1, 5), BLOCK))
    s.add(long_prompt("known", 0))
    while s.has_requests:
        advance(s)
    s.snapshots.forget_all()
    s.add(long_prompt("long", 300))
    s.add(long_prompt("again", 0))
    for number in range(4):
        s.add(request(f"short {number}", [number] * 12, max_tokens=1))
    step = s.schedule()
    assert min(step.num_scheduled_tokens.values()) > 0
