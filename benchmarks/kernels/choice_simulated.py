"""How often two tunings would choose the same, by the differences between two that were made.

    python benchmarks/kernels/choice_simulated.py [--table FILE] [--runs A.json B.json] [--draws 4]

Runs: two tables of one machine, measured one after the other (default: those of an H100). How much
a time differs between them, without what is common to all, is drawn for each time of FILE (default:
the committed table of an H100), independently. Two tunings that are drawn so choose the same kernel
for a share of sizes and numbers of tokens: by each alone, and over FILE as a user's tuning is.
Regret is that of the choices by the times of FILE. Then the replays of one kernel are multiplied by
0.9 to 1.1, 25 for each time, and the choices compared with those without. Needs no GPU.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, expm1, log, sqrt
from pathlib import Path
from statistics import median, pstdev

from vllm.kernels import registry
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.splits import Timings, expected
from vllm.kernels.evidence.tables import SHIPPED, Table, is_of_attention, read_table
from vllm.kernels.report.curves import kernel_for
from vllm.kernels.report.question import libs_of
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.select import select
from vllm.kernels.tuning.clocks import median_and_noise
from vllm.kernels.tuning.held_out import problems_of

RESULTS = Path(__file__).parents[1] / "results" / "h100"
LOW, HIGH, REPLAYS = 0.9, 1.1, 25


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs = [RESULTS / "choice_a.json", RESULTS / "choice_b.json"]
    parser.add_argument("--table", type=Path, default=SHIPPED / "sm_90_132_3352.json")
    parser.add_argument("--runs", type=Path, nargs=2, metavar="TABLE", default=runs)
    parser.add_argument("--draws", type=int, default=4)
    args = parser.parse_args()
    pairs = pairs_of(*map(read_table, args.runs))
    differences = differences_of([difference for difference, _ in pairs])
    table = read_table(args.table)
    draw = random.Random(1)
    inside = sum(abs(difference) <= noise for difference, noise in pairs) / len(pairs)
    print(
        f"{len(pairs)} times of two runs: they differ by {pstdev(d for d, _ in pairs):.1%} "
        f"(standard deviation), {inside:.0%} of them by less than the noise of both"
    )
    for text, is_over in (("by each table alone", False), ("over the table", True)):
        print(f"{text}: {two_tunings(table, differences, draw, args.draws, is_over)}")
        for backend, found in shaken(table, differences, draw, is_over):
            print(f"  {backend} times {LOW} to {HIGH}: {found}")


@dataclass
class Share:
    """Of choices that are the same. logs: of the chosen kernel's time over the fastest one's."""

    same: int = 0
    total: int = 0
    logs: list[float] | None = None

    def __str__(self) -> str:
        text = f"{self.same / self.total:.1%} of {self.total} choices the same"
        if not self.logs:
            return text
        return f"{text}, regret {expm1(sum(self.logs) / len(self.logs)):.2%}"


def pairs_of(first: Table, second: Table) -> list[tuple[float, float]]:
    """Of every time that both have, the log of the ratio, and the noise of both."""
    return [
        (log(us / other[m]), dict(entry.noise).get(m, 0.0) + dict(again.noise).get(m, 0.0))
        for key, row in first.rows.items()
        for name, entry in row.items()
        if (again := second.rows.get(key, {}).get(name)) is not None
        for field in ("us", "quantised_us", "skewed_us", "skewed_quantised_us")
        for other in [dict(getattr(again, field))]
        for m, us in getattr(entry, field)
        if m in other
    ]


def differences_of(logs: list[float]) -> list[float]:
    """Of one run: without what is common to all, over the root of two."""
    middle = median(logs)
    return [(one - middle) / sqrt(2) for one in logs]


Case = tuple[Timings, Callable[[Timings], Decision]]


def cases_of(table: Table) -> Iterator[Case]:
    """What was measured of each problem, and what decides by other times of it."""
    device = table.chip.device
    libs = libs_of("all", device)
    for key in table.rows:
        if is_of_attention(key) or ", padded to " in key:
            continue
        for problem in problems_of(key):
            timings = Known((table,)).evidence(problem)
            if timings is None:
                continue
            specs = registry.specs(problem.family, device.family)

            def decide(by: Timings, problem=problem, specs=specs) -> Decision:  # type: ignore[no-untyped-def]
                return select(problem, device, libs, Policy(), specs, evidence=by)

            yield timings, decide


def two_tunings(
    table: Table, differences: list[float], draw: random.Random, draws: int, is_over: bool
) -> Share:
    found = Share(logs=[])
    for timings, decide in cases_of(table):
        for _ in range(draws):
            # What a build ships was measured on one more day.
            before = _drawn(timings, differences, draw) if is_over else None
            decisions = [
                decide(replace_before(_drawn(timings, differences, draw), before)) for _ in range(2)
            ]
            for one, other in pairwise([_kernels(d, timings) for d in decisions]):
                found.total += len(one)
                found.same += sum(a == b for a, b in zip(one, other, strict=True))
            assert found.logs is not None
            found.logs += _regret(decisions[0], timings)
    return found


def shaken(
    table: Table, differences: list[float], draw: random.Random, is_over: bool
) -> Iterator[tuple[str, Share]]:
    names = {name for timings, _ in cases_of(table) for name, _ in timings.us}
    for backend in sorted(names):
        found = Share()
        for timings, decide in cases_of(table):
            if backend not in dict(timings.us):
                continue
            before = _drawn(timings, differences, draw) if is_over else None
            pair = timings, _shaken(timings, backend, draw)
            one, other = (_kernels(decide(replace_before(t, before)), timings) for t in pair)
            found.total += len(one)
            found.same += sum(a == b for a, b in zip(one, other, strict=True))
        yield backend, found


def replace_before(timings: Timings, before: Timings | None) -> Timings:
    return replace(timings, before=before)


def _drawn(timings: Timings, differences: list[float], draw: random.Random) -> Timings:
    us = tuple(
        (name, tuple(t and t * exp(draw.choice(differences)) for t in times))
        for name, times in timings.us
    )
    return replace(timings, us=us)


def _shaken(timings: Timings, backend: str, draw: random.Random) -> Timings:
    us, noise = dict(timings.us), dict(timings.noise)
    found = [
        (None, None)
        if t is None
        else median_and_noise([t * draw.uniform(LOW, HIGH) for _ in range(REPLAYS)])
        for t in us[backend]
    ]
    nothing = (None,) * len(timings.tokens)
    us[backend], own = (tuple(column) for column in zip(*found))
    noises = tuple((n, own if n == backend else noise.get(n, nothing)) for n in us)
    return replace(timings, us=tuple(us.items()), noise=noises)


def _kernels(decision: Decision, timings: Timings) -> list[str]:
    return [kernel_for(decision, num_tokens) or "" for num_tokens in timings.tokens]


def _regret(decision: Decision, timings: Timings) -> Iterator[float]:
    """By the times that were measured, of what could be chosen."""
    parts = decision.parts
    able = [one.backend for one in decision.candidates if not one.reasons]
    for num_tokens in timings.tokens:
        at = replace(timings, tokens=(num_tokens,), us=_column(timings, num_tokens), noise=())
        found = expected(at, parts, able, (num_tokens, num_tokens))
        if found is not None:
            yield log(1 + found.mean_regret)


def _column(timings: Timings, num_tokens: int) -> tuple[tuple[str, tuple[float | None]], ...]:
    place = timings.tokens.index(num_tokens)
    return tuple((name, (times[place],)) for name, times in timings.us if times[place])


if __name__ == "__main__":
    main()
