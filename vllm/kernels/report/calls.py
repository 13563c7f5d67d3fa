"""How often kernels were called with how many tokens, and which of these calls a measurement chose.

An engine counts per step and not per layer: what a layer saw follows from its kind and decision.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm.kernels import registry
from vllm.kernels.evidence.tables import NEVER_MEASURED, TOKENS, is_measurable
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.eligibility import problem_reasons
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import LinearProblem, WeightProblem
from vllm.kernels.select.reason import Why
from vllm.kernels.select.spec import KernelSpec
from vllm.utils.dataclasses import replace

Calls = Mapping[str, Mapping[int, int]]
"""By kind of layer (`linear`, `moe`, `lm_head`): steps by the number of tokens, one of TOKENS."""

LM_HEAD = "lm_head"


class Measured(NamedTuple):
    """Steps by number of tokens whose kernel a measurement chose, and those for which none did."""

    hits: dict[int, int]
    misses: dict[int, int]


def measured_size(num_tokens: int) -> int:
    """The one of TOKENS whose time counts for a call with so many: the next larger, or the last."""
    return TOKENS[min(bisect_left(TOKENS, num_tokens), len(TOKENS) - 1)]


class CallCounter:
    """Counts the steps of an engine: of each step three numbers."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[int, int]] = {}

    def add(self, rows: Mapping[str, int]) -> None:
        """A step. rows: by kind, tokens of a call; 0 for no call."""
        for kind, num_tokens in rows.items():
            if num_tokens:
                self._add(kind, measured_size(num_tokens), 1)

    def update(self, counts: Calls) -> None:
        """What another one has counted."""
        for kind, own in counts.items():
            for size, count in own.items():
                self._add(kind, size, count)

    def take(self) -> dict[str, dict[int, int]]:
        """What was counted since the last call."""
        taken, self.counts = self.counts, {}
        return taken

    def _add(self, kind: str, size: int, count: int) -> None:
        own = self.counts.setdefault(kind, {})
        own[size] = own.get(size, 0) + count


def steps_text(calls: Calls) -> str:
    """`815: 800 with M = 1, 15 with 64`, of linear layers"""
    own = sorted(calls.get("linear", {}).items())
    by_size = ", ".join(f"{n:,} with {'M = ' * (i == 0)}{m}" for i, (m, n) in enumerate(own))
    return f"{sum(n for _, n in own):,}" + f": {by_size}" * bool(own)


def kind_of(decision: Decision, layers: Sequence[str]) -> str:
    """Of layers with one decision, a key of `Calls` where it is counted: lm_head computes only rows
    that are sampled."""
    return LM_HEAD if all(name == LM_HEAD for name in layers) else decision.problem.family


def calls_of(decision: Decision, layers: Sequence[str], calls: Calls) -> Mapping[int, int]:
    return calls.get(kind_of(decision, layers), {})


def measured_calls(decision: Decision, layers: Sequence[str], calls: Calls) -> Measured | None:
    """None where no measurement can choose: one kernel alone can run, or is asked for."""
    if not _has_choice(decision):
        return None
    known = _measured_tokens(decision)
    own = sorted(calls_of(decision, layers, calls).items())
    hits = {m: count for m, count in own if m in known}
    return Measured(hits, {m: count for m, count in own if m not in known})


def _has_choice(decision: Decision) -> bool:
    problem = decision.problem
    if not isinstance(problem, WeightProblem) or decision.is_emulated:
        return False
    if decision.chosen is None or not is_measurable(problem):
        return False
    device = decision.device
    left_out = NEVER_MEASURED.get((device.kind, problem.family), ())
    specs = [
        spec
        for spec in registry.specs(problem.family, device.family)
        if not spec.is_emulation and spec.backend not in left_out
    ]
    able = {c.backend for c in decision.candidates if _can_run(c, problem, specs)}
    return len(able) > 1


def _can_run(candidate: Candidate, problem: WeightProblem, specs: Sequence[KernelSpec]) -> bool:
    """Whether it is a kernel of `specs` that can run, if only for few tokens."""
    own = [s for s in specs if s.backend == candidate.backend and problem.format in s.formats]
    if not candidate.reasons or not isinstance(problem, LinearProblem):
        return bool(own) and not candidate.reasons
    few = replace(problem, m_range=(1, 1))
    return all(reason.why is Why.SHAPE for reason in candidate.reasons) and any(
        spec.max_tokens and not problem_reasons(spec, few, candidate.fit) for spec in own
    )


def _measured_tokens(decision: Decision) -> set[int]:
    """Numbers of tokens for which the kernel that serves them was timed here, as it is here."""
    timings = decision.timings
    if timings is None or timings.grade is not Grade.MEASURED:
        return set()
    us, stale = dict(timings.us), {backend for backend, *_ in timings.stale}
    found = set()
    for i, num_tokens in enumerate(timings.tokens):
        backend = decision.backend_for(num_tokens)
        if backend not in stale and backend in us and us[backend][i] is not None:
            found.add(num_tokens)
    return found
