"""How many tokens to draft: by the load, by what is accepted, and by whether it pays."""

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median

from vllm.config.speculative import SpeculativeConfig
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput
from vllm.core.request import Request

# Draft tokens of a request's first draft.
_FIRST_DRAFT = 4
# Decode steps with drafts before those without are timed, and steps of a measurement of these.
_FIRST_STEPS, _PLAIN_STEPS = 32, 16
# Drafts end when they have lost the time of so many steps without, after as many at least.
_LOST_STEPS = 4
# Measurements until drafts are tried again, at least, and as many as make what they lost no more
# than this share of the time. After a trial that lost there are twice as many each time.
_HELD, _MOST_HELD = 16, 64
_MOST_LOST = 0.02
_LONGEST_HELD = 4096
# Steps over which it is spread what a drafter took to catch up, and the steps without drafts whose
# time it owes at most.
_CHARGED, _MOST_OWED = 128, 256


def drop_waiting_drafts(running: Iterable[Request], scheduled: SchedulerOutput) -> None:
    """Those of requests that are not in this step: a worker keeps the tokens of one step alone."""
    for request in running:
        has_waited = request.request_id not in scheduled.num_scheduled_tokens
        if request.spec_token_ids and not request.num_pending_tokens and has_waited:
            request.spec_token_ids = []


class DraftTrials:
    """Whether steps with drafts give more tokens a second than steps without, at one load.

    An account says what drafts have gained over steps without, which are timed again from time to
    time. While it is not overdrawn there are drafts; credit is limited, since what clients send
    changes. A step is taken to last as long as the median of those around it, so one that is slow
    decides nothing. What a drafter takes for prompts, and for what it missed while nothing was
    drafted, is charged step by step.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._num_left = _FIRST_STEPS  # steps until the other way's turn
        self._patience = _HELD
        self._rate = 0.0  # tokens of a request a second without drafts; 0: not known yet
        self._plain = 1e-9  # seconds of a step without drafts
        self._seconds: list[float] = []  # of the steps of a measurement, or of the last ones
        self._num_tokens = 0.0
        self._account = self._gained = 0.0  # seconds; gained: since drafts began, without a limit
        self._first_tokens = 0.0  # of steps before those without drafts were timed
        self._owed = 0.0

    def owe(self, seconds: float) -> None:
        """A drafter took so long for tokens that no decode step gave."""
        self._owed += seconds
        if self._rate:
            self._owed = min(self._owed, _MOST_OWED * self._plain)

    def pass_by(self) -> None:
        """A step whose time says nothing, as one with prompts: drafts pay off what they owe in it,
        and the time without them passes."""
        if self.is_on:
            self._owed -= self._owed / _CHARGED
        elif self._rate:
            self._num_left -= 1
            self._take_turns()

    def record(self, was_on: bool, num_tokens: float, seconds: float) -> None:
        """A decode step gave each request `num_tokens`, on average, `seconds` after the one
        before."""
        if was_on != self.is_on:  # scheduled before the last change
            return
        self._seconds.append(seconds)
        self._num_tokens += num_tokens
        self._num_left -= 1
        if not self.is_on:
            self._time_plain()
        elif self._rate:
            self._keep_account(num_tokens)
        self._take_turns()

    def _take_turns(self) -> None:
        if self._num_left <= 0 and self.is_on:
            self._without_drafts(_PLAIN_STEPS)
        elif self._num_left <= 0:
            self.is_on, self._num_left = True, _HELD * _PLAIN_STEPS
            self._seconds, self._account, self._gained = [], 0.0, 0.0

    def _keep_account(self, num_tokens: float) -> None:
        del self._seconds[:-_LOST_STEPS]
        charged = self._owed / _CHARGED
        self._owed -= charged
        gained = num_tokens / self._rate - median(self._seconds) - charged
        self._gained += gained
        most = _LOST_STEPS * self._plain
        self._account = min(self._account + gained, most)
        if len(self._seconds) == _LOST_STEPS and self._account < -most:
            self._end_drafts()

    def _end_drafts(self) -> None:
        lost = self._owed - self._gained
        self._patience = min(2 * self._patience, _MOST_HELD) if lost > 0 else _HELD
        least = math.ceil(lost / self._plain / _PLAIN_STEPS / _MOST_LOST)
        self._owed = 0.0  # it is paid for
        self._without_drafts(_PLAIN_STEPS * max(self._patience, min(least, _LONGEST_HELD)))

    def _without_drafts(self, num_steps: int) -> None:
        if not self._rate:  # what the first drafts gained is known when the other way was timed
            self._gained = -median(self._seconds) * len(self._seconds)
            self._first_tokens = self._num_tokens
        self.is_on, self._num_left = False, num_steps
        self._seconds, self._num_tokens = [], 0.0

    def _time_plain(self) -> None:
        if len(self._seconds) < _PLAIN_STEPS:
            return
        is_first = not self._rate
        self._plain = max(median(self._seconds), 1e-9)
        self._rate = self._num_tokens / self._plain / _PLAIN_STEPS
        self._seconds, self._num_tokens = [], 0.0
        if is_first:
            self._gained += self._first_tokens / self._rate
            if self._gained < self._owed / _CHARGED * _FIRST_STEPS:
                self._end_drafts()


class Speculation:
    """The engine's choices about draft tokens, and what it counts of them.

    A request's draft is twice as long after one that was accepted whole, and else one token longer
    than what was accepted. With synthetic acceptance drafts are measured: all are as long as they
    may be, whether they pay or not. num_drafts, num_draft_tokens: since `take_counts`; accepted_at:
    accepted tokens by their position in the draft, from 0 on.
    """

    def __init__(self, config: SpeculativeConfig):
        self._config = config
        self._is_measured = config.acceptance_rate is not None
        self._lengths: dict[str, int] = {}
        self._trials: dict[int, DraftTrials] = {}
        self._last_end: float | None = None
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_at: Counter[int] = Counter()

    def max_draft_tokens(self, num_running: int, request_ids: Iterable[str] = ()) -> int:
        """Tokens to draft for each request after a step with `num_running` requests; 0 where it
        does not pay. request_ids: of these; no longer than the longest draft of them where each
        token costs a pass of a model."""
        limit = self._config.disable_by_batch_size
        if num_running == 0 or (limit is not None and num_running > limit):
            return 0
        most = self._config.num_speculative_tokens
        if self._is_measured:
            return most
        if not self._trials_at(num_running).is_on:
            return 0
        return max(map(self.length, request_ids), default=most) if self._config.has_model else most

    def length(self, request_id: str) -> int:
        """Tokens of the next draft of a request, at most."""
        most = self._config.num_speculative_tokens
        return self._lengths.get(request_id, most if self._is_measured else min(_FIRST_DRAFT, most))

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)

    def take_counts(self) -> tuple[int, int, Counter[int]]:
        """num_drafts, num_draft_tokens and accepted_at since the last call."""
        counts = self.num_drafts, self.num_draft_tokens, self.accepted_at
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_at = Counter()
        return counts

    def record(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Takes the results of a step into account, at `now` seconds of a monotonic clock."""
        drafts = scheduled.scheduled_spec_decode_tokens
        num_tokens = 0
        for request_id, tokens in zip(output.request_ids, output.sampled_token_ids):
            num_tokens += len(tokens)
            draft = drafts.get(request_id)
            if draft and tokens:
                self._count(request_id, len(draft), len(tokens) - 1)
        num_rows = len(output.request_ids)
        if not scheduled.num_scheduled_tokens:  # of a rank whose peers have requests
            self._last_end = None
            return
        num_computed = sum(scheduled.num_scheduled_tokens.values())
        num_drafted = sum(map(len, drafts.values()))
        has_prompts = scheduled.scheduled_new_reqs or num_computed - num_drafted != num_rows
        trials = self._trials_at(len(scheduled.num_scheduled_tokens))
        trials.owe(output.catch_up_seconds)
        if has_prompts or output.compile_waits:
            trials.pass_by()
            self._last_end = None
            return
        was_on = scheduled.num_draft_tokens > 0
        # The first step without drafts still verifies those of the one before.
        if self._last_end is not None and (was_on or not drafts):
            seconds = now - self._last_end - output.catch_up_seconds
            trials.record(was_on, num_tokens / num_rows, seconds)
        self._last_end = now

    def _trials_at(self, num_running: int) -> DraftTrials:
        return self._trials.setdefault(num_running.bit_length(), DraftTrials())

    def _count(self, request_id: str, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.accepted_at.update(range(num_accepted))
        if self._is_measured:
            return
        is_whole = num_accepted == num_tokens
        length = max(self.length(request_id), num_tokens) * 2 if is_whole else num_accepted + 1
        self._lengths[request_id] = min(length, self._config.num_speculative_tokens)
