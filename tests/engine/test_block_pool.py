"""Blocks are never handed out twice, never lost, and reused oldest first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm.core.block_pool import BlockPool

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Users take, share and release blocks; the pool is compared with plain sets."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.users: list[list[int]] = []
        self.next_hash = 0

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count):
        if count <= self.pool.num_free:
            blocks = self.pool.take(count)
            held = {block for user in self.users for block in user}
            assert len(set(blocks)) == count and not held & set(blocks)
            self.users.append(blocks)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.users.pop(data.draw(st.integers(0, len(self.users) - 1))))

    @precondition(lambda self: any(self.users))
    @rule(data=st.data())
    def remember(self, data):
        user = data.draw(st.sampled_from([user for user in self.users if user]))
        content = str(self.next_hash).encode()
        self.next_hash += 1
        self.pool.remember(user[0], content)
        assert self.pool.find(content) == user[0]

    @rule(data=st.data())
    def share(self, data):
        known = [i for i in range(self.next_hash) if self.pool.find(str(i).encode()) is not None]
        if known:
            block = self.pool.find(str(data.draw(st.sampled_from(known))).encode())
            self.pool.share(block)
            self.users.append([block])

    @invariant()
    def every_block_is_held_or_free(self):
        held = {block for user in self.users for block in user}
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert all(self.pool.is_free(block) == (block not in held) for block in range(NUM_BLOCKS))

    def teardown(self):
        for user in self.users:
            self.pool.release(user)
        self.pool.check_idle()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_free_blocks_are_reused_oldest_first_and_a_requests_last_ones_before_its_first():
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(2)
    for block in first + second:
        pool.remember(block, str(block).encode())
    pool.release(second)
    pool.release(first)
    assert pool.take(4) == [*reversed(second), *reversed(first)]


def test_a_block_that_nobody_can_find_is_reused_first():
    pool = BlockPool(3)
    known, unknown = pool.take(1), pool.take(1)
    pool.remember(known[0], b"content")
    pool.release(unknown)
    pool.release(known)
    assert pool.take(1) == unknown


def test_a_reused_block_is_not_found_by_its_old_content():
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.remember(blocks[0], b"old")
    pool.release(blocks)
    assert pool.find(b"old") == blocks[0]
    pool.take(1)
    assert pool.find(b"old") is None


def test_the_first_block_of_equal_content_is_the_one_that_is_found():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.remember(first, b"same")
    pool.remember(second, b"same")
    assert pool.find(b"same") == first


def test_a_block_that_is_still_held_fails_the_idle_check():
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="1 blocks are still in use"):
        pool.check_idle()
