"""Where others measured the same layer to be faster in bf16: a quantised weight takes half the
memory or less, and not always less time. Standard library only."""

from collections.abc import Iterable, Iterator

from vllm.kernels.evidence.imported import (
    BALANCED,
    ImportedTable,
    Kind,
    Series,
    parse_times,
    place_in_tables,
    size_text,
)
from vllm.kernels.evidence.splits import TOLERANCE
from vllm.kernels.select.decision import FasterInBf16, Parts, serving
from vllm.kernels.select.problem import Problem, WeightProblem


def faster_in_bf16(
    tables: Iterable[ImportedTable], problem: Problem, parts: Parts
) -> FasterInBf16 | None:
    """What the tables say of the chosen `parts`, each for its numbers of tokens; None where nobody
    measured this very size in both types, or bf16 is nowhere faster."""
    if not isinstance(problem, WeightProblem) or not problem.weight.is_quantized:
        return None
    place = place_in_tables(problem, BALANCED)
    if place is None:
        return None
    (weight_format, activation, routing), size = place
    for table in tables:
        kind = table.kind(weight_format, activation, routing)
        plain = table.kind("bf16", activation, routing)
        if kind is None or plain is None:
            continue
        found = _compared(table, kind, plain, size_text(size), parts, problem.m_range)
        if found is not None:
            return found
    return None


def _compared(
    table: ImportedTable, kind: Kind, plain: Kind, size: str, parts: Parts, m_range: tuple[int, int]
) -> FasterInBf16 | None:
    ratios: dict[int, tuple[float, Series]] = {}
    backends = {backend for _, backend in parts}
    for one in kind.series:  # the one with most sizes first
        if one.backend not in backends or one.fault or size not in one.rows:
            continue
        for other in same_library(one, plain, table.family):
            for tokens, us, bf16_us in both(kind, one, plain, other, size):
                if serving(parts, tokens) == one.backend and m_range[0] <= tokens <= m_range[1]:
                    ratios.setdefault(tokens, (us / bf16_us, one))
    slower = {tokens: ratio for tokens, (ratio, _) in ratios.items() if ratio > TOLERANCE}
    if not slower:
        return None
    worst = max(slower, key=lambda tokens: slower[tokens])
    by = ratios[worst][1]
    source = f"{table.project} {table.commit[:7]} ({table.name}; {by.name} by {by.measured_by})"
    return FasterInBf16(slower[worst], worst, tuple(sorted(slower)), len(ratios), source)


def same_library(one: Series, plain: Kind, family: str) -> Iterator[Series]:
    """Of bf16 what the framework of `one` ran: of experts the same library's kernels."""
    for other in plain.series:
        is_same = family == "linear" or other.name == one.name
        if other.measured_by == one.measured_by and is_same and not other.fault:
            yield other


def both(
    kind: Kind, one: Series, plain: Kind, other: Series, size: str
) -> Iterator[tuple[int, float, float]]:
    """(tokens, microseconds, microseconds in bf16) where both were measured."""
    times = dict(zip(plain.tokens, parse_times(other.rows.get(size, ""))))
    for tokens, us in zip(kind.tokens, parse_times(one.rows.get(size, ""))):
        bf16_us = times.get(tokens)
        if us and bf16_us:
            yield tokens, us, bf16_us
