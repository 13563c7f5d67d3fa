"""Requests by priority, and prefixes that only requests of one salt share."""

import pytest

from vllm.config import SchedulerConfig
from vllm.core.outputs import ModelRunnerOutput
from vllm.core.request import EngineRequest, Request
from vllm.core.scheduler import Scheduler
from vllm.errors import ConfigError
from vllm.sampling_params import SamplingParams

BLOCK = 4


def request(name, prompt, priority=0, max_tokens=4, salt=None):
    params = SamplingParams(max_tokens=max_tokens)
    wire = EngineRequest(name, prompt, params, 0, [99], max_tokens, priority=priority,
                         cache_salt=salt)  # fmt: skip
    return Request.of(wire)


def scheduler(policy="priority", num_blocks=64, max_num_seqs=1, caching=False):
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=32, policy=policy)
    return Scheduler(config, num_blocks, BLOCK, 32, caching)


def advance(s):
    """One step; ids of the requests in it."""
    step = s.schedule()
    ids = [*step.num_scheduled_tokens]
    s.update(step, ModelRunnerOutput(ids, [[7]] * len(ids)))
    return ids


def order(s):
    """Ids in the order in which requests are first computed."""
    seen = []
    while s.has_requests:
        seen += [name for name in advance(s) if name not in seen]
    return seen


@pytest.mark.parametrize(
    ("policy", "wanted"), [("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "b", "a", "c"])]
)
def test_waiting_requests_run_in_the_order_of_the_policy(policy, wanted):
    s = scheduler(policy)
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", -2)):
        s.add(request(name, [1, 2], priority))
    assert order(s) == wanted
    s.pool.check_idle()


def test_the_request_of_the_least_priority_is_preempted_though_it_came_first():
    s = scheduler(num_blocks=8, max_num_seqs=3)
    late = request("late", [1] * 11, priority=9, max_tokens=20)
    s.add(late)
    advance(s)
    s.add(request("urgent", [2] * 11, priority=0, max_tokens=20))
    while not s.num_preemptions:
        advance(s)
    assert [r.request_id for r in s.running] == ["urgent"]
    assert [*s.waiting] == [late]
    assert order(s) == ["urgent", "late"]
    s.pool.check_idle()


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [(None, None, True), ("x", "x", True), ("x", "y", False), ("x", None, False)],
)
def test_prefixes_are_shared_by_requests_of_one_salt_alone(first, second, is_shared):
    s = scheduler(caching=True)
    prompt = [*range(12)]
    s.add(request("a", prompt, salt=first))
    order(s)
    s.add(other := request("b", prompt, salt=second))
    order(s)
    assert (other.num_cached_tokens == 8) == is_shared
    assert (other.num_cached_tokens == 0) != is_shared


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="--scheduling-policy 'random' is unknown: it takes fcfs"):
        SchedulerConfig(policy="random")
