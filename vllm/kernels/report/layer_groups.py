"""Layers grouped for display: by equal decision, by equal outcome, and names as patterns."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from vllm.kernels.select.decision import Candidate, Decision, Record
from vllm.kernels.select.reason import Origin, Why
from vllm.utils.dataclasses import dataclass, field, fields, replace

Row = tuple[str, ...]


@dataclass(frozen=True)
class OutcomeGroup(Decision):
    """Decisions whose problems differ but whose outcome and candidates, reasons included, do not,
    as the first of them. groups: each with its layers.

    A candidate that does not take the weight's format keeps that reason alone: what sizes or
    libraries say of it besides would separate outcomes that are one to a reader.
    """

    groups: list[tuple[Decision, list[str]]] = field(default_factory=list)

    @property
    def family(self) -> str:
        return self.problem.family

    @property
    def num_layers(self) -> int:
        return sum(len(layers) for _, layers in self.groups)


def by_decision(records: Iterable[Record]) -> dict[Decision, list[str]]:
    """Decisions with the layers they cover, equal ones together, in order of first use."""
    grouped: dict[Decision, list[str]] = {}
    # Selection hands out one object per distinct decision: hashing each of them once is enough.
    seen: dict[int, list[str]] = {}
    for layer, decision in records:
        layers = seen.get(id(decision))
        if layers is None:
            layers = seen[id(decision)] = grouped.setdefault(decision, [])
        layers.append(layer)
    return grouped


def by_outcome(records: Iterable[Record]) -> list[OutcomeGroup]:
    """In order of first use."""
    outcomes: dict[_Outcome, OutcomeGroup] = {}
    for decision, layers in by_decision(records).items():
        candidates = tuple(map(_without_moot_reasons, decision.candidates))
        key = (decision.problem.family, decision.kernel, decision.origin, candidates)
        if key not in outcomes:
            own = {f.name: getattr(decision, f.name) for f in fields(decision)}
            outcomes[key] = OutcomeGroup(**{**own, "candidates": candidates})
        outcomes[key].groups.append((decision, layers))
    return list(outcomes.values())


_Outcome = tuple[str, str | None, Origin, tuple[Candidate, ...]]


def _without_moot_reasons(candidate: Candidate) -> Candidate:
    of_format = tuple(reason for reason in candidate.reasons if reason.why is Why.FORMAT)
    return replace(candidate, reasons=of_format, fit=None) if of_format else candidate


def by_text(records: Iterable[Record], text_of: Callable[[Decision], str]) -> dict[str, str]:
    """What `text_of` says of decisions, if anything, with the layers of which it says so."""
    found: dict[str, list[str]] = {}
    said: dict[int, str] = {}
    for layer, decision in records:
        text = said.get(id(decision))
        if text is None:
            text = said[id(decision)] = text_of(decision)
        if text:
            found.setdefault(text, []).append(layer)
    return {text: ", ".join(compress(layers)) for text, layers in found.items()}


def counted(number: int, noun: str) -> str:
    """`1 layer`, `2 layers`"""
    return f"{number} {noun}{'s' * (number != 1)}"


def compress(names: Sequence[str]) -> list[str]:
    """Names as few patterns: `model.layers.{0-39}.mlp.up_proj`, `{0-2,4-6}`, `{3,7..39}` for every
    fourth. A pattern stands for exactly the names it was made of, each once."""
    rows: list[Row] = [tuple(name.split(".")) for name in dict.fromkeys(names)]
    for position in reversed(range(max(map(len, rows), default=0))):
        rows = _fold(rows, position)
    return [".".join(row) for row in rows]


def _fold(rows: Sequence[Row], position: int) -> list[Row]:
    """Rows that differ in the number at `position` alone become one."""
    # (before, the part itself or None for a number, after) -> the numbers
    folded: dict[tuple[Row, Row | None, Row], list[int]] = {}
    for row in rows:
        before, part, after = row[:position], row[position : position + 1], row[position + 1 :]
        if part and _is_number(part[0]):
            folded.setdefault((before, None, after), []).append(int(part[0]))
        else:
            folded[before, part, after] = []
    return [
        (*before, *((_numbers(numbers),) if part is None else part), *after)
        for (before, part, after), numbers in folded.items()
    ]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and text == str(int(text))


def _numbers(numbers: Iterable[int]) -> str:
    """`7`, `{0-2,4-6}`; at least three equal runs at equal distances as `{3,7..39}`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return str(runs[0][0])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(runs) > 2 and _is_regular(runs):
        return f"{{{texts[0]},{texts[1]}..{texts[-1]}}}"
    return f"{{{','.join(texts)}}}"


def _is_regular(runs: Sequence[tuple[int, int]]) -> bool:
    lengths = {last - first for first, last in runs}
    steps = {after[0] - before[0] for before, after in pairwise(runs)}
    return len(lengths) == len(steps) == 1
