"""Thousands of hostile requests, and a well-behaved neighbour whose tokens must stay the same."""

import json
import statistics
import sys
import threading
import time
from typing import Any

import pytest
from entrypoints.serving import RunningServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .harness import Fault, descriptors, tokens, wait_for

pytestmark = pytest.mark.chaos

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize",
         "/detokenize")  # fmt: skip
FIELDS = ("prompt", "messages", "input", "max_tokens", "n", "temperature", "top_p", "top_k",
          "min_p", "seed", "stop", "stop_token_ids", "logit_bias", "logprobs", "prompt_logprobs",
          "guided_regex", "guided_json", "response_format", "tools", "tool_choice", "stream",
          "stream_options", "repetition_penalty", "presence_penalty", "bad_words", "priority",
          "allowed_token_ids", "min_tokens", "echo", "tokens", "truncate_prompt_tokens",
          "use_beam_search", "length_penalty", "structural_tag")  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 70), st.integers(), st.floats(),
    st.sampled_from([1e-300, 5e-324, 2**31, 2**63, -(2**63), 10**400]),
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(["ban", "", "\0", "(a+)+$", "{{ 7*7 }}", "a" * 5000]), st.text())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
LIKELY = st.fixed_dictionaries(
    {"prompt": st.just("ban"), "messages": st.just([{"role": "user", "content": "ban"}]),
     "input": st.just("ban"), "max_tokens": st.integers(1, 8)},
)  # fmt: skip
BODIES = st.one_of(
    st.builds(
        lambda likely, odd: json.dumps({**likely, **odd}).encode(),
        LIKELY, st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3),
    ),
    st.binary(max_size=200),
    VALUES.map(lambda value: json.dumps(value).encode()),
)  # fmt: skip


# A server that has just started prepares for grammars as soon as it is idle.
_REST = 12.0


class Neighbour:
    """Asks the same again and again; what it got, and how long that took."""

    def __init__(self, server: RunningServer):
        self.found: list[list[str]] = []
        self.seconds: list[float] = []
        self._server = server
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            begin = time.monotonic()
            self.found.append(tokens(self._server))
            self.seconds.append(time.monotonic() - begin)

    def end(self) -> None:
        self._ends.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98]


def test_hostile_requests(fault: Fault, server: RunningServer, num_hostile: int) -> None:
    """Thousands of hostile requests, and a neighbour with the same tokens as without them."""
    sys.setswitchinterval(5e-4)  # or this process keeps the neighbour waiting
    expected = tokens(server)
    time.sleep(_REST)
    quiet = Neighbour(server)
    time.sleep(10)
    quiet.end()
    before = descriptors(server.process.pid)
    neighbour = Neighbour(server)
    faults: list[Any] = []

    @settings(max_examples=num_hostile, database=None, deadline=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.sampled_from(PATHS), BODIES)
    def attack(path: str, body: bytes) -> None:
        answer = server.request("POST", path, body, {"Content-Type": "application/json"})
        if answer.status >= 500 and answer.status != 503:
            faults.append((path, body, answer.status, answer.body))

    fault.begins()
    attack()
    neighbour.end()
    fault.recovered()
    assert not faults, faults[:3]
    assert all(one == expected for one in (*quiet.found, *neighbour.found))
    assert neighbour.p99 <= 3 * quiet.p99, f"{neighbour.p99:.3f} s and not {quiet.p99:.3f} s"
    wait_for(lambda: descriptors(server.process.pid) <= before + 10, 60)
