"""How many tokens to draft: by the load, by what is accepted, and by whether it pays."""

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median

from vllm.config.speculative import SpeculativeConfig
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput

# Draft tokens of a request's first draft.
_FIRST_DRAFT = 4
# Decode steps with drafts before those without are timed, and steps of every later measurement.
_FIRST_STEPS = 32
_TRIAL_STEPS = 16
# A later trial of drafts ends when it has lost the time of so many steps without, after as many.
_LOST_STEPS = 4
# Measurements of the faster way until the other one is tried again, at least, and as often as a
# trial of drafts that did not pay lost no more than this share of the time. They are tried half as
# often each time.
_HELD, _MOST_HELD = 16, 64
_MOST_LOST = 0.02
_LONGEST_HELD = 4096
# Of what a drafter took to catch up, what each measurement is charged with.
_CHARGED = 1 / 8


class DraftTrials:
    """Whether steps with drafts give more tokens a second than steps without, at one load.

    Both ways are timed in turn, and the slower one again from time to time, since what clients send
    changes: at once where drafts give less than steps without gave. The median of the times is
    compared, so one slow step decides nothing. A trial whose drafts lose ends early. What a drafter
    takes for prompts, and for what it missed while nothing was drafted, counts besides, spread over
    several measurements.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._num_left = _FIRST_STEPS
        self._num_held = 0  # measurements of what was faster, until a trial
        self._patience = _HELD
        self._seconds: list[float] = []
        self._num_tokens = 0
        self._rates: dict[bool, float] = {}
        self._plain = 1e-9  # seconds of a step without drafts
        self._owed = 0.0

    def owe(self, seconds: float) -> None:
        """A drafter took so long for tokens that no decode step gave."""
        self._owed += seconds

    def record(self, was_on: bool, num_tokens: int, seconds: float) -> None:
        """A decode step gave `num_tokens`, `seconds` after the one before."""
        if was_on != self.is_on:  # scheduled before the last change
            return
        self._seconds.append(seconds)
        self._num_tokens += num_tokens
        self._num_left -= 1
        if self._num_left > 0 and not self._has_lost():
            return
        timed, num_tokens = median(self._seconds) * len(self._seconds), self._num_tokens
        owed = self._owed
        if self.is_on:
            self._owed *= 1 - _CHARGED
            timed += owed * _CHARGED
        else:
            self._plain = max(timed / len(self._seconds), 1e-9)
        self._rates[self.is_on] = num_tokens / max(timed, 1e-9)
        lost = timed + self._owed - num_tokens / max(self._rates.get(False, 0.0), 1e-9)
        self._seconds, self._num_tokens, self._num_left = [], 0, _TRIAL_STEPS
        self._decide(math.ceil(lost / self._plain / _TRIAL_STEPS / _MOST_LOST))

    def _has_lost(self) -> bool:
        """Whether the trial of drafts under way has cost what it may."""
        is_trial = self.is_on and False in self._rates and not self._num_held
        if not is_trial or len(self._seconds) < _LOST_STEPS:
            return False
        timed = median(self._seconds) * len(self._seconds)
        return timed - self._num_tokens / self._rates[False] > _LOST_STEPS * self._plain

    def _decide(self, least_held: int) -> None:
        """After a measurement: of what is held, or of a trial, which lost what as many measurements
        may lose."""
        if len(self._rates) < 2:
            self.is_on = False
            return
        pays = self._rates[True] >= self._rates[False]
        if self._num_held:
            self._num_held -= 1
            if not self._num_held or (self.is_on and not pays):
                self.is_on, self._num_held = not self.is_on, 0
            return
        if pays:
            self._patience = _HELD
        elif self.is_on:
            self._patience = min(2 * self._patience, _MOST_HELD)
        was_on, self.is_on, self._num_held = self.is_on, pays, self._patience
        if was_on and not pays:
            self._num_held = max(self._num_held, min(least_held, _LONGEST_HELD))
            self._owed = 0.0  # it is paid for


class Speculation:
    """The engine's choices about draft tokens, and what it counts of them.

    A request's draft is twice as long after one that was accepted whole, and else one token longer
    than what was accepted. num_drafts, num_draft_tokens: since `take_counts`; accepted_at: accepted
    tokens by their position in the draft, from 0 on.
    """

    def __init__(self, config: SpeculativeConfig):
        self._config = config
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
        if limit is not None and num_running > limit:
            return 0
        if not self._trials_at(num_running).is_on:
            return 0
        most = self._config.num_speculative_tokens
        return max(map(self.length, request_ids), default=most) if self._config.has_model else most

    def length(self, request_id: str) -> int:
        """Tokens of the next draft of a request, at most."""
        most = self._config.num_speculative_tokens
        return self._lengths.get(request_id, min(_FIRST_DRAFT, most))

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
        num_computed = sum(scheduled.num_scheduled_tokens.values())
        num_drafted = sum(map(len, drafts.values()))
        num_rows = len(output.request_ids)
        has_prompts = scheduled.scheduled_new_reqs or num_computed - num_drafted != num_rows
        self._trials_at(len(scheduled.num_scheduled_tokens)).owe(output.catch_up_seconds)
        if has_prompts or output.compile_waits:
            self._last_end = None
        else:
            if self._last_end is not None:
                seconds = now - self._last_end - output.catch_up_seconds
                self._trials_at(num_rows).record(
                    scheduled.num_draft_tokens > 0, num_tokens, seconds
                )
            self._last_end = now

    def _trials_at(self, num_running: int) -> DraftTrials:
        return self._trials.setdefault(num_running.bit_length(), DraftTrials())

    def _count(self, request_id: str, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.accepted_at.update(range(num_accepted))
        is_whole = num_accepted == num_tokens
        length = max(self.length(request_id), num_tokens) * 2 if is_whole else num_accepted + 1
        self._lengths[request_id] = min(length, self._config.num_speculative_tokens)
