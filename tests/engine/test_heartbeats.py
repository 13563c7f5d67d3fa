"""What the server concludes from the heartbeats of an engine and its ranks."""

import os
import time

import pytest

from vllm.engine.supervision import TICK_SECONDS, RestartBudget, Watch, Watched
from vllm.utils.heartbeat import BEAT_SECONDS, Activity, Page, Pulse


class Engine:
    """An engine process and two ranks, as their page tells of them."""

    def __init__(self, is_gpu: bool = False):
        self.page = Page(3)
        names = ("the engine process", "rank 0", "rank 1")
        self.watch = Watch([Watched(name, self.page, i) for i, name in enumerate(names)])
        self.watch.is_gpu = is_gpu
        for slot in range(3):
            self.set(slot, pid=os.getpid(), activity=Activity.STEP)
        self.watch.tick(TICK_SECONDS)

    def set(self, slot: int, **values: int) -> None:
        for name, value in values.items():
            self.page.words[8 * slot + FIELDS.index(name)] = value

    def run(self, seconds: float, stopped: int | None = None, cpu_of: int | None = None) -> float:
        """Ticks until something is told or `seconds` are over; the seconds that have passed.
        cpu_of: a process that computes."""
        for count in range(int(seconds / TICK_SECONDS)):
            for slot in range(3):
                if slot != stopped:
                    self.page.words[8 * slot + FIELDS.index("beats")] += 1
            if cpu_of is not None:
                self.page.words[8 * cpu_of + FIELDS.index("cpu_ms")] += 20
            self.watch.tick(TICK_SECONDS)
            if self.watch.troubles():
                return (count + 1) * TICK_SECONDS
        return seconds


FIELDS = ("pid", "beats", "activity", "steps", "cpu_ms")


def test_a_stopped_rank_is_named_in_5_seconds_and_those_that_wait_for_it_are_not() -> None:
    engine = Engine()
    assert engine.run(30, stopped=2) <= 5
    ((name, text),) = engine.watch.troubles().items()
    assert name == "rank 1"
    assert f"rank 1 (pid {os.getpid()}) gives no sign of life since " in text
    assert "s), computing step 0" in text
    assert not engine.watch.is_dead(60)
    assert engine.watch.is_dead(4)
    engine.set(0, steps=1)
    engine.run(2 * TICK_SECONDS)
    assert not engine.watch.troubles()


def test_whoever_is_idle_owes_beats_and_no_progress() -> None:
    engine = Engine()
    for slot in range(3):
        engine.set(slot, activity=Activity.IDLE)
    assert engine.run(100) == 100
    assert engine.run(30, stopped=0) <= 5
    assert "), idle" in engine.watch.troubles()["the engine process"]


def test_a_long_step_on_the_cpu_is_none_that_is_stuck() -> None:
    engine = Engine()
    assert engine.run(1000, cpu_of=1) == 1000
    assert engine.run(30) <= 5
    assert set(engine.watch.troubles()) == {"rank 0", "rank 1"}, "the engine waits for its ranks"
    assert "rank 1 (pid" in engine.watch.troubles()["rank 1"]
    assert "makes no progress" in engine.watch.troubles()["rank 1"]


def test_a_step_on_a_gpu_has_a_bound_of_four_times_the_longest() -> None:
    engine = Engine(is_gpu=True)
    assert 10 < engine.run(100, cpu_of=1) <= 15, "who waits for a GPU computes"
    engine = Engine(is_gpu=True)
    engine.run(8)
    engine.set(1, steps=1)
    engine.run(TICK_SECONDS)
    assert 32 < engine.run(100) <= 37


def test_what_is_announced_may_take_long_but_not_for_ever() -> None:
    for activity in (Activity.START, Activity.CALL, Activity.COMPILE):
        engine = Engine(is_gpu=True)
        engine.set(1, activity=activity)
        assert engine.run(1000) == 1000
        assert 30 < engine.run(100, stopped=1) < 31
        assert not engine.watch.is_dead(4)


def test_a_process_that_ended_is_for_others_to_tell() -> None:
    engine = Engine()
    for slot in range(3):
        engine.set(slot, activity=Activity.IDLE)
    engine.set(2, pid=2**22 + 1)  # above Linux's largest
    assert engine.run(30, stopped=2) == 30
    engine.set(2, pid=0)
    engine.run(1)
    assert "rank 1" not in engine.watch.silent_s


def test_a_machine_that_was_suspended_counts_against_nobody() -> None:
    engine = Engine()
    engine.watch.tick(1000.0)
    engine.watch.tick(1000.0)
    assert not engine.watch.troubles()


def test_ranks_of_other_machines_are_judged_by_nobody() -> None:
    engine = Engine()
    engine.watch.sees_ranks = False
    assert engine.run(1000) == 1000


def test_a_pulse_beats_while_its_process_computes() -> None:
    page, pulse = Page(2), Pulse()
    pulse.attach(page, 1)
    pulse.enter(Activity.STEP)
    pulse.step()
    before = page.read(1)
    assert before[:1] == (os.getpid(),) and before[2:4] == (Activity.STEP, 1)
    end = time.monotonic() + 3 * BEAT_SECONDS
    while time.monotonic() < end:
        pass
    after = page.read(1)
    assert after.beats > before.beats
    assert after.cpu_ms > before.cpu_ms + 20
    with pulse.during(Activity.CALL):
        assert page.read(1).activity == Activity.CALL
    assert page.read(1).activity == Activity.STEP
    pulse.end()
    assert page.read(1).pid == 0 == page.read(0).pid


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_restarts_are_counted_for_an_hour(limit: int) -> None:
    budget = RestartBudget(limit)
    assert [budget.take(10.0 * i) for i in range(limit + 1)] == [True] * limit + [False]
    assert budget.take(3700.0) is (limit > 0)
