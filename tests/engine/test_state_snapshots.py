"""Recurrent states kept for prompts that begin alike: the right ones, at the right time."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_scheduler import BLOCK, Pipeline, advance, request
from vllm.config import SchedulerConfig
from vllm.core.outputs import SchedulerOutput
from vllm.core.request import Request
from vllm.core.scheduler import Scheduler
from vllm.core.state_snapshots import StateSnapshots

HASHES = [bytes([i]) for i in range(8)]


def snapshots(*slots: int, least_tokens: int = 2 * BLOCK) -> StateSnapshots:
    return StateSnapshots(slots, least_tokens)


def keep(kept: StateSnapshots, content: bytes) -> int | None:
    slot = kept.keep(content)
    kept.begin_step()
    return slot


def test_the_longest_beginning_whose_state_is_kept_is_found():
    kept = snapshots(5, 6)
    assert kept.find(HASHES) == (0, 0)
    first, second = keep(kept, HASHES[1]), keep(kept, HASHES[4])
    assert {first, second} == {5, 6}
    assert kept.find(HASHES) == (5, second)
    assert kept.find(HASHES[:4]) == (2, first)
    assert kept.find(HASHES[:1]) == (0, 0)


def test_what_a_step_keeps_is_found_from_the_next_on():
    """A step copies into its requests before it computes what it keeps."""
    kept = snapshots(5)
    assert kept.keep(HASHES[0]) == 5
    assert kept.find(HASHES) == (0, 0)
    kept.begin_step()
    assert kept.find(HASHES) == (1, 5)


def test_the_state_that_was_not_used_for_longest_makes_room():
    kept = snapshots(5, 6)
    keep(kept, HASHES[0])
    last = keep(kept, HASHES[1])
    kept.find(HASHES[:1])
    assert keep(kept, HASHES[2]) == last
    assert kept.find(HASHES[:2]) == (1, 11 - last)
    assert kept.keep(HASHES[0]) is None, "it is there"


def test_a_step_takes_no_slot_twice():
    kept = snapshots(5)
    assert (kept.keep(HASHES[0]), kept.keep(HASHES[1]), kept.keep(HASHES[0])) == (5, None, None)


def test_forgotten_states_leave_their_slots():
    kept = snapshots(5, 6)
    keep(kept, HASHES[0])
    kept.keep(HASHES[1])
    kept.forget(HASHES)
    kept.begin_step()
    assert kept.find(HASHES) == (0, 0)
    assert {keep(kept, HASHES[2]), keep(kept, HASHES[3])} == {5, 6}


# ---------------------------------------------------------------- with the scheduler


class Watched(Scheduler):
    """Checks every step as a device would run it: states are the tokens they hold.

    slots: tokens whose state a slot holds. states: those of running requests.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.slots: dict[int, list[int]] = {}
        self.states: dict[str, int] = {}
        self.restored = self.num_restored_tokens = 0

    def schedule(self) -> SchedulerOutput:
        step = super().schedule()
        for request_id in step.removed_request_ids:
            self.states.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            r, start = new.request, new.num_computed_tokens
            assert bool(start) == bool(new.state_slot)
            if start:
                assert self.slots[new.state_slot] == r.all_token_ids[:start]
                self.restored += 1
                self.num_restored_tokens += start
            self.states[r.request_id] = start
        for request_id, count in step.num_scheduled_tokens.items():
            self.states[request_id] += count
        for request_id, slot in step.state_snapshots.items():
            tokens = self.requests[request_id].all_token_ids
            assert self.states[request_id] <= len(tokens)
            self.slots[slot] = tokens[: self.states[request_id]]
        assert len(set(step.state_snapshots.values())) == len(step.state_snapshots)
        return step


def watched(num_blocks: int = 64, budget: int = 32, slots=(9, 10, 11, 12)) -> Watched:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
    return Watched(config, num_blocks, BLOCK, num_blocks * BLOCK, True, snapshots(*slots))


def run(s: Scheduler, *requests: Request) -> None:
    for r in requests:
        s.add(r)
    while s.has_requests:
        advance(s)


def test_the_next_turn_of_a_conversation_goes_on_after_the_last():
    s = watched()
    turn = list(range(22))
    run(s, request("first", turn, 3))
    longer = request("second", [*turn, 7, 7, 7, 50, 51], 3)
    run(s, longer)
    assert longer.num_cached_tokens == 20
    assert s.restored == 1


def test_what_two_prompts_share_is_kept_for_a_third():
    s = watched()
    shared = list(range(16))
    requests = [request(str(i), [*shared, *range(60 + i, 66 + i)], 1) for i in range(3)]
    for r in requests:
        run(s, r)
    assert [r.num_cached_tokens for r in requests] == [0, 0, 16]


def test_states_of_a_request_that_failed_are_found_no_more():
    s = watched()
    run(s, request("first", list(range(22)), 1))
    failed = request("failed", list(range(22)), 3)
    s.add(failed)
    advance(s)
    assert s.snapshots.find(failed.block_hashes)[0] == 5
    s.forget_cached("failed")
    assert s.snapshots.find(failed.block_hashes) == (0, 0)


def test_a_short_prompt_is_not_cut_in_two():
    s = watched()
    s.add(request("short", [1, 2, 3, 4, 5], 1))
    step = s.schedule()
    assert step.num_scheduled_tokens == {"short": 5} and not step.state_snapshots


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 24),
    num_slots=st.integers(1, 4),
    ahead=st.booleans(),
)
def test_whatever_comes_each_request_gets_the_state_of_its_own_tokens(
    seed, num_blocks, num_slots, ahead
):
    rng = random.Random(seed)
    s = watched(num_blocks, 12, range(9, 9 + num_slots))
    shared = [rng.randrange(50) for _ in range(24)]
    pending, ended = [], []
    for i in range(14):
        tail = [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        pending.append(request(str(i), shared[: rng.randrange(25)] + tail, rng.randint(1, 6)))
    pipeline = Pipeline(s, lambda text: sum(text) % 50)
    for _ in range(2000):
        if pending and rng.random() < 0.4:
            s.add(pending.pop())
        if s.requests and rng.random() < 0.03:
            victim = rng.choice(list(s.requests))
            if rng.random() < 0.5:
                s.forget_cached(victim)
            s.abort(victim)
        ended += pipeline.advance() if ahead else advance(s, lambda r: sum(r.all_token_ids) % 50)
        if not pending and not s.has_requests and not pipeline.running:
            break
    assert not s.has_requests
    assert all(r.num_output_tokens == r.max_tokens for r in ended)
    s.pool.check_idle()


def test_a_prompt_of_the_least_length_is_kept():
    s = watched()
    s.add(request("short", list(range(9)), 1))
    step = s.schedule()
    assert step.num_scheduled_tokens == {"short": 8} and list(step.state_snapshots) == ["short"]
