"""How many sequences a server takes, of whom, and when to come again."""

from contextlib import ExitStack

import pytest

from vllm.engine.admission import Admission
from vllm.errors import QueueFullError, RequestError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_as_many_as_run_and_wait_are_taken():
    admission = Admission(2, 1)
    with (
        admission.reserve("a", 2),
        admission.reserve("a", 1),
        pytest.raises(QueueFullError, match=r"3 sequences .* 2 running and 1 waiting"),
    ):
        admission.check("a", 1)
    admission.check("a", 3)
    with pytest.raises(RequestError, match=r"4 sequences \(prompts times n\)"):
        admission.check("a", 4)


def test_without_a_limit_all_are_taken():
    admission = Admission(1, None)
    with admission.reserve("a", 1000):
        admission.check("a", 1000)


def test_a_client_that_fills_the_queue_keeps_no_other_out():
    admission, room = Admission(2, 10), 12
    with ExitStack() as held:
        for _ in range(room):
            held.enter_context(admission.reserve("a", 1))
        for _ in range(room // 2):
            held.enter_context(admission.reserve("b", 1))
        with pytest.raises(QueueFullError):
            admission.check("b", 1)  # it has its half
        with pytest.raises(QueueFullError):
            admission.check("a", 1)
        for _ in range(4):
            held.enter_context(admission.reserve("c", 1))
        with pytest.raises(QueueFullError):
            admission.check("d", 1)  # twice as many as may wait
    admission.check("a", room)


def test_a_refused_request_is_not_counted_and_a_failed_one_no_more():
    admission = Admission(1, 1)
    with pytest.raises(ValueError), admission.reserve("a", 2):
        with pytest.raises(QueueFullError), admission.reserve("a", 1):
            pass
        raise ValueError
    admission.check("a", 2)


def test_the_time_to_come_again_is_that_of_the_queue_at_the_rate_of_late():
    clock = Clock()
    admission = Admission(2, 100, clock)
    with ExitStack() as held:
        held.enter_context(admission.reserve("a", 42))
        clock.now += 7
        assert admission.retry_after_s() == 7, "nothing has finished for as long"
        for _ in range(4):
            with admission.reserve("b", 2):
                clock.now += 0.75
        # 40 wait, and 8 sequences took 10 s.
        assert admission.retry_after_s() == 50
        with admission.reserve("b", 60):
            clock.now += 1
        clock.now += 1000
        assert admission.retry_after_s() == 60, "what finished long ago is forgotten"
    with admission.reserve("a", 102):
        clock.now += 20
        assert admission.retry_after_s() == 20, "what it did before it was idle tells nothing"
