"""From microseconds to a choice: which backend for which numbers of tokens, and what that costs.

Pure functions of `Timings`, standard library only.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import exp, inf, log
from operator import eq
from typing import Any, NamedTuple

from vllm.kernels.evidence.steps import is_telling
from vllm.kernels.select.decision import Able, Evidence, Layouts, Parts, Roundings, serving
from vllm.kernels.select.spec import STORED
from vllm.utils.dataclasses import dataclass

MAX_PARTS = 5
# A backend this close to the fastest counts as fast, and so does one that the noise of both times
# leaves in doubt: nothing is split, and nothing replaces what comes earlier in order, for noise.
TOLERANCE = 1.03
# How far beyond its largest measured token count a row may decide: one that was measured for
# decoding alone, or cut short, says nothing about prompts.
REACH = 32
# What a further part must save, as a sum of log(us / fastest us) over the measured token counts.
PART_COST = 0.045
# What each token count costs for each rounding of the kernel that serves it: so little that it
# decides between equals alone.
ROUNDING_COST = 1e-6
# Kernels that compile when the engine starts are left out as long as that costs no more than this
# over the measured token counts: seconds of every cold start are not spent for a few percent.
MEAN_COST_OF_LEAVING_OUT, WORST_COST_OF_LEAVING_OUT = 0.03, 0.10
# What was chosen before a user measured stays unless the new choice saves more than this: in the
# geometric mean over all tokens or over a range that another kernel serves then, and at worst. One
# time of a kernel differs by 1.4 % from run to run on an H100 (standard deviation; the noise within
# a run is less), the ratio of two by 2 %. For another kernel that compiles no mean over its range
# counts: such kernels are left out for as much.
STAYS_WITHIN, STAYS_WITHIN_AT_WORST = 0.045, 0.15
_COSTS_OF_LEAVING_OUT = MEAN_COST_OF_LEAVING_OUT, WORST_COST_OF_LEAVING_OUT


class Timings(Evidence):
    """Measurements that choose."""

    __slots__ = ()

    def best_split(
        self,
        able: Able,
        m_range: tuple[int, int],
        compiling: tuple[str, ...] = (),
        layouts: Layouts = (),
        roundings: Roundings = (),
    ) -> Parts:
        """As `fastest_split`, or what `before` chooses where that takes hardly longer."""
        parts = self.fastest_split(able, m_range, compiling, layouts, roundings)
        if not isinstance(self.before, Timings) or not parts:
            return parts
        kept = self.before.fastest_split(able, m_range, compiling, layouts, roundings)
        return kept if kept and _stays(self, kept, parts, m_range, compiling) else parts

    def fastest_split(
        self,
        able: Able,
        m_range: tuple[int, int],
        compiling: tuple[str, ...] = (),
        layouts: Layouts = (),
        roundings: Roundings = (),
    ) -> Parts:
        """At most MAX_PARTS ranges of M with the least regret; () where too little was measured.

        Limits are measured token counts, which are sizes of captured graphs. Among equals the
        fewest parts win, then the fewest roundings, then the earlier in `able`. The last range has
        no limit, so its backend takes any number of tokens. compiling: backends that compile at run
        time, the dearest first: each is left out where that costs little (MEAN_COST_OF_LEAVING_OUT,
        WORST_COST_OF_LEAVING_OUT). layouts: of the weight, where a backend does not take the stored
        one alone: parts share one layout, since two would hold the weight twice. roundings: by
        backend how often it rounds activations and the weight; one that compiles is left out for
        others that all round more only where it is no faster (TOLERANCE). Where times are not
        measured here, the first of the default order yields only to a kernel whose gain exceeds the
        error. Of attention one backend serves all steps (`_best_for_all`).
        """
        if self.steps:
            return _best_for_all(self, able)
        if not self.tokens or self.tokens[-1] * REACH < m_range[1]:
            return ()
        counts = () if self.error else roundings
        case = _Case.of(self, able, _columns(self, m_range), layouts, counts)
        path = case.cheapest()
        for name in compiling:
            if name not in case.rows:
                continue
            fewer = case.without(name)
            if not _is_near(fewer.best, case.fastest, _COSTS_OF_LEAVING_OUT):
                continue
            others = fewer.cheapest() if case.depends_on(name, path) else path
            if others and fewer.can_spare(case.rows[name], others):
                case, path = fewer, others
        return _parts(path, case.tokens)


def _stays(
    timings: Timings,
    kept: Parts,
    parts: Parts,
    m_range: tuple[int, int],
    compiling: Collection[str],
) -> bool:
    """Whether `kept` was timed wherever `parts` was, and `parts` saves no more than `STAYS_WITHIN`
    and `STAYS_WITHIN_AT_WORST`."""
    us = dict(timings.us)
    used = {backend for _, backend in kept}
    ranges: list[tuple[tuple[str, str], list[float]]] = []
    for i in _columns(timings, m_range):
        pair = serving(parts, timings.tokens[i]), serving(kept, timings.tokens[i])
        new, old = (us[name][i] if name in us else None for name in pair)
        if new is None or old is None:
            if new is not None:
                return False
            continue
        if not ranges or ranges[-1][0] != pair:
            ranges.append((pair, []))
        ranges[-1][1].append(log(old / new))
    gains = [gain for _, own in ranges for gain in own]
    if not gains or max(gains) > log(1 + STAYS_WITHIN_AT_WORST):
        return False
    compiled = {name for name in compiling if name not in used}
    means = [_mean(own) for (new, _), own in ranges if new not in compiled]
    return max([_mean(gains), *means]) <= log(1 + STAYS_WITHIN)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _best_for_all(timings: Timings, able: Able) -> Parts:
    """The first in `able` whose geometric mean of times over the steps that all were timed for is
    no more than TOLERANCE, or the mean noise of both, over the lowest; () where these steps have no
    decode or no prompt."""
    us, noise = dict(timings.us), dict(timings.noise)
    names = [backend for backend, _ in able if backend in us]
    shared = [i for i in range(len(timings.steps)) if None not in [us[name][i] for name in names]]
    if not names or not is_telling(timings.steps[i] for i in shared):
        return ()

    def mean(name: str) -> float:
        return exp(sum(log(us[name][i] or 1.0) for i in shared) / len(shared))

    def mean_noise(name: str) -> float:
        return sum(noise[name][i] or 0.0 for i in shared) / len(shared) if name in noise else 0.0

    means = {name: mean(name) for name in names}
    fastest = min(names, key=means.__getitem__)
    in_doubt = 1 + mean_noise(fastest)
    return next(
        ((None, name),)
        for name in names
        if means[name] <= means[fastest] * max(TOLERANCE, in_doubt + mean_noise(name))
    )


class _Row(NamedTuple):
    """One backend: microseconds of each column, inf for none, and their relative noise, [] for
    none. may_be_last: it takes any number of tokens. layouts: of the weight, that it takes."""

    us: list[float]
    noise: list[float]
    may_be_last: bool
    roundings: int
    layouts: tuple[str, ...]


class _Case(NamedTuple):
    """rows: by backend. tokens: of the columns. best: in each, of the rows. fastest: the same of
    all that could run at first.

    A path has by column the backend that serves it, "" where none has a time.
    """

    rows: dict[str, _Row]
    tokens: tuple[int, ...]
    best: list[float]
    fastest: list[float]

    @classmethod
    def of(
        cls, timings: Evidence, able: Able, columns: range, layouts: Layouts, roundings: Roundings
    ) -> "_Case":
        """Of times that are not measured here, all are as long as they may be but those of the
        first backend that takes any number of tokens."""
        known, errors = dict(timings.us), dict(timings.error)
        noise = {} if errors else dict(timings.noise)
        errors.pop(next((name for name, limit in able if limit is None), ""), None)
        here = slice(columns.start, columns.stop)
        tokens, taken, counts = timings.tokens[here], dict(layouts), dict(roundings)
        rows = {}
        for name, limit in able:
            if name not in known:
                continue
            us: list[Any] = list(known[name][here])
            if limit is not None or None in us:
                us = [_time(t, m, limit) for t, m in zip(us, tokens)]
            if name in errors:
                us = [t * (1 + error) for t, error in zip(us, errors[name][here])]
            doubt = [part or 0.0 for part in noise.get(name, ())[here]]
            own = taken.get(name, (STORED,))
            rows[name] = _Row(us, doubt, limit is None, counts.get(name, 0), own)
        best = _best(rows)
        return cls(rows, tokens, best, best)

    def without(self, name: str) -> "_Case":
        rows = {other: row for other, row in self.rows.items() if other != name}
        return self._replace(rows=rows, best=_best(rows))

    def depends_on(self, name: str, path: Sequence[str]) -> bool:
        """Whether it may be another without that backend, whose times and roundings those of
        others are compared with."""
        is_compared = any(row.roundings for row in self.rows.values())
        return is_compared or name in path or any(map(eq, self.rows[name].us, self.best))

    def can_spare(self, compiled: _Row, path: Sequence[str]) -> bool:
        """Whether the path takes hardly longer than one could with a backend that compiles."""
        rows = [self.rows[name] for name in path if name]
        spares = all(compiled.roundings < row.roundings for row in rows)
        mean_and_worst = (TOLERANCE - 1,) * 2 if spares else _COSTS_OF_LEAVING_OUT
        us = [self.rows[name].us[i] if name else inf for i, name in enumerate(path)]
        return _is_near(us, self.fastest, mean_and_worst)

    def cheapest(self) -> list[str]:
        """At most MAX_PARTS ranges, whose backends share a layout; [] where there are none."""
        if min(self.best, default=inf) == inf:
            return []
        costs, least, found = self._costs(), inf, list[str]()
        for names in self._by_layout():
            own, common = [costs[name] for name in names], 0.0
            if any(counts := [self.rows[name].roundings for name in names]):
                own, common = _rounded(own, counts)
            ends = [self.rows[name].may_be_last for name in names]
            cost, path = _cheapest_path(own, ends, least - common)
            if path:
                least, found = cost + common, [names[row] for row in path]
        served = iter(found)
        return [next(served) if us < inf else "" for us in self.best] if found else []

    def _costs(self) -> dict[str, list[float]]:
        """In the columns that some row has a time for: none for the fastest and what is as fast."""
        best, rows = self.best, self.rows
        fast = [us * TOLERANCE for us in best]
        if not any(row.noise for row in rows.values()):
            return {name: _cost(row.us, fast, best) for name, row in rows.items()}
        noise = [row.noise or [0.0] * len(best) for row in rows.values()]
        times = zip(*[row.us for row in rows.values()])
        doubt = [1 + own[us.index(low)] for us, own, low in zip(times, zip(*noise), best)]
        found = {}
        for (name, row), own in zip(rows.items(), noise):
            fast = [low * max(TOLERANCE, one + two) for low, one, two in zip(best, doubt, own)]
            found[name] = _cost(row.us, fast, best)
        return found

    def _by_layout(self) -> Iterable[list[str]]:
        groups: dict[str, list[str]] = {}
        for name, row in self.rows.items():
            for layout in row.layouts:
                groups.setdefault(layout, []).append(name)
        return groups.values()


def _best(rows: Mapping[str, _Row]) -> list[float]:
    return [min(us) for us in zip(*[row.us for row in rows.values()])]


def _is_near(
    us: Sequence[float], fastest: Sequence[float], mean_and_worst: tuple[float, float]
) -> bool:
    """Whether times are no more than so much longer, as ratios less one; inf does not count."""
    mean, worst = mean_and_worst
    ratios = [own / least for own, least in zip(us, fastest) if own < inf]
    longest = max(ratios, default=inf) - 1
    return longest <= worst and (longest <= mean or exp(_mean([*map(log, ratios)])) - 1 <= mean)


def _cost(us: Sequence[float], fast: Sequence[float], best: Sequence[float]) -> list[float]:
    return [
        0.0 if own <= most else log(own / low)
        for own, most, low in zip(us, fast, best)
        if low < inf
    ]


def _rounded(
    costs: Sequence[list[float]], counts: Sequence[int]
) -> tuple[list[list[float]], float]:
    """With what each backend rounds more than that which rounds least of those that are fast
    somewhere, and what all round: where all round alike, nothing is added."""
    least = min((count for own, count in zip(costs, counts) if 0.0 in own), default=0)
    more = [max(0, count - least) * ROUNDING_COST for count in counts]
    rounded = [[cost + extra for cost in own] for own, extra in zip(costs, more)]
    return rounded, least * len(costs[0]) * ROUNDING_COST


def _cheapest_path(
    costs: Sequence[Sequence[float]], may_be_last: Sequence[bool], most: float
) -> tuple[float, list[int]]:
    """Its cost, and by column the row to take: at most MAX_PARTS runs of one row, PART_COST for
    each further run. No rows where there is none that costs less than `most`.

    Viterbi's algorithm over rows, for one run more at a time until no further one can pay; of equal
    costs the earlier row stays.
    """
    least = sum(map(min, zip(*costs)))
    totals = {row: [*accumulate(own)] for row, own in enumerate(costs)}
    steps, lowest = list[dict[int, list[float]]](), list[list[float]]()  # by further runs
    end, run = 0, -1
    while least + len(steps) * PART_COST < most and len(steps) < MAX_PARTS:
        if steps:
            lowest.append([*map(min, zip(*totals.values()))])
            left = most - len(steps) * PART_COST
            totals = {j: _entered(costs[j], lowest[-1]) for j in totals if min(costs[j]) < left}
        for row, total in totals.items():
            if total[-1] < most and may_be_last[row]:
                most, end, run = total[-1], row, len(steps)
        steps.append(totals)
    return (most, _traced(steps, lowest, end, run)) if run >= 0 else (inf, [])


def _entered(costs: Sequence[float], lowest: Sequence[float]) -> list[float]:
    """Totals of a row by column, entered where that is cheapest; lowest: totals of one run less."""
    total = inf
    found = [total]
    for cost, before in zip(costs[1:], lowest):
        switched = before + PART_COST
        total = (switched if switched < total else total) + cost
        found.append(total)
    return found


def _traced(
    steps: Sequence[Mapping[int, Sequence[float]]],
    lowest: Sequence[Sequence[float]],
    row: int,
    run: int,
) -> list[int]:
    """The rows by which the total of `row` came about in the last column."""
    path = [row]
    for i in range(len(steps[run][row]) - 2, -1, -1):
        if run and lowest[run - 1][i] + PART_COST < steps[run][row][i]:
            run -= 1
            row = next(j for j, total in steps[run].items() if total[i] == lowest[run][i])
        path.append(row)
    return path[::-1]


def _columns(timings: Evidence, m_range: tuple[int, int]) -> range:
    """Of token counts that calls of `m_range` run with: padded up to the first that holds them; all
    steps of attention."""
    tokens, (low, high) = timings.tokens, m_range
    if timings.steps or not tokens:
        return range(len(tokens))
    last = min(bisect_left(tokens, high), len(tokens) - 1)
    return range(min(bisect_left(tokens, low), last), last + 1)


def _time(us: float | None, num_tokens: int, limit: int | None) -> float:
    return inf if us is None or (limit is not None and num_tokens > limit) else us


def _parts(path: Sequence[str], tokens: Sequence[int]) -> Parts:
    parts: list[tuple[int | None, str]] = []
    for backend, num_tokens in zip(path, tokens):
        if not backend:
            continue
        if parts and parts[-1][1] == backend:
            parts.pop()
        parts.append((num_tokens, backend))
    return (*parts[:-1], (None, parts[-1][1])) if parts else ()


# ---------------------------------------------------------------- what a choice costs


@dataclass(frozen=True)
class Expected:
    """us: (tokens or step, microseconds of the choice). regret: how much longer it takes than the
    fastest that was measured and can run here, as a ratio minus 1: geometric mean, worst, and the
    worst's tokens or step and fastest backend."""

    us: tuple[tuple[int | str, float], ...]
    mean_regret: float
    worst_regret: float
    worst_tokens: int | str
    fastest_there: str


def expected(
    timings: Evidence, parts: Parts, able: Collection[str], m_range: tuple[int, int]
) -> Expected | None:
    """What the choice `parts` takes; None where nothing of it was measured. able: backends that
    could have been chosen; those of `parts` always count."""
    us = dict(timings.us)
    rivals = [name for name in us if name in able or any(name == b for _, b in parts)]
    own, regrets = [], []
    for i in _columns(timings, m_range):
        num_tokens = timings.tokens[i]
        chosen = serving(parts, num_tokens)
        time = us[chosen][i] if chosen in us else None
        if time is None:
            continue
        fastest = min(rivals, key=lambda name: _time(us[name][i], num_tokens, None))
        best = us[fastest][i]
        assert best is not None
        own.append((timings.columns[i], time))
        regrets.append((time / best - 1, timings.columns[i], fastest))
    if not own:
        return None
    worst = max(regrets, key=lambda regret: regret[0])
    mean = exp(sum(log(1 + regret) for regret, _, _ in regrets) / len(regrets)) - 1
    return Expected(tuple(own), mean, *worst)
