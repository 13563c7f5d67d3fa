"""The scheduler alone: clients share places and blocks, and none waits without bound."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.config import SchedulerConfig
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput
from vllm.core.prompt_limits import LOGPROBS_PART_ALONE, MIN_PROMPT_LOGPROBS
from vllm.core.request import EngineRequest, Request
from vllm.core.scheduler import FAIR_STEPS, Scheduler
from vllm.errors import ConfigError
from vllm.sampling_params import SamplingParams

BLOCK = 4


def request(name: str, prompt=(1, 2), max_tokens=4, priority=0, **sampling) -> Request:
    """Of the client that the first letter of its name names."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    wire = EngineRequest(name, [*prompt], params, 0, [], max_tokens, priority=priority,
                         client=name[0])  # fmt: skip
    return Request.of(wire)


def scheduler(max_num_seqs=4, num_blocks=512, budget=64, max_model_len=512, **config) -> Scheduler:
    own = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config)
    return Scheduler(own, num_blocks, BLOCK, max_model_len, prefix_caching=False)


def add(s: Scheduler, client: str, count: int, **options) -> list[Request]:
    made = [request(f"{client}{number}", **options) for number in range(count)]
    for one in made:
        s.add(one)
    return made


def results(s: Scheduler, step: SchedulerOutput, token=lambda r: 7) -> ModelRunnerOutput:
    ids = [
        name
        for name, count in step.num_scheduled_tokens.items()
        if s.requests[name].num_computed_tokens + count == len(s.requests[name].all_token_ids)
    ]
    return ModelRunnerOutput(ids, [[token(s.requests[name])] for name in ids])


def advance(s: Scheduler, token=lambda r: 7) -> list[Request]:
    """One step; the requests that finish with it."""
    step = s.schedule()
    progress = s.update(step, results(s, step, token))
    return [r for r, _ in progress if r.finish_reason is not None]


def running(s: Scheduler) -> str:
    """The clients of the running requests, sorted."""
    return "".join(sorted(r.client for r in s.running))


def steps_until(s: Scheduler, condition, most: int = 1000) -> int:
    for count in range(1, most):
        advance(s)
        if condition():
            return count
    raise AssertionError(f"not after {most} steps")


# ---------------------------------------------------------------- turns


def test_clients_have_turns_and_each_is_served_in_order():
    s = scheduler(max_num_seqs=1)
    add(s, "a", 4, max_tokens=1)
    add(s, "b", 2, max_tokens=1)
    add(s, "c", 1, max_tokens=1)
    order = []
    while s.has_requests:
        order += [r.request_id for r in advance(s)]
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_many_sequences_of_one_client_leave_another_the_next_free_place():
    s = scheduler(max_num_seqs=8)
    add(s, "a", 200, max_tokens=5)
    advance(s)
    one = request("b0", max_tokens=1)
    s.add(one)
    assert steps_until(s, lambda: one.num_output_tokens) <= 5 + 1


def test_long_sequences_do_not_take_the_places_of_short_ones():
    """By turns alone, the client of long sequences would soon run nothing but those."""
    s = scheduler(max_num_seqs=8)
    add(s, "a", 100, max_tokens=400)
    add(s, "b", 400, max_tokens=2)
    for _ in range(50):
        advance(s)
        assert running(s).count("a") <= 4
    assert s.num_preemptions == 0


def test_the_limit_of_one_client_holds_and_leaves_places_free():
    s = scheduler(max_num_seqs=8, max_num_seqs_per_client=3)
    add(s, "a", 20, max_tokens=6)
    add(s, "b", 2, max_tokens=6)
    advance(s)
    assert running(s) == "aaabb"
    while s.has_requests:
        advance(s)
        assert running(s).count("a") <= 3
    s.pool.check_idle()


@pytest.mark.parametrize("options", [{"max_num_seqs_per_client": 0}, {"max_prefill_share": 0.0},
                                     {"max_prefill_share": 1.5}])  # fmt: skip
def test_limits_that_leave_nothing_are_refused(options):
    flag = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} .* is out of range: it takes"):
        SchedulerConfig(**options)


def test_priority_comes_before_turns():
    s = scheduler(max_num_seqs=1, policy="priority")
    for name, priority in (("a0", 1), ("a1", 1), ("b0", 5), ("c0", 1), ("b1", 0)):
        s.add(request(name, max_tokens=1, priority=priority))
    order = []
    while s.has_requests:
        order += [r.request_id for r in advance(s)]
    assert order == ["b1", "a0", "c0", "a1", "b0"]


# ---------------------------------------------------------------- places and blocks are given up


def test_a_client_without_a_place_gets_one_after_a_bounded_number_of_steps():
    s = scheduler(max_num_seqs=4)
    held = add(s, "a", 50, max_tokens=400)
    for _ in range(3):
        advance(s)
    one = request("b0", max_tokens=2)
    s.add(one)
    assert steps_until(s, lambda: one.num_output_tokens) == FAIR_STEPS + 1
    assert (s.num_preemptions, held[3] in s.waiting) == (1, True), "the newest one yields"
    steps_until(s, lambda: one.finish_reason is not None)
    advance(s)
    assert held[3] in s.running, "and is the next of its client"


def test_each_client_gets_its_share_of_the_places():
    s = scheduler(max_num_seqs=9)
    add(s, "a", 50, max_tokens=400)
    advance(s)
    add(s, "b", 50, max_tokens=400)
    add(s, "c", 1, max_tokens=400)
    for _ in range(FAIR_STEPS + 2):
        advance(s)
    assert running(s) == "aaaabbbbc"
    num_preemptions = s.num_preemptions
    for _ in range(5 * FAIR_STEPS):
        advance(s)
    assert s.num_preemptions == num_preemptions, "equal shares are left alone"


def test_nothing_is_preempted_where_no_client_has_more_than_another_would():
    s = scheduler(max_num_seqs=2)
    add(s, "a", 3, max_tokens=100)
    add(s, "b", 3, max_tokens=100)
    add(s, "c", 3, max_tokens=100)
    for _ in range(3 * FAIR_STEPS):
        advance(s)
    assert s.num_preemptions == 0 and running(s) == "ab"


def test_a_sequence_of_better_priority_yields_to_no_other():
    s = scheduler(max_num_seqs=4, policy="priority")
    add(s, "a", 4, max_tokens=100, priority=1)
    advance(s)
    s.add(request("b0", priority=2))
    for _ in range(2 * FAIR_STEPS):
        advance(s)
    assert running(s) == "aaaa" and s.num_preemptions == 0
    s.add(request("c0", max_tokens=200, priority=1))
    for _ in range(2 * FAIR_STEPS):
        advance(s)
    assert running(s) == "aaac"


def test_blocks_are_shared_as_places_are():
    """All blocks are one client's; another one's prompt needs some of them."""
    s = scheduler(max_num_seqs=64, num_blocks=128, max_model_len=400)
    add(s, "a", 60, prompt=range(8), max_tokens=300)
    for _ in range(2 * FAIR_STEPS):
        advance(s)
    one = request("b0", prompt=range(60), max_tokens=40)
    s.add(one)
    assert steps_until(s, lambda: one.num_output_tokens) <= 2 * FAIR_STEPS
    assert steps_until(s, lambda: one.finish_reason is not None) <= 3 * 40, "it keeps them"


def test_who_holds_most_blocks_is_preempted_for_lack_of_them():
    s = scheduler(max_num_seqs=8, num_blocks=32, max_model_len=100)
    add(s, "a", 6, prompt=range(8), max_tokens=90)
    advance(s)
    small = request("b0", prompt=range(8), max_tokens=30)  # admitted last
    s.add(small)
    advance(s)
    assert small in s.running
    steps_until(s, lambda: small.finish_reason is not None or small not in s.running)
    assert s.num_preemptions and small.finish_reason is not None


def test_who_finds_no_block_in_a_step_has_one_in_the_next():
    """The one to preempt is in the step already, with the last free block."""
    s = scheduler(num_blocks=12, max_model_len=48)
    large, small = request("a0", range(39), 9), request("b0", range(3), 9)
    s.add(large)
    s.add(small)
    for _ in range(3):
        advance(s)
    assert (large.num_output_tokens, small.num_output_tokens) == (3, 2) and not s.pool.num_free
    advance(s)
    assert small.num_output_tokens == 3 and large in s.waiting
    while s.has_requests:
        advance(s)
    assert (large.num_output_tokens, small.num_output_tokens) == (9, 9)
    s.pool.check_idle()


def test_what_was_preempted_for_another_client_is_not_admitted_in_the_same_step():
    """It may be in the step in flight. The other one's blocks turn out to be cached."""
    own = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    s = Scheduler(own, 40, BLOCK, 160, prefix_caching=True)
    add(s, "a", 4, prompt=range(40), max_tokens=60)
    while s.pool.num_free > 11:
        advance(s)
    s.add(other := request("b0", prompt=range(40), max_tokens=9))
    other.queued_step -= FAIR_STEPS
    step = s.schedule()
    gone = [r.request_id for r in s.waiting]
    assert gone and s.num_preemptions == len(gone)
    assert [new.request for new in step.scheduled_new_reqs] == [other]


# ---------------------------------------------------------------- shares of a step


def test_long_prompts_take_their_share_of_a_step_while_others_generate():
    s = scheduler(budget=40, max_prefill_share=0.25)
    s.add(request("a0", max_tokens=30))
    advance(s)
    s.add(request("b0", prompt=range(200), max_tokens=1))
    s.add(request("c0", prompt=range(200), max_tokens=1))
    for _ in range(10):
        step = s.schedule()
        long = {name: n for name, n in step.num_scheduled_tokens.items() if name != "a0"}
        assert sum(long.values()) == 10
        s.update(step, results(s, step))
    s.abort("a0")
    assert sum(s.schedule().num_scheduled_tokens.values()) == 40, "nobody generates"


def test_prompts_with_logprobs_take_a_part_of_each_step():
    s = scheduler(budget=512)
    s.add(request("a0", prompt=range(500), max_tokens=1, prompt_logprobs=5))
    s.add(request("b0", prompt=range(500), max_tokens=1, prompt_logprobs=5))
    s.add(request("c0", prompt=range(100), max_tokens=9))
    step = s.schedule()
    given = step.num_scheduled_tokens
    assert (given["a0"], given["c0"]) == (MIN_PROMPT_LOGPROBS, 100)
    assert "b0" not in given
    s.update(step, results(s, step))
    while s.has_requests:
        step = s.schedule()
        counts = step.num_scheduled_tokens
        assert counts.get("a0", 0) + counts.get("b0", 0) <= MIN_PROMPT_LOGPROBS
        s.update(step, results(s, step))
    s.pool.check_idle()


def test_prompts_with_logprobs_take_more_where_all_of_one_client_have_them():
    s = scheduler(budget=1024)
    add(s, "a", 3, prompt=range(500), max_tokens=1, prompt_logprobs=5)
    assert sum(s.schedule().num_scheduled_tokens.values()) == 1024 // LOGPROBS_PART_ALONE
    s.add(request("b0", prompt=range(500), max_tokens=1, prompt_logprobs=5))
    assert sum(s.schedule().num_scheduled_tokens.values()) == MIN_PROMPT_LOGPROBS


# ---------------------------------------------------------------- whatever comes


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 30),
    policy=st.sampled_from(["fcfs", "priority"]),
    ahead=st.booleans(),
    limit=st.sampled_from([None, 2]),
)
def test_whatever_clients_send_every_request_ends_with_its_own_tokens(
    seed, num_blocks, policy, ahead, limit
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.core.scheduler.FAIR_STEPS", 2)
        run_random(seed, num_blocks, policy, ahead, limit)


def run_random(seed, num_blocks, policy, ahead, limit) -> None:
    """The next token is a function of the tokens so far: a mix-up of state would change it."""
    rng = random.Random(seed)
    s = scheduler(4, num_blocks, 16, num_blocks * BLOCK, policy=policy,
                  max_num_seqs_per_client=limit)  # fmt: skip
    left, ended, aborted, prompts = [], {}, set(), {}
    for number in range(24):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, num_blocks * BLOCK - 25))]
        one = request(f"{rng.choice('aaaaabc')}{number}", prompt, rng.randint(1, 25),
                      priority=rng.randrange(2))  # fmt: skip
        left.append(one)
        prompts[one.request_id] = prompt
    texts: dict[str, list[int]] = {}
    in_flight = None
    for _ in range(6000):
        if left and rng.random() < 0.3:
            s.add(left.pop())
        if s.requests and rng.random() < 0.01:
            aborted.add(gone := rng.choice([*s.requests]))
            s.abort(gone)
        step = s.schedule()
        sampled = {}
        if in_flight is not None:
            new = {new.request.request_id for new in step.scheduled_new_reqs}
            assert not new & {*in_flight[0].num_scheduled_tokens}
        for name, num_tokens in step.num_scheduled_tokens.items():
            r = s.requests[name]
            assert r in s.running and r.num_scheduled_tokens >= num_tokens
            assert r.num_slots >= r.num_computed_tokens + r.num_scheduled_tokens
            if r.num_unscheduled_tokens == 1 and r.num_pending_tokens:
                text = texts.setdefault(name, list(r.all_token_ids))
                sampled[name] = sum(text) % 50
                text.append(sampled[name])
        now, in_flight = (in_flight, (step, sampled)) if ahead else ((step, sampled), None)
        if now is not None:
            output = ModelRunnerOutput([*now[1]], [[token] for token in now[1].values()])
            ended |= {
                r.request_id: r for r, _ in s.update(now[0], output) if r.finish_reason is not None
            }
        assert len(s.running) + len(s.waiting) == len(s.requests)
        clients = {r.client for r in s.requests.values()}
        assert s.waiting.num_clients == len(clients)
        assert all(s.waiting.num_running(c) == running(s).count(c) for c in clients)
        if limit is not None:
            assert all(running(s).count(c) <= limit for c in clients)
        assert len([*s.waiting]) <= len(s.waiting)
        if not left and not s.has_requests and (in_flight is None or in_flight[0].is_empty):
            break
    assert set(ended) | aborted == set(prompts)
    for name, r in ended.items():
        tokens = list(prompts[name])
        while len(tokens) < len(r.all_token_ids):
            tokens.append(sum(tokens) % 50)
        assert r.all_token_ids == tokens
        assert r.num_output_tokens == r.max_tokens
    s.pool.check_idle()


# ---------------------------------------------------------------- a greedy client


def p99_in_steps(num_greedy: int) -> int:
    """Of 99 clients that send one request after another, each a step after the answer to the one
    before; beside one that sends `num_greedy` at once."""
    s = scheduler(max_num_seqs=64, num_blocks=4096, budget=2048)
    add(s, "!", num_greedy, prompt=range(16), max_tokens=16)
    clients = [chr(200 + number) for number in range(99)]
    due = {client: [number % 16, 8] for number, client in enumerate(clients)}  # step, turns left
    since: dict[str, int] = {}
    times = []
    for step in range(10_000):
        for client, (when, _) in due.items():
            if when == step:
                s.add(request(f"{client}{step}", range(16), 16))
                since[client] = step
        for r in advance(s):
            if r.client in due:
                times.append(step - since[r.client] + 1)
                due[r.client][0], due[r.client][1] = step + 2, due[r.client][1] - 1
                if not due[r.client][1]:
                    del due[r.client]
        if not due:
            return sorted(times)[int(0.99 * len(times))]
    raise AssertionError("they are not answered")


def test_a_thousand_requests_of_one_client_change_little_for_the_others():
    assert p99_in_steps(1000) <= 1.5 * p99_in_steps(0)
