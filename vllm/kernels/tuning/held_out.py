"""How well the cost model chooses for sizes that it was not fitted to.

Each size of a table is left out in turn. What the selector then decides by the estimate is compared
with what was measured: regret is how much longer the choice takes than the fastest kernel.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.evidence.cost_model import RANGES, Fitted, kind_of
from vllm.kernels.evidence.estimates import Costs
from vllm.kernels.evidence.splits import Expected, Timings
from vllm.kernels.evidence.tables import Chip, Table, is_of_attention
from vllm.kernels.report.question import libs_of
from vllm.kernels.report.text_report import expectation_of
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem, WeightProblem
from vllm.kernels.select.select import select
from vllm.kernels.tuning.fit import KindFit
from vllm.machine import Libs

# A row with fewer numbers of tokens says too little of a choice for all of them.
MIN_TOKENS = 10
EVERY_KIND = "all"


@dataclass(frozen=True)
class Case:
    """One problem whose sizes were left out. chosen: by the estimate. choice: what that takes.
    default: what the default order's choice takes. off: (tokens, backend, log of estimated over
    measured time)."""

    chip: Chip
    kind: str
    problem: WeightProblem
    chosen: str
    choice: Expected
    default: Expected
    off: tuple[tuple[int, str, float], ...]


def cases_of(table: Table, fits: Mapping[str, KindFit], libs: Libs | None = None) -> Iterator[Case]:
    """Of kernels that were measured. fits: `kinds_of(table)`. libs: what is there; every library
    unless given."""
    libs = libs or libs_of("all", table.chip.device)
    for size_key in sorted(table.rows):
        if is_of_attention(size_key):
            continue
        kind, sizes = kind_of(size_key)
        if kind not in fits or sizes not in fits[kind].sizes:
            continue
        cost = fits[kind].cost(frozenset({sizes}))
        if cost.num_sizes == 0:
            continue
        costs = Costs(Fitted(table.chip, table.name, "", "", "", {kind: cost}))
        for problem in problems_of(size_key):
            measured = table.timings(problem)
            if measured is not None and len(measured.tokens) >= MIN_TOKENS:
                estimated = costs.estimate(problem)
                case = _case(table.chip, kind, problem, measured, estimated, libs)
                if case is not None:
                    yield case


def _case(
    chip: Chip,
    kind: str,
    problem: WeightProblem,
    measured: Timings,
    estimated: Timings | None,
    libs: Libs,
) -> Case | None:
    """None where what is chosen was not measured for any number of tokens."""
    names = {name for name, _ in measured.us}
    specs = [spec for spec in registry.specs(problem.family) if spec.backend in names]
    by_estimate, by_default = (
        select(problem, chip.device, libs, Policy(), specs, evidence=evidence)
        for evidence in (estimated, None)
    )
    choice, default = (
        expectation_of(replace(decision, timings=measured))
        for decision in (by_estimate, by_default)
    )
    if choice is None or default is None:
        return None
    off = _off(measured, estimated) if estimated else ()
    return Case(chip, kind, problem, by_estimate.chosen or "", choice, default, off)


def _off(measured: Timings, estimated: Timings) -> tuple[tuple[int, str, float], ...]:
    known = {(m, name): us for name, times in measured.us for m, us in zip(measured.tokens, times)}
    return tuple(
        (m, name, log(us / true))
        for name, times in estimated.us
        for m, us in zip(estimated.tokens, times)
        if us and (true := known.get((m, name)))
    )


def problems_of(size_key: str) -> list[WeightProblem]:
    """After a norm, which quantises, and after attention, which does not."""
    weight_text, _, rest = size_key.partition(":")
    _, dtype, others = rest.split(" ", 2)
    schemes, _, activation = others.partition(", ")
    weight, act = WeightFormat.parse(weight_text), tuple(map(ActScheme, schemes.split(",")))
    sizes = kind_of(size_key)[1]
    if len(sizes) == 2:
        after_norm = LinearProblem(*sizes, weight, act, dtype)
        return [after_norm, replace(after_norm, comes_quantised=False)]
    experts, inner, hidden, top_k, ranks = sizes
    problem = MoEProblem(experts, top_k, hidden, inner, weight, act, dtype, cut_experts=ranks)
    activation, biases, _ = activation.partition(" with biases")
    return [replace(problem, activation=activation or "silu", bias=bool(biases))]


# ---------------------------------------------------------------- a table of them


@dataclass(frozen=True)
class Summary:
    """Of the cases of one chip and kind. Regrets as ratios minus 1: geometric mean over layers and
    tokens, that of the worst layer, and of its worst number of tokens, by estimates and by the
    default order. off: by range of tokens, root mean square of relative errors of times."""

    chip: Chip
    kind: str
    num_cases: int
    choice: tuple[float, float, float]
    default: tuple[float, float, float]
    off: tuple[float, ...]


def summaries(cases: Iterable[Case]) -> list[Summary]:
    """By chip and kind, and all kinds of a chip together."""
    groups: dict[tuple[Chip, str], list[Case]] = {}
    for case in cases:
        for kind in (EVERY_KIND, case.kind):
            groups.setdefault((case.chip, kind), []).append(case)
    return [_summary(chip, kind, own) for (chip, kind), own in groups.items()]


def _summary(chip: Chip, kind: str, cases: Sequence[Case]) -> Summary:
    off = []
    low = 0
    for high in RANGES:
        logs = [e for case in cases for m, _, e in case.off if low < m <= high]
        off.append(exp(sqrt(sum(e * e for e in logs) / len(logs))) - 1 if logs else 0.0)
        low = high
    choice, default = [case.choice for case in cases], [case.default for case in cases]
    return Summary(chip, kind, len(cases), _regret(choice), _regret(default), tuple(off))


def _regret(choices: Sequence[Expected]) -> tuple[float, float, float]:
    logs = [log(1 + choice.mean_regret) for choice in choices]
    worst = max(choice.worst_regret for choice in choices)
    return exp(sum(logs) / len(logs)) - 1, exp(max(logs)) - 1, worst


def text(summaries: Sequence[Summary]) -> str:
    """A line for each, under a heading."""
    ranges = [f"M<={high}" for high in RANGES]
    lines = [
        f"{'regret of sizes left out:':<49} {'by estimates':>20}  {'default order':>20}  "
        f"{'error of times':>24}",
        f"{'chip':<16} {'kind':<25} {'cases':>6} "
        + "  ".join(
            [f"{'mean':>6}{'layer':>7}{'point':>7}"] * 2 + ["".join(f"{r:>8}" for r in ranges)]
        ),
    ]
    for one in summaries:
        regrets = "  ".join(
            "".join(f"{value:>{width}.1%}" for value, width in zip(regret, (6, 7, 7)))
            for regret in (one.choice, one.default)
        )
        off = "".join(f"{value:>8.1%}" for value in one.off)
        kind = " ".join(one.kind.split(" ")[:2])
        chip = one.chip.file_name.removesuffix(".json")
        lines.append(f"{chip:<16} {kind:<25} {one.num_cases:>6} {regrets}  {off}")
    return "\n".join(lines)
