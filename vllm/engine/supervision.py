"""Which processes of the engines are stopped or make no progress, and how often engines restart."""

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from vllm.utils.heartbeat import Activity, Page, Sign

TICK_SECONDS = 0.5
# A watch that is late was suspended or starved itself: more than this counts against nobody.
_MAX_TICK_SECONDS = 1.0
# Silence or lack of progress that is told. With beats and ticks of half a second, a process that
# stops is told after about 5 s.
_NOTICE_SECONDS = 4.5
# Imports and compilers may hold Python's lock, and with it the beats, for long.
_START_NOTICE_SECONDS = 30.0
_START_DEAD_SECONDS = 300.0
# A step on a GPU that takes longer than its bound is stuck. The bound follows the longest one seen.
_MIN_STEP_BOUND_SECONDS = 10.0
_STEP_BOUND_FACTOR = 4.0
# On the CPU a step may take any time, but whoever computes uses this share of a core, also where
# others keep the machine busy.
_WORKING_SHARE = 0.02
_RESTART_WINDOW_SECONDS = 3600.0

_DOING = {
    Activity.START: "loading the model",
    Activity.IDLE: "idle",
    Activity.STEP: "computing step {steps}",
    Activity.CALL: "in a call that may take long, such as sleep or wake_up",
    Activity.COMPILE: "compiling a kernel in step {steps}",
}
_LONG = (Activity.START, Activity.CALL, Activity.COMPILE)
# States in /proc/PID/stat that explain a silence.
_STATES = {
    "T": "; it is stopped (SIGSTOP)",
    "t": "; a debugger has stopped it",
    "D": "; it waits for a disk or a driver",
}


@dataclass(frozen=True, slots=True)
class Supervision:
    """dead_after_s: how long a process may give no sign of life until its engine is killed.
    restarts: how often engines are started again within an hour; then they are dead."""

    dead_after_s: float = 60.0
    restarts: int = 0


class RestartBudget:
    """At most `limit` restarts within an hour."""

    def __init__(self, limit: int):
        self.limit = limit
        self._taken: deque[float] = deque()

    def take(self, now: float | None = None) -> bool:
        """Whether one more is left, which is then used. now: of time.monotonic()."""
        now = time.monotonic() if now is None else now
        while self._taken and now - self._taken[0] > _RESTART_WINDOW_SECONDS:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return False
        self._taken.append(now)
        return True


@dataclass(slots=True)
class Watched:
    """A process of an engine. name: as errors tell it. silent_s: time without a beat."""

    name: str
    page: Page
    slot: int
    sign: Sign = Sign(0, 0, Activity.START, 0, 0)
    silent_s: float = 0.0

    @property
    def is_there(self) -> bool:
        return self.sign.pid != 0

    @property
    def is_well(self) -> bool:
        return self.is_there and not self.is_silent and _exists(self.sign.pid)

    @property
    def is_silent(self) -> bool:
        is_long = self.sign.activity in _LONG
        return self.silent_s > (_START_NOTICE_SECONDS if is_long else _NOTICE_SECONDS)

    def is_dead(self, dead_after_s: float) -> bool:
        is_long = self.sign.activity in _LONG
        return self.silent_s > (max(dead_after_s, _START_DEAD_SECONDS) if is_long else dead_after_s)

    def told(self, what: str, seconds: float) -> str:
        since = datetime.now() - timedelta(seconds=seconds)
        doing = _DOING[self.sign.activity].format(steps=self.sign.steps)
        return (
            f"{self.name} (pid {self.sign.pid}) {what} since {since:%H:%M:%S} ({seconds:.0f} s), "
            f"{doing}{_STATES.get(_state(self.sign.pid), '')}"
        )


@dataclass(slots=True)
class Watch:
    """Processes that wait for each other: those of one engine, or of engines in lock-step.

    is_gpu: whether steps run on GPUs, where waiting for one uses CPU time. sees_ranks: whether the
    ranks are among `processes`; those of other machines are not, so that nothing is known of steps.
    """

    processes: list[Watched]
    sees_ranks: bool = True
    is_gpu: bool = False
    stuck_s: float = 0.0
    _longest_s: float = field(default=0.0, init=False)

    def tick(self, seconds: float) -> None:
        """Reads all signs. seconds: since the call before."""
        seconds = min(seconds, _MAX_TICK_SECONDS)
        moved = False
        for process in self.processes:
            before = process.sign
            process.sign = sign = process.page.read(process.slot)
            beats = sign.pid != 0 and sign.beats == before.beats and sign.pid == before.pid
            process.silent_s = process.silent_s + seconds if beats else 0.0
            cpu_seconds = (sign.cpu_ms - before.cpu_ms) / 1000
            works = not self.is_gpu and cpu_seconds > _WORKING_SHARE * seconds
            moved |= sign.steps != before.steps or sign.activity != before.activity or works
        if moved or not self.is_stepping:
            self._longest_s = max(self._longest_s, self.stuck_s)
            self.stuck_s = 0.0
        elif not any(process.is_silent for process in self.processes):  # they would explain it
            self.stuck_s += seconds

    @property
    def is_stepping(self) -> bool:
        """Whether progress is due: a step is in progress and nothing that may take long."""
        activities = {process.sign.activity for process in self.processes if process.is_there}
        return self.sees_ranks and Activity.STEP in activities and activities.isdisjoint(_LONG)

    @property
    def step_bound_s(self) -> float:
        """The longest that a step takes without any sign of progress."""
        if not self.is_gpu:
            return 0.0
        return max(_MIN_STEP_BOUND_SECONDS, _STEP_BOUND_FACTOR * self._longest_s)

    def troubles(self) -> dict[str, str]:
        """By name, the processes that are stopped or stuck, with what is known of them."""
        silent = [p for p in self.processes if p.is_silent and _exists(p.sign.pid)]
        if silent:  # all others may wait for these
            return {p.name: p.told("gives no sign of life", p.silent_s) for p in silent}
        if self.stuck_s <= self.step_bound_s + _NOTICE_SECONDS:
            return {}
        in_step = [p for p in self.processes if p.sign.activity == Activity.STEP and p.is_well]
        ranks = [p for p in in_step if p.slot > 0]  # the engine itself waits for its ranks
        return {p.name: p.told("makes no progress", self.stuck_s) for p in ranks or in_step}

    def is_dead(self, dead_after_s: float) -> bool:
        """Whether one of `troubles` has lasted too long."""
        is_stuck = self.stuck_s > self.step_bound_s + dead_after_s
        return is_stuck or any(p.is_dead(dead_after_s) for p in self.processes)

    @property
    def silent_s(self) -> dict[str, float]:
        """Seconds since the last beat, by name."""
        return {process.name: process.silent_s for process in self.processes if process.is_there}


def _state(pid: int) -> str:
    """One letter, as in `ps`; "" where it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    """Not for one that has ended, which is noticed elsewhere with its exit code."""
    if Path("/proc/self/stat").exists():
        return _state(pid) not in ("", "Z", "X")
    return True
