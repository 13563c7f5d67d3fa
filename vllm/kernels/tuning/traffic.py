"""What a running server asks of its kernels, and the order of tuning that follows from it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

from vllm.kernels.evidence.splits import REACH, Expected
from vllm.kernels.report.calls import calls_of, measured_calls
from vllm.kernels.report.layer_groups import by_decision
from vllm.kernels.report.report import Report
from vllm.kernels.report.text_report import expectation_of
from vllm.kernels.select.problem import Measurable, MoEProblem, WeightProblem
from vllm.kernels.step_bytes import weight_bytes
from vllm.kernels.tuning.jobs import Job
from vllm.kernels.tuning.plan import MAIN_TOKENS

"""Problems whose steps are counted by their number of tokens."""
# Where nothing is known of a time: 1 TB/s, and from so many tokens on products take longer than
# reading the weight.
_BYTES_PER_US, _RIDGE = 1e6, 256


@dataclass(frozen=True)
class Traffic:
    """Of a server's layers. layers: problems with numbers of layers. us: by size key and number of
    tokens, microseconds of all calls so far. misses: by size key, numbers of tokens for which no
    measurement chose."""

    layers: Counter[Measurable]
    us: Mapping[str, Mapping[int, float]]
    misses: Mapping[str, frozenset[int]]

    @property
    def tokens(self) -> tuple[int, ...]:
        """What to time: the numbers of tokens that were seen, and those that keep a choice from
        resting on these alone; () where none was seen."""
        seen = {m for own in self.us.values() for m in own}
        return tuple(sorted(seen.union(MAIN_TOKENS))) if seen else ()

    def share(self, size_key: str) -> float:
        """Of the time of all calls that no measurement chose a kernel for, that of this size."""
        total = sum(map(self._missed_us, self.us))
        return self._missed_us(size_key) / total if total else 0.0

    def ordered(self, jobs: Iterable[Job]) -> list[Job]:
        """The size with most time in misses first, then that with most time; each size's misses
        before its other token counts, and longer times first. Where no step was seen, as given."""
        if not self.tokens:
            return list(jobs)
        found = sorted(
            jobs,
            key=lambda job: (
                -self._missed_us(job.problem.size_key),
                -sum(self.us.get(job.problem.size_key, {}).values()),
            ),
        )
        return list(map(self._with_order, found))

    def _missed_us(self, size_key: str) -> float:
        return sum(self.us[size_key][m] for m in self.misses.get(size_key, ()))

    def _with_order(self, job: Job) -> Job:
        if not isinstance(job.problem, WeightProblem):
            return job
        us = self.us.get(job.problem.size_key, {})
        misses = self.misses.get(job.problem.size_key, frozenset())
        tokens = sorted(job.counts, key=lambda m: (m not in misses, -us.get(m, 0.0)))
        return replace(job, tokens=tuple(tokens), first=_deciding(tokens, misses, job.problem))


def _deciding(
    tokens: Sequence[int], misses: frozenset[int], problem: WeightProblem
) -> tuple[int, ...]:
    """The misses, and where no choice could follow from so few tokens the least that allows it."""
    first = [m for m in tokens if m in misses]
    least = problem.m_range[1] / REACH
    if first and max(first) < least:
        first += sorted(m for m in tokens if m >= least)[:1]
    return tuple(first)


def traffic_of(report: Report, is_same_chip: bool) -> Traffic:
    """is_same_chip: of the server and of this machine; on another nothing of the server's counts
    as measured."""
    layers: Counter[Measurable] = Counter()
    us: dict[str, defaultdict[int, float]] = {}
    misses: dict[str, set[int]] = {}
    for decision, names in by_decision(report.records).items():
        problem = decision.problem
        if not isinstance(problem, Measurable) or decision.is_emulated:
            continue
        layers[problem] += len(names)
        calls = report.calls or {}
        found = measured_calls(decision, names, calls)
        if found is None or not isinstance(problem, WeightProblem):
            continue
        own = us.setdefault(problem.size_key, defaultdict(float))
        expected = expectation_of(decision)
        for m, count in calls_of(decision, names, calls).items():
            own[m] += count * len(names) * _us(problem, expected, m)
        missed = found.misses if is_same_chip else {**found.hits, **found.misses}
        misses.setdefault(problem.size_key, set()).update(missed)
    return Traffic(layers, us, {key: frozenset(own) for key, own in misses.items()})


def _us(problem: WeightProblem, expected: Expected | None, num_tokens: int) -> float:
    """Of the kernel that serves: as measured or estimated, else after the nearest number of tokens
    for which it is, else a rough guess."""
    rough = _rough_us(problem, num_tokens)
    known = [(m, us) for m, us in expected.us if isinstance(m, int)] if expected else []
    if not known:
        return rough
    near, us = min(known, key=lambda pair: abs(log(pair[0] / num_tokens)))
    return us * rough / _rough_us(problem, near)


def _rough_us(problem: WeightProblem, num_tokens: int) -> float:
    """Of experts, for the share that some token chooses."""
    share, rows = 1.0, float(num_tokens)
    if isinstance(problem, MoEProblem):
        rows = num_tokens * problem.top_k / problem.num_experts
        share, rows = min(1.0, rows), max(1.0, rows)
    return share * weight_bytes(problem) * (1 + rows / _RIDGE) / _BYTES_PER_US
