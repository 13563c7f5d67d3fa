"""What was imported and what it is worth, as lines for people."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from vllm.kernels.evidence.imported import BALANCED, BANDS, ImportedTable, Kind, band_of, size_text
from vllm.kernels.evidence.importing.check import (
    Compared,
    Slower,
    against_ours,
    compared,
    num_shapes,
    slower_than_bf16,
)
from vllm.kernels.evidence.importing.derive import Found
from vllm.kernels.evidence.importing.held_out import GOAL, Chooser, HeldOut, held_out
from vllm.kernels.evidence.tables import Table
from vllm.machine import Libs

FAMILIES = {"linear": "linear layers", "moe": "experts"}
_BANDS = "".join(f"<= {limit:<7}" for limit in BANDS) + "tokens"


def label_lines(found: Iterable[Found]) -> Iterator[str]:
    """Each label with its rows, and what it is here."""
    for one in found:
        kernel = one.kernel
        if kernel is None:
            what = f"left out: {one.reason}"
        elif kernel.fault:
            what = f"ranks nothing: {kernel.fault}"
        else:
            what = f"{kernel.backend or 'a peer, ' + kernel.name}: {kernel.why}"
        yield f"  {one.format:<10} {one.num_rows:>6} rows  {one.measured_by}: {one.label}"
        yield f"      {what}"


def check_lines(table: ImportedTable, ours: Sequence[Table], libs: Libs) -> Iterator[str]:
    """All of one table. ours: tables of the same chip that we measured. libs: with which the
    selector chooses."""
    yield f"{table.name}, {FAMILIES[table.family]}: {table.project} {table.commit}, {table.licence}"
    for weight_format in dict.fromkeys(kind.format for kind in table.kinds):
        yield from _compared_lines(table, weight_format)
    for kind in table.kinds:
        yield from _kind_lines(table, kind, Chooser(table.chip.device, libs, kind))
    yield from _slower_lines(table)
    for own in ours:
        yield from _ours_lines(against_ours(table, own), own)


def _compared_lines(table: ImportedTable, weight_format: str) -> Iterator[str]:
    kinds = [
        kind
        for kind in table.kinds
        if kind.format == weight_format and kind.routing in ("", BALANCED)
    ]
    found = compared(kinds)
    if not found:
        return
    routing = f", {BALANCED} routing" if table.family == "moe" else ""
    yield ""
    yield f"{weight_format}{routing}: time over the fastest, {num_shapes(kinds)} sizes and tokens"
    yield f"  {_BANDS}"
    for one in found:
        yield f"  {_ratios(one.ratios)}{one.measured_by}: {one.label}"


def _ratios(ratios: Iterable[float | None]) -> str:
    return "".join(f"{'-' if ratio is None else f'{ratio:.2f}':<10}" for ratio in ratios)


def _kind_lines(table: ImportedTable, kind: Kind, chooser: Chooser) -> Iterator[str]:
    if not kind.by_backend:
        return
    name = " ".join(filter(None, (kind.format, kind.activation, kind.routing)))
    yield ""
    yield f"{name}: {', '.join(kind.by_backend)}; {len(kind.complete_sizes())} sizes"
    yield f"  error by tokens       {_shares(kind.error)}"
    if kind.interpolation:
        yield f"  error of an estimate  {_shares(kind.interpolation)}"
    found = held_out(kind, chooser)
    yield from map(_held_out_line, found)
    if found and table.ranks:
        yield f"  goal, chosen / fastest at most {GOAL} in the mean: {_reached(found[0])}"


def _shares(errors: Iterable[float]) -> str:
    return "  ".join(f"{100 * error:.1f} %" for error in errors)


def _held_out_line(one: HeldOut) -> str:
    unknown = f"chosen for {one.num_unknown} sizes, not measured: {', '.join(one.chosen)}"
    if not one.is_known:
        return f"  {unknown}"
    others = f"; {unknown}" if one.num_unknown else ""
    return f"  chosen / fastest {one.mean:.3f}, worst {one.worst:.2f}: {one.how}{others}"


def _reached(chosen: HeldOut) -> str:
    if not chosen.is_known:
        return "not known"
    return f"{'reached' if chosen.reaches_goal else 'missed'} by {chosen.mean:.3f}"


def _slower_lines(table: ImportedTable) -> Iterator[str]:
    found, num_compared = slower_than_bf16(table)
    if not num_compared:
        return
    yield ""
    yield f"bf16 faster than quantised, by one framework: {len(found)} of {num_compared}"
    cases: dict[tuple[str, str, str], list[Slower]] = defaultdict(list)
    for one in found:
        cases[one.format, one.measured_by, one.name].append(one)
    for (weight_format, by, name), own in sorted(cases.items()):
        counts = [sum(band_of(one.tokens) == band for one in own) for band in range(len(BANDS))]
        worst = own[0]
        yield (
            f"  {f'{weight_format} {name} by {by}':<50.49} by tokens "
            f"{', '.join(map(str, counts))}; worst {worst.ratio:.2f}: {size_text(worst.size)}, "
            f"{worst.tokens} tokens"
        )


def _ours_lines(found: Sequence[Compared], own: Table) -> Iterator[str]:
    if not found:
        return
    yield ""
    yield f"our times ({own.source}) over theirs, geometric mean"
    yield f"  {_BANDS}"
    for one in found:
        yield f"  {_ratios(one.ratios)}{one.name} by {one.measured_by}"
