"""From microseconds to a choice: which backend for which numbers of tokens, and what that costs.

Pure functions of `Timings`, standard library only.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
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
        facts = _Facts(
            [name for name, limit in able if limit is None],
            dict(layouts),
            {} if self.error else dict(roundings),
            _noise(self, here),
        )
        times = _times(self, able, here, compiling, facts)
        if not times:
            return ()
        runs = _sparing(_Case(times, facts, _best(times)), compiling).runs
        tokens = self.tokens[here]
        parts = [(tokens[end], name) for name, end in runs]
        return (*parts[:-1], (None, parts[-1][1])) if parts else ()


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


_Times = Mapping[str, Sequence[float]]
"""By backend microseconds of each column, inf for none."""


class _Facts(NamedTuple):
    """Of backends. last: those that take any number of tokens. layouts: of the weight, of those
    that do not take the stored one alone. noise: by column; {} where it is not known or times are
    not measured here."""

    last: Sequence[str]
    layouts: Mapping[str, tuple[str, ...]]
    roundings: Mapping[str, int]
    noise: Mapping[str, Sequence[float]]


def _times(
    timings: Evidence, able: Able, here: slice, compiling: Collection[str], facts: _Facts
) -> _Times:
    """Of times that are not measured here, all are as long as they may be but those of the first
    backend that takes any number of tokens.

    Without backends that everywhere count as slower than the first that takes any number and is
    never left out: no path needs them.
    """
    known, tokens, errors = dict(timings.us), timings.tokens[here], dict(timings.error)
    found: dict[str, Sequence[float]] = {}
    leading, most = "", list[float]()
    for name, limit in able:
        us: Any = known.get(name, ())[here]
        if limit is None:
            if not leading:
                leading = name
                errors.pop(name, None)
        elif us:
            num = bisect_right(tokens, limit)
            us = us[:num] + (inf,) * (len(us) - num)
        if not us:
            continue
        if not all(us):
            us = [inf if time is None else time for time in us]
        if name in facts.layouts:  # it may have another weight
            pass
        elif most:
            if all(map(gt, us, most)):
                continue
        elif limit is None and name not in compiling and not timings.noise:
            longest = 1 + max(errors.get(name, (0.0,)))
            most = [time * longest * TOLERANCE for time in us]
        if name in errors:
            us = [*map(mul, us, _factors(errors[name])[here])]
        found[name] = us
    return found


@lru_cache(maxsize=512)
def _factors(errors: tuple[float, ...]) -> tuple[float, ...]:
    """What makes times as long as they may be; the errors of a kernel are those of all sizes."""
    return tuple(1 + error for error in errors)


def _noise(timings: Evidence, here: slice) -> dict[str, list[float]]:
    """As of `_Facts`."""
    if timings.error or not timings.noise:
        return {}
    none = (0.0,) * len(timings.tokens)
    known = dict(timings.noise)
    return {name: [part or 0.0 for part in known.get(name, none)[here]] for name, _ in timings.us}


_Runs = list[tuple[str, int]]
"""What serves: (backend, the last column of its range), ascending."""


class _Case:
    """Backends that may serve. best: of each column the least time, inf for none.

    costs: by backend and column its time over the least, 1 for what counts as fast, nan where none
    has a time. runs: as of `_runs`.
    """

    def __init__(
        self,
        times: _Times,
        facts: _Facts,
        best: list[float],
        costs: dict[str, list[float]] | None = None,
        runs: _Runs | None = None,
    ):
        self.times, self.facts, self.best, self._runs = times, facts, best, runs
        self.costs = costs or _costs(times, facts.noise, best)

    @property
    def runs(self) -> _Runs:
        if self._runs is None:
            self._runs = _runs(self.costs, self.times, self.facts, self.best)
        return self._runs


def _sparing(case: _Case, compiling: Iterable[str]) -> _Case:
    """Without each of the backends that compile, the dearest first, where it hardly saves anything
    of what is fastest with all of `case`."""
    facts, fastest = case.facts, case.best
    for name in compiling:
        if name not in case.times:
            continue
        times = {**case.times}
        del times[name]
        if 1.0 in case.costs[name]:
            best = _best(times)
            if not _is_near(_ratios(best, fastest), _COSTS_OF_LEAVING_OUT):
                continue
            fewer = _Case(times, facts, best)
        else:  # then costs of others do not depend on it
            used = {backend for backend, _ in case.runs}
            fewer = _Case(times, facts, case.best, case.costs, None if name in used else case.runs)
        us: list[float] = []
        for backend, end in fewer.runs:
            us += times[backend][len(us) : end + 1]
        counts = [facts.roundings.get(backend, 0) for backend, _ in fewer.runs]
        spares = facts.roundings.get(name, 0) < min(counts, default=0)
        mean_and_worst = (TOLERANCE - 1,) * 2 if spares else _COSTS_OF_LEAVING_OUT
        if us and _is_near(_ratios(us, fastest), mean_and_worst):
            case = fewer
    return case


def _runs(
    costs: Mapping[str, list[float]], names: Iterable[str], facts: _Facts, best: Sequence[float]
) -> _Runs:
    """The cheapest of at most MAX_PARTS ranges, whose backends share a layout; [] for none. No
    range ends at a column in which none has a time."""
    served = [place for place, us in enumerate(best) if us < inf] if inf in best else ()
    if served == []:
        return []
    least, found = inf, list[tuple[str, int]]()
    for group in _by_layout(names, facts.layouts):
        own, common = [*map(costs.__getitem__, group)], 1.0
        if served:
            own = [[column[place] for place in served] for column in own]
        if facts.roundings:
            own, common = rounded(own, [facts.roundings.get(name, 0) for name in group])
        ends = [*map(facts.last.__contains__, group)]
        cost, runs = cheapest_path(own, ends, least / common)
        if runs:
            least, found = cost * common, [(group[row], end) for row, end in runs]
    return [(name, served[end]) for name, end in found] if served else found


def _by_layout(names: Iterable[str], layouts: Mapping[str, tuple[str, ...]]) -> Iterable[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        for layout in layouts.get(name, _STORED):
            groups.setdefault(layout, []).append(name)
    return groups.values()


_STORED = (STORED,)


def _best(times: _Times) -> list[float]:
    return [*map(min, zip(*times.values()))]


def _costs(
    times: _Times, noise: Mapping[str, Sequence[float]], best: Sequence[float]
) -> dict[str, list[float]]:
    """As of a `_Case`."""
    most = TOLERANCE
    if not noise:
        return {
            name: [1.0 if ratio <= most else ratio for ratio in map(truediv, us, best)]
            for name, us in times.items()
        }
    columns, own = zip(*times.values()), zip(*[noise[name] for name in times])
    doubt = [1 + each[us.index(low)] for us, each, low in zip(columns, own, best)]
    found = {}
    for name, us in times.items():
        limits = map(max, repeat(TOLERANCE), map(add, doubt, noise[name]))
        ratios = map(truediv, us, best)
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
