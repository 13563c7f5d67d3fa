"""Work of several clients in few threads."""

from threading import Event

from vllm.engine.fair_pool import FairPool


def test_work_that_does_not_end_holds_up_its_own_client_alone():
    pool, end = FairPool(3, 2, "test"), Event()
    endless = [pool.submit("a", end.wait, 60) for _ in range(5)]
    assert [pool.submit("b", int, text).result(10) for text in ("1", "2", "3")] == [1, 2, 3]
    assert [one.running() for one in endless] == [True, True, False, False, False]
    end.set()
    assert all(one.result(10) for one in endless)
    pool.shutdown()


def test_clients_have_turns_and_each_is_served_in_order():
    pool, begin, order = FairPool(1, 2, "test"), Event(), []
    first = pool.submit("a", begin.wait, 60)
    work = [
        pool.submit(name[0], order.append, name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    begin.set()
    for one in (first, *work):
        one.result(10)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    pool.shutdown()


def test_what_is_cancelled_is_not_begun_and_an_error_is_that_of_its_work():
    pool, begin = FairPool(1, 1, "test"), Event()
    first = pool.submit("a", begin.wait, 60)
    begun = []
    gone, wrong = pool.submit("a", begun.append, 1), pool.submit("a", int, "x")
    assert gone.cancel()
    begin.set()
    assert first.result(10) and isinstance(wrong.exception(10), ValueError) and not begun
    late = pool.submit("b", int, "5")
    assert late.result(10) == 5
    pool.shutdown()


def test_a_pool_that_is_closed_begins_nothing_more():
    pool, begin = FairPool(1, 1, "test"), Event()
    first, second = pool.submit("a", begin.wait, 60), pool.submit("a", int, "1")
    pool.shutdown()
    begin.set()
    assert first.result(10) and second.cancelled()
