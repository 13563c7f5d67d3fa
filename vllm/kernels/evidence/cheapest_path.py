"""The cheapest way through a table: by column the row to take, where a change of row costs too.

A cost is a factor, 1 for what is free: the ratio of a time to the least of its column.
"""

from collections.abc import Sequence
from math import exp, inf, prod
from operator import itemgetter

MAX_PARTS = 5
# What a further part must save, as a sum of log(us / fastest us) over the measured token counts.
PART_COST = 0.045
# What each token count costs for each rounding of the kernel that serves it: so little that it
# decides between equals alone.
ROUNDING_COST = 1e-6

# As factors.
_PART, _ROUNDING = exp(PART_COST), exp(ROUNDING_COST)


def rounded(costs: Sequence[list[float]], counts: Sequence[int]) -> tuple[list[list[float]], float]:
    """With what each backend rounds more than that which rounds least of those that are fast
    somewhere, and what all round: where all round alike, nothing is added."""
    least = min([count for own, count in zip(costs, counts) if 1.0 in own], default=0)
    common = _ROUNDING ** (least * len(costs[0]))
    if max(counts) <= least:
        return [*costs], common
    more = [_ROUNDING ** max(0, count - least) for count in counts]
    return [[cost * extra for cost in own] for own, extra in zip(costs, more)], common


Runs = list[tuple[int, int]]
"""Of a path: the row that it takes, and its last column."""


def cheapest_path(
    costs: Sequence[Sequence[float]], may_be_last: Sequence[bool], most: float
) -> tuple[float, Runs]:
    """The product of its costs, and by column the row to take: at most MAX_PARTS runs of one row,
    with _PART for each further run. No runs where there is none that costs less than `most`."""
    if len(costs) == 1:
        cost = prod(costs[0])
        return (cost, [(0, len(costs[0]) - 1)]) if may_be_last[0] and cost < most else (inf, [])
    columns = [*zip(*costs)]
    if most < inf and prod(map(min, columns)) >= most:
        return inf, []
    cost, runs = _any_runs(columns, may_be_last)
    if len(runs) > MAX_PARTS:
        cost, runs = _few_runs(columns, may_be_last)
    return (cost, runs) if cost < most else (inf, [])


def _any_runs(
    columns: Sequence[Sequence[float]], may_be_last: Sequence[bool]
) -> tuple[float, Runs]:
    """With any number of runs, by Viterbi's algorithm; of equal costs the earlier row stays.

    Where the cheapest row is cheaper by more than a run costs, and stays free, the column is
    passed: it changes nothing but that another row may begin there.
    """
    totals, steps, free, is_passed = columns[0], [], -1, False
    enter = min(totals) * _PART
    for column in columns[1:]:
        steps.append((totals, enter, is_passed))
        is_passed = free >= 0 and column[free] == 1.0
        if is_passed:
            continue
        before, totals, low, second = totals, [], inf, inf
        for stay, cost in zip(before, column):
            total = (enter if enter < stay else stay) * cost
            totals.append(total)
            if total < low:
                low, second = total, low
            elif total < second:
                second = total
        enter = low * _PART
        free = totals.index(low) if second >= enter else -1
    ends = totals
    if is_passed:
        ends = [enter * cost for cost in columns[-1]]
        ends[free] = totals[free]
    cost, row = _cheapest_end(ends, may_be_last)
    place = end = len(steps)
    runs = []
    for totals, enter, is_passed in steps[::-1]:
        place -= 1
        if enter < (enter * columns[place][row] if is_passed else totals[row]):
            runs.append((row, end))
            row, end = totals.index(min(totals)), place
    runs.append((row, end))
    return cost, runs[::-1]


def _few_runs(
    columns: Sequence[Sequence[float]], may_be_last: Sequence[bool]
) -> tuple[float, Runs]:
    """With at most MAX_PARTS: the same, with totals for each number of runs that came before."""
    none = [inf] * len(may_be_last)
    levels, steps = [columns[0], *[none] * (MAX_PARTS - 1)], []
    for column in columns[1:]:
        enters = [inf, *[min(totals) * _PART for totals in levels[:-1]]]
        steps.append((levels, enters))
        levels = [
            [(enter if enter < stay else stay) * cost for stay, cost in zip(totals, column)]
            for totals, enter in zip(levels, enters)
        ]
    ends = [_cheapest_end(totals, may_be_last) for totals in levels]
    cost, row = min(ends, key=itemgetter(0))
    level, runs = ends.index((cost, row)), []
    place = end = len(steps)
    for levels, enters in steps[::-1]:
        place -= 1
        if enters[level] < levels[level][row]:
            runs.append((row, end))
            level -= 1
            row, end = levels[level].index(min(levels[level])), place
    runs.append((row, end))
    return cost, runs[::-1]


def _cheapest_end(totals: Sequence[float], may_be_last: Sequence[bool]) -> tuple[float, int]:
    """The least total, and the first row that has it, of those that may be last."""
    ends = [total if may else inf for total, may in zip(totals, may_be_last)]
    cost = min(ends)
    return cost, ends.index(cost)
