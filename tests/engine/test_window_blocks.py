"""Blocks of models with window layers: what a token sees is there, and nothing else is held."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_scheduler import BLOCK, request
from tests.engine.test_several_tokens import VOCABULARY, continued
from vllm.architectures.cache_groups import CacheGroup
from vllm.config import SchedulerConfig
from vllm.core.kv_blocks import BlockNeeds
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput
from vllm.core.request import FinishReason, Request
from vllm.core.scheduler import Scheduler
from vllm.worker.block_table import TableLayout
from vllm.worker.input_batch import InputBatch

MAX_LEN = 64
BUDGET = 14


def group(window: int = 0, parts: int = 1) -> CacheGroup:
    return CacheGroup(frozenset({(window, parts)}), parts, window)


GROUPS = {
    "half of the layers": (group(), group(6)),
    "five of six layers": (group(0, 5), group(5)),
    "all layers": (group(9),),
    "two windows": (group(0, 2), group(3, 3), group(11)),
    "a window of one token": (group(0, 3), group(1)),
    "larger windows": (group(), group(17, 4)),
}


class Device:
    """Runs steps on the worker's block tables over a memory that knows what each place holds: a
    group and the tokens up to a position, on which K and V depend. A block that another group
    writes to loses everything."""

    def __init__(self, s: Scheduler, groups: tuple[CacheGroup, ...], seed: int):
        self.s, self.groups, self.rng = s, groups, random.Random(seed)
        self.strides = [one.parts + index for index, one in enumerate(groups)]
        layouts = [TableLayout(g.parts, n, g.window) for g, n in zip(groups, self.strides)]
        self.batch = InputBatch(s.config.max_num_seqs, MAX_LEN, BLOCK, VOCABULARY, layouts)
        self.tokens: dict[str, list[int]] = {}
        self.memory: dict[int, tuple[int, dict[int, int]]] = {}
        self.most_held = [0] * len(groups)

    def run(self, step: SchedulerOutput, num_drafts: int = 0) -> ModelRunnerOutput:
        output, batch = ModelRunnerOutput(), self.batch
        for request_id in step.removed_request_ids:
            batch.drop(request_id)
        for new in step.scheduled_new_reqs:
            batch.add(new.request, new.num_computed_tokens)
            self.tokens[new.request.request_id] = list(new.request.all_token_ids)
        for request_id, blocks in step.new_block_ids.items():
            batch.append_blocks(request_id, blocks)
        for request_id, count in step.num_scheduled_tokens.items():
            drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
            self._compute(request_id, count, drafts)
            known = self.tokens[request_id]
            row = batch.row_of[request_id]
            start = int(batch.num_computed[row])
            batch.num_computed[row] = start + count
            if start + count == len(known) + len(drafts):
                sampled = self._sample(known, drafts)
                output.request_ids.append(request_id)
                output.sampled_token_ids.append(sampled)
                known += sampled
                batch.num_computed[row] = len(known) - 1
                right = continued(known, num_drafts)
                output.draft_token_ids[request_id] = [
                    (t + (self.rng.random() < 0.3)) % VOCABULARY for t in right
                ]
        return output

    def _sample(self, known: list[int], drafts: list[int]) -> list[int]:
        right = continued(known, len(drafts) + 1)
        num_right = next((i for i, t in enumerate(drafts) if t != right[i]), len(drafts))
        return right[: num_right + 1]

    def _compute(self, request_id: str, count: int, drafts: list[int]) -> None:
        """Writes what the step computes, then reads all that its tokens see."""
        r, row = self.s.requests[request_id], self.batch.row_of[request_id]
        start = int(self.batch.num_computed[row])
        tokens = self.tokens[request_id] + drafts
        contents = [hash(tuple(tokens[: i + 1])) for i in range(start + count)]
        for index, (table, one) in enumerate(zip(self.batch.tables, self.groups)):
            rows = self.batch.num_computed[row : row + 1] * 0 + row
            table.pass_windows(rows, self.batch.num_computed[row : row + 1])
            held = r.block_ids[index][r.num_passed[index] :]
            self.most_held[index] = max(self.most_held[index], len(held))
            named = table.ids[row, : table.num_blocks[row]] // self.strides[index]
            assert set(named.tolist()) <= set(held), "the table names a block of another request"
            seen = max(0, start - one.window + 1) if one.window else 0
            for position in [*range(start, start + count), *range(seen, start + count)]:
                block, part = divmod(int(table.ids[row, position // BLOCK]), self.strides[index])
                assert part < one.parts
                owner, cells = self.memory.get(block, (index, {}))
                if position >= start and owner != index:
                    owner, cells = index, {}
                place = part * BLOCK + position % BLOCK
                if position >= start:
                    cells[place] = contents[position]
                    self.memory[block] = owner, cells
                assert owner == index and cells.get(place) == contents[position]


def check_users(s: Scheduler) -> None:
    """Every block in use is in the table of one group, and counted once for each request."""
    users: Counter[int] = Counter()
    groups_of: dict[int, set[int]] = {}
    for r in s.requests.values():
        for index, table in enumerate(r.block_ids):
            held = table[r.num_passed[index] :]
            assert len(set(held)) == len(held)
            users.update(held)
            for block in held:
                groups_of.setdefault(block, set()).add(index)
        assert r.num_slots >= r.num_computed_tokens + r.num_scheduled_tokens
        assert r.num_blocks <= s.blocks.needs.of(MAX_LEN)
    assert all(len(found) == 1 for found in groups_of.values())
    assert [users[block] for block in range(s.pool.num_blocks)] == s.pool._num_users


def run_all(
    s: Scheduler,
    device: Device,
    is_async: bool,
    max_drafts: int = 0,
    aborted: frozenset[str] = frozenset(),
) -> None:
    in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
    for _ in range(4000):
        step = s.schedule()
        check_users(s)
        s.prepare_update(step)
        now = None
        if not step.is_empty:
            now = step, device.run(step, device.rng.randint(0, max_drafts))
        if is_async:
            now, in_flight = in_flight, now
        if now is not None:
            s.update(*now)
            check_users(s)
        for request_id in aborted & s.requests.keys():
            if device.rng.random() < 0.1:
                s.abort(request_id)
        if not s.has_requests:
            break
    assert not s.has_requests
    s.pool.check_idle()


@pytest.mark.parametrize("name", GROUPS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spare=st.integers(0, 20),
    max_drafts=st.integers(0, 5),
    is_async=st.booleans(),
    caches=st.booleans(),
)
def test_every_token_finds_what_it_sees_and_nothing_leaks(
    name, seed, spare, max_drafts, is_async, caches
):
    """With shared prefixes, preemptions, aborts, drafts that are taken back, and steps that are
    scheduled while the one before runs."""
    rng, groups = random.Random(seed), GROUPS[name]
    num_blocks = BlockNeeds(BLOCK, groups, BUDGET).of(MAX_LEN) + spare
    s = Scheduler(SchedulerConfig(4, BUDGET), num_blocks, BLOCK, MAX_LEN, caches, groups=groups)
    device = Device(s, groups, seed)
    shared, requests = [rng.randrange(VOCABULARY) for _ in range(45)], []
    for i in range(8):
        prompt = [*shared[: rng.randrange(46)], rng.randrange(VOCABULARY)]
        r = request(str(i), prompt, rng.randint(1, 30))
        requests.append((r, list(prompt)))
        s.add(r)
    aborted = frozenset("07")
    run_all(s, device, is_async, 0 if is_async else max_drafts, aborted)
    for r, prompt in requests:
        if r.finish_reason is FinishReason.ABORT:
            continue
        assert r.all_token_ids[len(prompt) :] == continued(prompt, r.max_tokens)


@pytest.mark.parametrize("name", GROUPS)
def test_a_long_request_holds_its_windows_alone(name):
    groups = GROUPS[name]
    needs = BlockNeeds(BLOCK, groups, BUDGET)
    s = Scheduler(
        SchedulerConfig(2, BUDGET), needs.of(MAX_LEN), BLOCK, MAX_LEN, False, groups=groups
    )
    device, r = Device(s, groups, 0), request("a", [1, 2, 3], 61)
    s.add(r)
    for _ in range(50):
        s.update((step := s.schedule()), device.run(step))
    for one, size, most in zip(groups, needs.sizes, device.most_held):
        whole = -(-len(r.all_token_ids) // size)
        assert most <= (-(-(one.window - 1) // size) + 2 if one.window else whole)
    assert r.num_blocks == needs.resting(r.num_computed_tokens + 1) or r.num_blocks <= sum(
        device.most_held
    )


def finish(s: Scheduler, device: Device, r: Request) -> int:
    s.add(r)
    run_all(s, device, is_async=False)
    return r.num_cached_tokens


def test_a_prefix_is_found_as_far_as_every_group_has_it():
    groups = GROUPS["half of the layers"]
    s = Scheduler(SchedulerConfig(4, BUDGET), 40, BLOCK, MAX_LEN, True, groups=groups)
    device, prompt = Device(s, groups, 0), [i % VOCABULARY for i in range(41)]
    assert finish(s, device, request("a", prompt, 1)) == 0
    assert finish(s, device, request("b", prompt, 1)) == 40
    # A window of 6 tokens before the 24th: blocks 4 and 5. Without 5, what is left is up to 20.
    r = request("c", prompt[:30], 1)
    s.prefix_cache.hash(r, 7)
    s.pool.forget([s.pool.find(r.block_hashes[i] + b"\1") for i in (5, 6)])
    assert finish(s, device, request("d", prompt[:29], 1)) == 20
    # Without the window of any prefix there is none, though the other layers have it.
    for hashed in s.prefix_cache.pool._by_hash.copy():
        if len(hashed) > 32:
            s.pool.forget([s.pool.find(hashed)])
    assert finish(s, device, request("e", prompt, 1)) == 0


def test_hits_are_whole_blocks_of_every_group():
    groups = GROUPS["five of six layers"]
    s = Scheduler(SchedulerConfig(4, BUDGET), 60, BLOCK, MAX_LEN, True, groups=groups)
    device, prompt = Device(s, groups, 0), [i % VOCABULARY for i in range(47)]
    finish(s, device, request("a", prompt, 1))
    assert finish(s, device, request("b", prompt, 1)) == 40  # of blocks of 20 and of 4 tokens


def test_what_a_cancelled_request_computed_is_forgotten_in_every_group():
    groups = GROUPS["five of six layers"]
    s = Scheduler(SchedulerConfig(4, BUDGET), 60, BLOCK, MAX_LEN, True, groups=groups)
    device, prompt = Device(s, groups, 0), [i % VOCABULARY for i in range(47)]
    s.add(request("a", prompt, 9))
    for _ in range(4):
        s.update((step := s.schedule()), device.run(step))
    assert s.pool._by_hash
    s.forget_cached("a")
    assert not s.pool._by_hash
    s.abort("a")
    s.pool.check_idle()
