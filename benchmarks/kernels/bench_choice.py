"""Whether the kernels that are chosen are the fastest when they are measured again.

    python benchmarks/kernels/bench_choice.py choice [MODEL ...] [--layer SIZE ...] [--tp 4]
        [--ep 1] [--tokens 1,16,64,512,4096] [--backend NAME ...] [--seconds 420]
        [--table FILE ...] [--fresh FILE] [--out DIR]
    python benchmarks/kernels/bench_choice.py agreement A.json B.json [--out DIR]

`choice` times every kernel that can run a linear layer or experts of MODEL (default
Qwen3.5-35B-A3B-FP8, sizes of a rank) on this machine, by the trials of `vllm kernels tune`, and
compares what the selector takes by the committed tables (or by --table) with the fastest: regret is
how much longer it takes. For each model and rank it prints the time of the chosen kernels over that
of the fastest, summed over the layers that were timed (--seconds may leave some out). Then, for
each kernel in turn, every replay of it is multiplied by a random number from 0.9 to 1.1, and the
choices by such times are compared with those by the times as they are. With --fresh FILE nothing is
timed: times are those of a table of `vllm kernels tune --output FILE`, of the same sizes.

`agreement` compares the choices by two tables that were measured one after the other on one
machine (`vllm kernels tune --output A.json`), for each size and number of tokens that both have:
the same kernel, or two whose times differ by less than their noise in both tables. Each is taken as
a start takes it, over the committed tables (or --table), and by itself. Needs no GPU.

--out: writes choice.json or agreement.json to DIR, such as benchmarks/results/h100.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path

from choice_models import Rank, Whole, text_of_wholes, wholes
from choice_samples import Series, measure, table_of
from gpu_results import write_results

from vllm.config.kernel import KernelConfig
from vllm.config.selection import Facts, selection_for
from vllm.entrypoints.cli.kernels_explain import asked_model
from vllm.errors import VllmError
from vllm.kernels.evidence.estimates import find_fitted
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.splits import TOLERANCE
from vllm.kernels.evidence.tables import Chip, Table, find_tables, is_of_attention, read_table
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.report import question
from vllm.kernels.report.curves import kernel_for
from vllm.kernels.report.text_report import expectation_of
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem, Measurable, WeightProblem
from vllm.kernels.selection import Selection
from vllm.kernels.tuning import tune
from vllm.kernels.tuning.held_out import problems_of
from vllm.kernels.tuning.plan import MAIN_TOKENS, plan
from vllm.kernels.tuning.whole_models import MODELS, RANKS, at_tokens
from vllm.machine import Device, Libs
from vllm.platforms.cpu import memory_limit, num_cores
from vllm.platforms.installed import gpu_memory_bytes
from vllm.platforms.probe import device_name, probe_chip, probe_libs

LOW, HIGH, SEEDS = 0.9, 1.1, range(5)
GOAL = 0.98


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    choice = kinds.add_parser("choice", help="compare committed choices with fresh times")
    choice.add_argument("models", nargs="*", metavar="MODEL")
    choice.add_argument("--layer", action="append", default=[], help=question.LAYER_SYNTAX)
    choice.add_argument("--tp", type=_numbers, default=(4,))
    choice.add_argument("--ep", type=_numbers, default=(1,))
    choice.add_argument("--tokens", type=_numbers, default=MAIN_TOKENS)
    choice.add_argument("--seconds-per-kernel", type=float, default=10.0)
    choice.add_argument("--backend", action="append", default=[])
    choice.add_argument("--seconds", type=float, help="for everything; half of it for checks")
    choice.add_argument("--table", type=Path, action="append", default=[])
    choice.add_argument("--fresh", type=Path)
    choice.set_defaults(run=run_choice)
    both = kinds.add_parser("agreement", help="compare the choices by two tables")
    both.add_argument("tables", type=Path, nargs=2, metavar="TABLE")
    both.add_argument("--table", dest="committed", type=Path, action="append", default=[])
    both.set_defaults(run=run_agreement)
    for one in (choice, both):
        one.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        return args.run(args)
    except VllmError as error:
        parser.error(str(error))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes numbers, as 1,16,64") from None


# ---------------------------------------------------------------- choices and fresh times


@dataclass(frozen=True)
class Row:
    """One problem for a number of tokens. count: its layers, of the model on so many ranks where
    it has most. us: of the kernel that was chosen, measured now. noise: of both times together."""

    problem: str
    count: int
    origin: str
    tokens: int
    chosen: str
    us: float
    fastest: str
    fastest_us: float
    noise: float

    @property
    def regret(self) -> float:
        return self.us / self.fastest_us - 1


Layers = dict[Measurable, tuple[int, Decision]]


def run_choice(args: argparse.Namespace) -> int:
    if args.fresh:
        return _compare_with(read_table(args.fresh), args)
    chip, libs, name = probe_chip(), probe_libs(), device_name()
    if chip.device.kind == "cuda":
        use_caches()
    known = _known(args.table, chip)
    layers, ranks = _layers(args, Facts(chip.device, libs, known))
    problems = [problem for problem, (count, _) in layers.items() for _ in range(count)]
    planned = plan(problems, chip.device, libs, args.tokens, args.backend)
    for note in planned.notes:
        print(f"left out: {note}")
    series, left = measure(planned.jobs, chip, name, _limits(args, chip.device))
    if left:
        print(f"left out: {len(left)} of {len(planned.jobs)} kernels, for want of time or memory")
    fresh = table_of(series, chip, name)
    rows, whole = _report(layers, ranks, fresh, args.tokens)
    if not rows:
        print("nothing was compared: no chosen kernel was timed")
        return 1
    noisy = noisy_choices(layers, series, chip, libs, known.tables)
    print(text_of_noisy(noisy))
    if args.out:
        content = {"models": _models(args), "layers": args.layer, "tp": args.tp, "ep": args.ep}
        content |= {"tables": [table.source for table in known.tables], "left_out": len(left)}
        content |= {"summary": summary_of(rows), "whole_models": list(map(asdict, whole))}
        content |= {"rows": [asdict(row) | {"regret": row.regret} for row in rows]}
        write_results(args.out, "choice.json", **content, noisy=[asdict(one) for one in noisy])
    return 0


def _compare_with(fresh: Table, args: argparse.Namespace) -> int:
    """Choices against times that `vllm kernels tune --output` measured, on any machine."""
    device = fresh.chip.device
    facts = Facts(device, question.libs_of("all", device), _known(args.table, fresh.chip))
    rows, whole = _report(*_layers(args, facts), fresh, args.tokens)
    if args.out and rows:
        content = {"device": fresh.name, "models": _models(args), "tp": args.tp, "ep": args.ep}
        content |= {"summary": summary_of(rows), "whole_models": list(map(asdict, whole))}
        write_results(args.out, "choice.json", **content, rows=list(map(asdict, rows)))
    return 0 if rows else 1


def _report(
    layers: Layers, ranks: Sequence[Rank], fresh: Table, tokens: Sequence[int]
) -> tuple[list[Row], list[Whole]]:
    """What it prints: regret by layer, in short, and by model."""
    rows_of = {
        problem: list(compared({problem: one}, fresh, tokens)) for problem, one in layers.items()
    }
    rows = [row for own in rows_of.values() for row in own]
    times = {
        (problem, row.tokens): (row.us, row.fastest_us)
        for problem, own in rows_of.items()
        for row in own
    }
    whole = wholes(ranks, times, tokens)
    print(text_of_rows(rows))
    for what, value in (summary_of(rows) if rows else {}).items():
        print(f"{what}: {value}")
    if whole:
        print(text_of_wholes(whole))
    return rows, whole


def _known(tables: Sequence[Path], chip: Chip) -> Known:
    """Of these tables, or what comes with this build, without what a user measured."""
    if tables:
        return Known(tuple(map(read_table, tables)))
    committed = (table for table in find_tables(chip) if table.source.startswith("tuned/"))
    costs = (one for one in find_fitted(chip) if one.fitted.source.startswith("fitted/"))
    return Known(tuple(committed), tuple(costs), chip)


def _models(args: argparse.Namespace) -> list[str]:
    return args.models or ([] if args.layer else ["Qwen3.5-35B-A3B-FP8"])


def _layers(args: argparse.Namespace, facts: Facts) -> tuple[Layers, list[Rank]]:
    """Distinct problems, each with how many layers have it and what `explain` decides; the layers
    of each model's ranks."""
    found: Layers = {}
    models = []
    ranks = product(args.tp, args.ep)
    for model, (tp, ep) in product(_models(args), ranks):
        asked = asked_model(model, argparse.Namespace(dtype="auto", tp=tp, ep=ep), facts.device)
        preferences = KernelConfig().preferences(asked.quant_config)
        selection = selection_for(facts, preferences, asked.model_type)
        problems = [p for _, p in asked.problems if isinstance(p, WeightProblem)]
        counts = Counter(problems)
        models.append(Rank(model, tp, ep, counts))
        for problem, count in counts.items():
            known = found.get(problem)
            if known is None or known[0] < count:
                found[problem] = count, selection.decide(str(problem), problem)
    selection = selection_for(facts, KernelConfig().preferences(None), "")
    dtype = question.dtype_of("auto", {}, facts.device)
    for text in args.layer:
        name, problem = question.layer_of(text, dtype)
        assert isinstance(problem, LinearProblem)
        found.setdefault(problem, (1, selection.decide(name, problem)))
    return found, models


def _limits(args: argparse.Namespace, device: Device) -> tune.Limits:
    memory = gpu_memory_bytes() if device.kind == "cuda" else None
    jobs = tune.num_checkers(num_cores(), memory_limit(), memory)
    return tune.Limits(args.seconds_per_kernel, args.seconds, jobs=jobs, gpu_bytes=memory)


def compared(layers: Layers, fresh: Table, tokens: Sequence[int]) -> Iterator[Row]:
    """Of decisions whose kernel was timed now."""
    for problem, (count, decision) in layers.items():
        timings = fresh.timings(problem)
        for num_tokens in tokens if timings else ():
            if timings is None or num_tokens not in timings.tokens:
                continue
            now = at_tokens(timings, num_tokens)
            choice = expectation_of(replace(decision, timings=now))
            if choice is None:
                continue
            ((_, us),) = choice.us
            chosen, fastest = kernel_for(decision, num_tokens) or "", choice.fastest_there
            noises = {name: own[timings.tokens.index(num_tokens)] for name, own in timings.noise}
            noise = sum(noises.get(name) or 0.0 for name in {chosen, fastest})
            place = str(problem), count, decision.origin.text, num_tokens
            least = us / (1 + choice.worst_regret)
            yield Row(*place, chosen, us, fastest, least, noise)


def text_of_rows(rows: Sequence[Row]) -> str:
    lines = [f"{'layers':>6} {'M':>5}  {'chosen':<18}{'us':>8}  {'fastest':<18}{'us':>8}"
             f"{'regret':>8}{'noise':>7}"]  # fmt: skip
    problem = ""
    for row in rows:
        if row.problem != problem:
            problem = row.problem
            lines.append(f"{problem} ({row.origin})")
        lines.append(
            f"{row.count:>6} {row.tokens:>5}  {row.chosen:<18}{row.us:>8.4g}  {row.fastest:<18}"
            f"{row.fastest_us:>8.4g}{row.regret:>8.1%}{row.noise:>7.1%}"
        )
    return "\n".join(lines)


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    """Regrets as ratios minus 1."""
    worst = max(rows, key=lambda row: row.regret)
    return {
        "rows": len(rows),
        "geometric mean of regret": round(_mean(row.regret for row in rows), 4),
        "worst regret": round(worst.regret, 4),
        "worst": f"{worst.problem}, M = {worst.tokens}: {worst.chosen}, not {worst.fastest}",
        "rows within 3 % or noise": sum(row.regret <= max(0.03, row.noise) for row in rows),
    }


def _mean(regrets: Iterable[float]) -> float:
    logs = [log(1 + regret) for regret in regrets]
    return exp(sum(logs) / len(logs)) - 1


# ---------------------------------------------------------------- a noisy kernel


@dataclass(frozen=True)
class Noisy:
    """Choices for each problem and number of tokens, where one kernel's replays are multiplied at
    random, over all SEEDS. slower: changed ones that take over 3 % more, by the times as they are;
    worst: how much more at most, as a ratio minus 1."""

    backend: str
    choices: int
    changed: int
    slower: int
    worst: float


def noisy_choices(
    layers: Layers,
    series: Sequence[Series],
    chip: Chip,
    libs: Libs,
    committed: Sequence[Table] = (),
) -> list[Noisy]:
    """committed: what the times are measured over, as a user's are."""
    clean = table_of(series, chip, "clean")
    before = _choices(layers, clean, libs, committed)
    found = []
    for backend in sorted({one.backend for one in series}):
        num, changed = 0, 0
        lost: list[float] = []
        for seed in SEEDS:
            draw = random.Random(seed)

            def shaken(one: Series, backend: str = backend, draw: random.Random = draw):
                is_meant = one.backend == backend
                return [us * draw.uniform(LOW, HIGH) for us in one.samples] if is_meant else one[4]

            table = table_of(series, chip, "shaken", shaken)
            for place, name in _choices(layers, table, libs, committed).items():
                if not _is_timed(clean, place[0], backend):
                    continue
                num += 1
                if name != before[place]:
                    changed += 1
                    lost += _slower(clean, place, name, before[place])
        slower = sum(one > TOLERANCE - 1 for one in lost)
        found.append(Noisy(backend, num, changed, slower, max(lost, default=0.0)))
    return found


_Place = tuple[Measurable, int]


def _choices(
    layers: Iterable[Measurable], table: Table, libs: Libs, committed: Sequence[Table]
) -> dict[_Place, str]:
    """The kernel for each problem and number of tokens of the table, over those committed."""
    selection = Selection(table.chip.device, libs, Policy(), Known((table, *committed)))
    found = {}
    for problem in layers:
        timings = table.timings(problem)
        decision = selection.decide(str(problem), problem)
        for num_tokens in timings.tokens if timings else ():
            found[problem, num_tokens] = kernel_for(decision, num_tokens) or ""
    return found


def _is_timed(table: Table, problem: Measurable, backend: str) -> bool:
    return backend in table.rows.get(problem.size_key, {})


def _slower(table: Table, place: _Place, name: str, other: str) -> Iterator[float]:
    """How much longer `name` takes than `other`, as a ratio minus 1, if both have a time."""
    times = _times(table, place)
    if {name, other} <= times.keys():
        yield times[name][0] / times[other][0] - 1


def _times(table: Table, place: _Place) -> dict[str, tuple[float, float]]:
    """By backend, microseconds and their noise."""
    problem, num_tokens = place
    timings = table.timings(problem)
    if timings is None or num_tokens not in timings.tokens:
        return {}
    column = timings.tokens.index(num_tokens)
    noises = {name: own[column] or 0.0 for name, own in timings.noise}
    return {
        name: (us, noises.get(name, 0.0))
        for name, own in timings.us
        if (us := own[column]) is not None
    }


def text_of_noisy(noisy: Sequence[Noisy]) -> str:
    lines = [f"choices with the replays of one kernel times {LOW} to {HIGH}, {len(SEEDS)} draws:"]
    lines += [
        f"{one.backend:<20} {one.choices - one.changed} of {one.choices} the same"
        + f", {one.slower} over 3% slower, at most {one.worst:.1%}" * bool(one.changed)
        for one in noisy
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- two tables


def run_agreement(args: argparse.Namespace) -> int:
    first, second = map(read_table, args.tables)
    committed = _known(args.committed, first.chip).tables
    over, left_out = agreement(first, second, committed)
    alone, _ = agreement(first, second)
    for what, value in over.items():
        print(f"{what}: {value}")
    print(f"share of the same kernel by each table alone: {alone['share of the same kernel']}")
    for size_key in left_out:
        print(f"left out: {size_key}: no built-in model has it")
    if args.out:
        names = {"tables": [table.source for table in (first, second)]}
        names |= {"over": [table.source for table in committed]}
        content = {"device": first.name, **names, "left_out": left_out, **over, "alone": alone}
        write_results(args.out, "agreement.json", **content)
    return 0


def agreement(
    first: Table, second: Table, committed: Sequence[Table] = ()
) -> tuple[dict[str, object], list[str]]:
    """Counts and shares of choices, and keys of sizes that no problem is known for. committed: what
    both were measured over."""
    device = first.chip.device
    libs = question.libs_of("all", device)
    shared = [key for key in first.rows if key in second.rows and not is_of_attention(key)]
    partial = _partial_problems(device) if any(", padded to " in key for key in shared) else {}
    layers: dict[Measurable, None] = {}
    left_out = []
    for key in shared:
        own = [partial.get(key)] if ", padded to " in key else problems_of(key)
        layers |= {problem: None for problem in own if problem is not None}
        left_out += [key] * (None in own)
    mine, theirs = (_choices(layers, table, libs, committed) for table in (first, second))
    places = [place for place in mine if place in theirs]
    same, close, different, regrets = 0, 0, [], []
    for place in places:
        a, b = mine[place], theirs[place]
        if a == b:
            same += 1
            continue
        is_close = all(_is_within_noise(table, place, a, b) for table in (first, second))
        close += is_close
        if not is_close:
            floats = "" if place[0].comes_quantised else " of floats"
            different.append(f"{place[0]}{floats}, M = {place[1]}: {a}, {b}")
        regrets += [*_slower(first, place, b, a), *_slower(second, place, a, b)]
    total = len(places)
    return {
        "choices": total,
        "same kernel": same,
        "differ by less than their noise": close,
        "share of the same kernel": round(same / total, 4) if total else None,
        "share with those": round((same + close) / total, 4) if total else None,
        "goal": GOAL,
        "worst gain of one choice over the other": round(max(regrets, default=0.0), 4),
        "different": different,
    }, left_out


def _is_within_noise(table: Table, place: _Place, one: str, other: str) -> bool:
    times = _times(table, place)
    if not {one, other} <= times.keys():
        return False
    (us, noise), (other_us, other_noise) = times[one], times[other]
    slow, fast = max(us, other_us), min(us, other_us)
    return slow / fast - 1 <= noise + other_noise


def _partial_problems(device: Device) -> dict[str, Measurable]:
    """By size key, problems with partial scale blocks of built-in models on some ranks: the key
    alone does not tell their parts."""
    found: dict[str, Measurable] = {}
    for model, tp, ep in product(MODELS, RANKS, RANKS):
        if ep > 1 and "A" not in model:
            continue
        args = argparse.Namespace(dtype="auto", tp=tp, ep=ep)
        for _, problem in asked_model(model, args, device).problems:
            if isinstance(problem, WeightProblem):
                found.setdefault(problem.size_key, problem)
    return found


if __name__ == "__main__":
    sys.exit(main())
