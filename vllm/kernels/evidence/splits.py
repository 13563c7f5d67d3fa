"""From microseconds to a choice: which backend for which numbers of tokens, and what that costs.

Pure functions of `Timings`, standard library only.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import exp, inf, log
from operator import itemgetter

from vllm.kernels.evidence.steps import is_telling
from vllm.kernels.select.decision import Able, Evidence, Layouts, Parts
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
        roundings: tuple[tuple[str, int], ...] = (),
    ) -> Parts:
        """As `fastest_split`, or what `before` chooses where that takes hardly longer."""
        parts = self.fastest_split(able, m_range, compiling, layouts, roundings)
        if not isinstance(self.before, Timings) or not parts:
            return parts
        kept = self.before.fastest_split(able, m_range, compiling, layouts, roundings)
        return kept if kept and _stays(self, kept, parts, m_range, compiling) else parts

    @lru_cache(maxsize=1024)  # noqa: B019 - they are few and small
    def fastest_split(
        self,
        able: Able,
        m_range: tuple[int, int],
        compiling: tuple[str, ...] = (),
        layouts: Layouts = (),
        roundings: tuple[tuple[str, int], ...] = (),
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
        if self.error:
            first = next((backend for backend, limit in able if limit is None), "")
            return _cautious(self, first).fastest_split(able, m_range, compiling, layouts)
        counts = dict(roundings)
        parts = _fastest_split(self, able, m_range, layouts, counts)
        names = [name for name, _ in able]
        left = able
        for name in compiling:
            fewer = tuple(one for one in left if one[0] != name)
            if fewer == left:
                continue
            others = _fastest_split(self, fewer, m_range, layouts, counts)
            spares = all(counts.get(name, 0) < counts.get(other, 0) for _, other in others)
            mean, worst = (TOLERANCE - 1,) * 2 if spares else _COSTS_OF_LEAVING_OUT
            cost = expected(self, others, names, m_range) if others else None
            if cost is not None and cost.mean_regret <= mean and cost.worst_regret <= worst:
                left, parts = fewer, others
        return parts


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
        pair = _serving(parts, timings.tokens[i]), _serving(kept, timings.tokens[i])
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


def _serving(parts: Parts, num_tokens: int) -> str:
    return next(name for limit, name in parts if limit is None or num_tokens <= limit)


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


def _cautious(timings: Timings, first: str) -> Timings:
    """With the times of all but `first` as long as they may be."""
    errors = dict(timings.error)
    us = tuple(
        (name, times)
        if name == first
        else (name, tuple(t and t * (1 + e) for t, e in zip(times, errors[name])))
        for name, times in timings.us
    )
    return Timings(timings.source, timings.tokens, us, timings.stale, timings.grade)


def _fastest_split(
    timings: Evidence,
    able: Able,
    m_range: tuple[int, int],
    layouts: Layouts,
    roundings: Mapping[str, int],
) -> Parts:
    if not timings.tokens or timings.tokens[-1] * REACH < m_range[1]:
        return ()
    us = dict(timings.us)
    limits = [(backend, limit) for backend, limit in able if backend in us]
    columns = _columns(timings, m_range)
    rows = [
        [_time(us[backend][i], timings.tokens[i], limit) for i in columns]
        for backend, limit in limits
    ]
    noise = _noise(timings, [backend for backend, _ in limits], columns)
    costs = _costs(rows, noise)
    columns = [i for i, best in zip(columns, map(min, zip(*rows))) if best < inf]
    if not columns:
        return ()
    paths = []
    for group in _groups([backend for backend, _ in limits], layouts):
        counts = [roundings.get(limits[j][0], 0) for j in group]
        # Of those that are fast somewhere: where all round alike, nothing is added.
        least = min((count for j, count in zip(group, counts) if 0.0 in costs[j]), default=0)
        own = [_rounded(costs[j], count - least) for j, count in zip(group, counts)]
        cost, path = _cheapest_path(own, [limits[j][1] is None for j in group])
        cost += least * len(columns) * ROUNDING_COST
        paths.append((cost, tuple(group[j] for j in path)))
    _, choice = min(paths, key=_first)
    return _parts([limits[j][0] for j in choice], [timings.tokens[i] for i in columns])


def _rounded(costs: Sequence[float], more: int) -> Sequence[float]:
    """Of a kernel that rounds `more` times oftener than another that could be beside it."""
    return [cost + more * ROUNDING_COST for cost in costs] if more > 0 else costs


def _groups(backends: Sequence[str], layouts: Layouts) -> list[list[int]]:
    """Places of backends that share a layout of the weight, in order of each group's first."""
    groups: dict[str, list[int]] = {}
    taken = dict(layouts)
    for place, backend in enumerate(backends):
        for layout in taken.get(backend, (STORED,)):
            groups.setdefault(layout, []).append(place)
    return list(groups.values())


def _columns(timings: Evidence, m_range: tuple[int, int]) -> list[int]:
    """Of token counts that calls of `m_range` run with: padded up to the first that holds them; all
    steps of attention."""
    if timings.steps:
        return list(range(len(timings.steps)))
    low, high = m_range
    tokens = timings.tokens
    upper = next((m for m in tokens if m >= high), tokens[-1] if tokens else 0)
    return [i for i, m in enumerate(tokens) if min(low, upper) <= m <= upper]


def _time(us: float | None, num_tokens: int, limit: int | None) -> float:
    return inf if us is None or (limit is not None and num_tokens > limit) else us


def _noise(timings: Evidence, backends: Sequence[str], columns: Sequence[int]) -> list[list[float]]:
    known = dict(timings.noise)
    nothing = (None,) * len(timings.tokens)
    return [[known.get(backend, nothing)[i] or 0.0 for i in columns] for backend in backends]


def _costs(rows: Sequence[Sequence[float]], noise: Sequence[Sequence[float]]) -> list[list[float]]:
    """By row, in the columns that some row has a time for."""
    costs: list[list[float]] = [[] for _ in rows]
    for times, noises in zip(zip(*rows), zip(*noise)):
        best = min(times)
        if best < inf:
            in_doubt = 1 + noises[times.index(best)]
            for own, us, other in zip(costs, times, noises):
                own.append(_cost(us, best, max(TOLERANCE, in_doubt + other)))
    return costs


def _cost(us: float, fastest: float, tolerance: float) -> float:
    return 0.0 if us <= fastest * tolerance else log(us / fastest) if us < inf else inf


def _cheapest_path(costs: Sequence[Sequence[float]], may_be_last: Sequence[bool]) -> "_Path":
    """Its cost, and by column the row to take: at most MAX_PARTS runs of one row, PART_COST for
    each further run. No rows where there is none.

    Viterbi's algorithm over (row, number of runs); of equal costs the earlier row stays.
    """
    num_rows = len(costs)
    # (cost, rows taken so far) by row, for each number of runs
    nowhere: _Path = (inf, ())
    paths: list[list[_Path]] = [[(costs[j][0], (j,)) for j in range(num_rows)]]
    paths += [[nowhere] * num_rows for _ in range(MAX_PARTS - 1)]
    for i in range(1, len(costs[0])):
        entering = [nowhere] + [min(runs, key=_first) for runs in paths[:-1]]
        for runs, (cost, path) in zip(paths, entering):
            switched = cost + PART_COST
            for j in range(num_rows):
                stay, taken = runs[j]
                if switched < stay:
                    stay, taken = switched, path
                runs[j] = (stay + costs[j][i], (*taken, j))
    ends = [
        runs[j] for runs in paths for j in range(num_rows) if may_be_last[j] and runs[j][0] < inf
    ]
    return min(ends, key=_first) if ends else nowhere


_Path = tuple[float, tuple[int, ...]]
_first = itemgetter(0)


def _parts(choice: Sequence[str], tokens: Sequence[int]) -> Parts:
    parts: list[tuple[int | None, str]] = []
    for backend, num_tokens in zip(choice, tokens):
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
        chosen = _serving(parts, num_tokens)
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
