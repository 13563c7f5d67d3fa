"""Requests that arrive together begin a few at a time."""

import asyncio
from itertools import pairwise

import pytest

from vllm.entrypoints.openai.turns import PER_TURN, Turns


async def _arrive(num_requests: int) -> list[int]:
    """How many requests had begun at each turn of the event loop, all arriving in the first."""
    turns, begun, seen = Turns(), 0, []

    async def begin() -> None:
        nonlocal begun
        await turns.wait()
        begun += 1

    tasks = [asyncio.create_task(begin()) for _ in range(num_requests)]
    while begun < num_requests:
        await asyncio.sleep(0)
        seen.append(begun)
    await asyncio.gather(*tasks)
    return seen


def test_what_arrives_together_begins_a_few_at_a_time():
    seen = asyncio.run(_arrive(1000))
    assert max(after - before for before, after in pairwise([0, *seen])) <= 2 * PER_TURN
    assert len(seen) >= 1000 / PER_TURN / 2


def test_few_begin_at_once():
    assert asyncio.run(_arrive(PER_TURN))[0] == PER_TURN


@pytest.mark.usefixtures("ends_soon")
def test_one_that_was_cancelled_takes_no_place():
    async def run() -> list[str]:
        turns, begun = Turns(), []

        async def begin(name: str) -> None:
            await turns.wait()
            begun.append(name)

        tasks = [asyncio.create_task(begin(f"first {i}")) for i in range(PER_TURN)]
        leaving = [asyncio.create_task(begin("left")) for _ in range(PER_TURN)]
        last = asyncio.create_task(begin("last"))
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*tasks, last, *leaving, return_exceptions=True)
        return begun

    assert asyncio.run(run()) == [*(f"first {i}" for i in range(PER_TURN)), "last"]
