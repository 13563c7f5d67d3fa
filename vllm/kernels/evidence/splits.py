"""From microseconds to a choice: which backend for which numbers of tokens, and what that costs.

Pure functions of `Timings`, standard library only.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import compress, repeat
from math import exp, inf, log
from operator import add, gt, mul, truediv
from typing import Any, NamedTuple

from vllm.kernels.evidence.cheapest_path import cheapest_path, rounded
from vllm.kernels.evidence.steps import is_telling
from vllm.kernels.select.decision import Able, Evidence, Layouts, Parts, Roundings, serving
from vllm.kernels.select.spec import STORED
from vllm.utils.dataclasses import dataclass

# A backend this close to the fastest counts as fast, and so does one that the noise of both times
# leaves in doubt: nothing is split, and nothing replaces what comes earlier in order, for noise.
TOLERANCE = 1.03
# How far beyond its largest measured token count a row may decide: one that was measured for
# decoding alone, or cut short, says nothing about prompts.
REACH = 32
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
        columns = _columns(self, m_range)
        here = slice(columns.start, columns.stop)
        rows = _rows(self, able, here, compiling, layouts, () if self.error else roundings)
        best = _best([row.us for row in rows.values()])
        case = _Case(rows, _noise(self, rows, here), best, best)
        for name in compiling:
            if name in case.rows:
                case = case.sparing(name)
        return _parts(case.path, self.tokens[here])


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
    """One backend: microseconds of each column, inf for none. may_be_last: it takes any number of
    tokens. layouts: of the weight, that it takes."""

    us: Sequence[float]
    may_be_last: bool
    roundings: int
    layouts: tuple[str, ...]


def _rows(
    timings: Evidence,
    able: Able,
    here: slice,
    compiling: Collection[str],
    layouts: Layouts,
    roundings: Roundings,
) -> dict[str, _Row]:
    """By backend. Of times that are not measured here, all are as long as they may be but those of
    the first backend that takes any number of tokens."""
    times, errors = _times(timings, able, here), dict(timings.error)
    taken, counts = dict(layouts), dict(roundings)
    last = [name for name, limit in able if limit is None]
    if errors and last:
        errors.pop(last[0], None)
    first = next((name for name in last if name in times and name not in compiling), "")
    if first and first not in taken and not timings.noise:
        times = _not_slower(times, first, max(errors.get(first, (0.0,))), taken)
    rows = {}
    for name, us in times.items():
        if name in errors:
            us = [*map(mul, us, _factors(errors[name])[here])]
        rows[name] = _Row(us, name in last, counts.get(name, 0), taken.get(name, _STORED))
    return rows


_STORED = (STORED,)


def _times(timings: Evidence, able: Able, here: slice) -> dict[str, Sequence[float]]:
    """By backend, of each column; inf for none."""
    known, tokens = dict(timings.us), timings.tokens[here]
    found = {}
    for name, limit in able:
        us: Any = known.get(name, ())[here]
        if limit is not None and us:
            num = bisect_right(tokens, limit)
            us = us[:num] + (inf,) * (len(us) - num)
        if us:
            found[name] = [inf if t is None else t for t in us] if None in us else us
    return found


def _not_slower(
    times: dict[str, Sequence[float]], first: str, error: float, others: Collection[str]
) -> dict[str, Sequence[float]]:
    """Without backends that everywhere count as slower than `first`, which is never left out: no
    path needs them. error: of its times. others: backends that may have another weight."""
    most = [us * (1 + error) * TOLERANCE for us in times[first]]
    slower = [name for name, us in times.items() if all(map(gt, us, most)) and name not in others]
    return {name: us for name, us in times.items() if name not in slower} if slower else times


@lru_cache(maxsize=512)
def _factors(errors: tuple[float, ...]) -> tuple[float, ...]:
    """What makes times as long as they may be; the errors of a kernel are those of all sizes."""
    return tuple(1 + error for error in errors)


def _noise(timings: Evidence, rows: Mapping[str, _Row], here: slice) -> dict[str, list[float]]:
    """By backend and column; {} where it is not known or not measured here."""
    if timings.error or not timings.noise:
        return {}
    known = dict(timings.noise)
    none = (0.0,) * len(timings.tokens)
    return {name: [part or 0.0 for part in known.get(name, none)[here]] for name in rows}


class _Case:
    """The backends that may serve. noise: as of `_noise`. best: of each column the least time, inf
    for none. fastest: the same of all that could run at first. costs: as of `_costs`.

    A path has by column the backend that serves it, "" where none has a time.
    """

    def __init__(
        self,
        rows: Mapping[str, _Row],
        noise: Mapping[str, list[float]],
        best: list[float],
        fastest: list[float],
        costs: dict[str, list[float]] | None = None,
    ):
        self.rows, self.noise, self.best, self.fastest = rows, noise, best, fastest
        self.costs = costs or _costs(rows, noise, best)

    def sparing(self, name: str) -> "_Case":
        """Without a backend that compiles, where it hardly saves anything; else this one."""
        best, is_fast = self.best, 1.0 in self.costs[name]
        if is_fast:
            best = _best([row.us for other, row in self.rows.items() if other != name])
            if not _is_near(_ratios(best, self.fastest), _COSTS_OF_LEAVING_OUT):
                return self
        rows = {other: row for other, row in self.rows.items() if other != name}
        costs = None if is_fast else self.costs  # of others, which do not depend on it then
        fewer = _Case(rows, self.noise, best, self.fastest, costs)
        if not is_fast and name not in self.path:
            fewer.path, fewer.ratios = self.path, self.ratios
        counts = [rows[other].roundings for other in {*fewer.path} if other]
        spares = self.rows[name].roundings < min(counts, default=0)
        mean_and_worst = (TOLERANCE - 1,) * 2 if spares else _COSTS_OF_LEAVING_OUT
        return fewer if fewer.path and _is_near(fewer.ratios, mean_and_worst) else self

    @cached_property
    def ratios(self) -> list[float]:
        """Times of the path over the fastest."""
        us = [self.rows[name].us[i] if name else inf for i, name in enumerate(self.path)]
        return _ratios(us, self.fastest)

    @cached_property
    def path(self) -> list[str]:
        """The cheapest of at most MAX_PARTS ranges, whose backends share a layout; [] for none."""
        if min(self.best, default=inf) == inf:
            return []
        served = [us < inf for us in self.best] if inf in self.best else ()
        least, found = inf, list[str]()
        for names in self._by_layout():
            rows, own, common = [self.rows[n] for n in names], [self.costs[n] for n in names], 1.0
            if served:
                own = [[*compress(costs, served)] for costs in own]
            if any(counts := [row.roundings for row in rows]):
                own, common = rounded(own, counts)
            ends = [row.may_be_last for row in rows]
            cost, path = cheapest_path(own, ends, least / common)
            if path:
                least, found = cost * common, [names[row] for row in path]
        if not served or not found:
            return found
        rest = iter(found)
        return [next(rest) if is_served else "" for is_served in served]

    def _by_layout(self) -> Iterable[list[str]]:
        groups: dict[str, list[str]] = {}
        for name, row in self.rows.items():
            for layout in row.layouts:
                groups.setdefault(layout, []).append(name)
        return groups.values()


def _best(times: Sequence[Sequence[float]]) -> list[float]:
    return [*map(min, zip(*times))]


def _costs(
    rows: Mapping[str, _Row], noise: Mapping[str, list[float]], best: Sequence[float]
) -> dict[str, list[float]]:
    """By backend and column its time over the least: 1 for what counts as fast, nan where none has
    a time."""
    if not noise:
        return {
            name: [1.0 if ratio <= TOLERANCE else ratio for ratio in map(truediv, row.us, best)]
            for name, row in rows.items()
        }
    times, own = zip(*[row.us for row in rows.values()]), zip(*[noise[name] for name in rows])
    doubt = [1 + each[us.index(low)] for us, each, low in zip(times, own, best)]
    found = {}
    for name, row in rows.items():
        limits = map(max, repeat(TOLERANCE), map(add, doubt, noise[name]))
        ratios = map(truediv, row.us, best)
        found[name] = [1.0 if ratio <= most else ratio for ratio, most in zip(ratios, limits)]
    return found


def _ratios(us: Sequence[float], fastest: Sequence[float]) -> list[float]:
    """In the columns that have a time."""
    ratios = [*map(truediv, us, fastest)]
    return [ratio for ratio in ratios if ratio < inf] if inf in us else ratios


def _is_near(ratios: Sequence[float], mean_and_worst: tuple[float, float]) -> bool:
    """Whether they are no more than so much above one."""
    mean, worst = mean_and_worst
    longest = max(ratios, default=inf) - 1
    return longest <= worst and (longest <= mean or exp(_mean([*map(log, ratios)])) - 1 <= mean)


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
    if "" in path:
        tokens, path = zip(*[pair for pair in zip(tokens, path) if pair[1]])
    ends = [(t, name) for t, name, after in zip(tokens, path, path[1:]) if name != after]
    return (*ends, (None, path[-1])) if path else ()


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
