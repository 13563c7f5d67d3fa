"""What `vllm kernels tune` found, as a table for people: the fastest kernel of each size by M."""

from collections.abc import Iterable, Iterator, Mapping

from vllm.kernels.evidence.tables import Cell, Row, Table
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.problem import MoEProblem

_NO_TIME = "-"


def page(table: Table, decisions: Iterable[tuple[Decision, str]]) -> str:
    """For each size that the table holds: what is chosen with it, and by M or step the fastest
    kernel and that of the default order. decisions: with what the default order takes."""
    paragraphs: dict[str, str] = {}
    for decision, default in decisions:
        problem = decision.problem
        row = table.row(problem, None)
        if row is None or problem.size_key in paragraphs:
            continue
        errors = {name: entry.error for name, entry in table.rows[problem.size_key].items()}
        sizes = problem.size_key.removeprefix(f"{problem.family} ")
        lines = [f"{problem.family} {sizes} -> {decision.kernel}"]
        lines += _lines(row, _able(decision), default, errors, isinstance(problem, MoEProblem))
        paragraphs[problem.size_key] = "\n".join(lines)
    return "\n\n".join(paragraphs.values())


def _able(decision: Decision) -> set[str]:
    return {c.backend for c in decision.candidates if not c.reasons and not c.parts}


def _lines(
    row: Row, able: set[str], default: str, errors: Mapping[str, float | None], is_moe: bool
) -> Iterator[str]:
    timings = row.timings()
    us = f"{'us':>9}" + f"{'skewed':>9}" * is_moe
    width = max([6, *(len(str(column)) for column in timings.columns)])
    head = f"{'step' if timings.steps else 'M':>{width}}"
    yield f"{head}  {'fastest':<20}{us}{'noise':>8}{'error':>10}  {'default order':<20}{us}"
    for i, column in enumerate(timings.columns):
        times = {name: us[i] for name, us in timings.us if name in able}
        known = {name: us for name, us in times.items() if us is not None}
        if not known:
            continue
        fastest = min(known, key=known.__getitem__)
        cell = row.cells[fastest][column]
        error = errors[fastest]
        shown_error = _NO_TIME if error is None else f"{error:.1e}"
        other = row.cells.get(default, {}).get(column)
        ratio = f"{known[default] / known[fastest]:>8.2f}x" if default in known else ""
        yield (
            f"{column:>{width}}  {fastest:<20}{_times(cell, is_moe)}{cell.noise:>8.1%}"
            f"{shown_error:>10}  {default:<20}{_times(other, is_moe)}{ratio}"
        )


def _times(cell: Cell | None, is_moe: bool) -> str:
    us = (cell.us, cell.skewed_us) if cell is not None else (None, None)
    shown = (f"{time:.4g}" if time is not None else _NO_TIME for time in us[: 1 + is_moe])
    return "".join(f"{text:>9}" for text in shown)
