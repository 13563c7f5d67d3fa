"""The table of decisions: prints it, or compares it with decisions.txt (--check).

    python tests/select/decisions.py > tests/select/decisions.txt

A change of kernel selection shows here as changed rows, to be read one by one before they are
committed.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from decision_sections import SECTIONS, Section

from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.reason import Reason, Why

FILE = Path(__file__).with_suffix(".txt")
COMMAND = "python tests/select/decisions.py > tests/select/decisions.txt"
_LETTERS = {
    Why.DEVICE: "D",
    Why.LIBRARY: "L",
    Why.FORMAT: "F",
    Why.SHAPE: "S",
    Why.DTYPE: "T",
    Why.POLICY: "P",
    Why.NUMERICS: "N",
}
_HEADER = f"""\
Decisions of kernel selection. Written by: {COMMAND}

First what is asked | what is chosen | what else could run, in order.
chosen  backend, activation scheme (none is weight-only), form of scales, refined or padded partial
        scale blocks, and by whom:
        1 --kernel  2 backend flag  3 variable  4 config  5 model rule  6 measured  7 default order
        (y: the one who decided yielded to the next kernel)
        none: nothing can serve it; REFUSED: nothing may; ERROR: a contradiction
Then by backend the questions that it is rejected for, with every kind of reason (for another
format, F alone), where no override asks for another:
        {"  ".join(f"{letter} {why.value}" for why, letter in _LETTERS.items())}
A section lists the values of its columns and asks every combination that has a meaning. Questions
of one answer that differ in one column alone share a row: a cell holds values, separated by commas,
or * for every value of the column. The texts of all reasons and origins follow.

libs    none: torch, triton and our native library; deep_gemm: with the original DeepGEMM as well;
        deep_gemm+sm120: with one that carries SM120 kernels; flashinfer: with FlashInfer;
        all: with the last two, large modules and binaries of FlashInfer, and humming-kernels;
        broken: all but torch are broken;
        no native: all but ours
"""

Row = tuple[tuple[str, ...], str]
Key = tuple[tuple[str, ...], ...]
Group = tuple[Key, str]
_MAX_CELL = 80
_OF_OVERRIDES = " asks for "


class Book:
    """Collects what rows abbreviate: reasons, origins and errors, each text once."""

    def __init__(self) -> None:
        self.reasons: set[tuple[str, str, str, str]] = set()
        self.origins: set[tuple[int, str]] = set()
        self.fits: set[str] = set()
        self.errors: set[str] = set()

    def note(self, decision: Decision) -> None:
        self.origins.add((decision.origin.rank, decision.origin.text))
        for candidate in decision.candidates:
            if candidate.fit is not None:
                self.fits.add(candidate.fit.text)
            for reason in candidate.reasons:
                backend = "(others)" if _OF_OVERRIDES in reason.text else candidate.backend
                family = decision.problem.family
                self.reasons.add((family, backend, reason.why.value, reason.text))

    def lines(self) -> Iterator[str]:
        yield from _titled("Origins", (f"{rank}  {text}" for rank, text in sorted(self.origins)))
        yield from _titled("Errors", sorted(self.errors))
        yield from _titled("Fits", sorted(self.fits))
        yield from _titled("Reasons", map("  ".join, sorted(self.reasons, key=_place)))


def _place(reason: tuple[str, ...]) -> tuple[int, int, tuple[str, ...]]:
    """Reasons, and (family, backend), stand in the order of families and of their backends."""
    family, backend = reason[:2]
    names = registry.backend_names(family)
    at = names.index(backend) if backend in names else len(names)
    return registry.FAMILIES.index(family), at, reason


def table() -> str:
    """The whole file."""
    book = Book()
    lines = [_HEADER]
    rejected: dict[tuple[str, str], list[str]] = {}
    for section in SECTIONS:
        rows, rejections = answers(section, book)
        head = f"{' | '.join(section.columns)} | chosen | could run"
        body = (*_columns(section), "", head, *_printed(section, rows))
        lines += _titled(section.title, body)
        for backend, found in rejections.items():
            own = rejected.setdefault((section.family, backend), [])
            own += [section.title, *(f"  {row}" for row in _printed(section, found))]
    for (family, backend), own in sorted(rejected.items(), key=lambda entry: _place(entry[0])):
        lines += _titled(f"Rejected: {family} {backend}", own)
    lines += book.lines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"## {title}"
    yield from lines
    yield ""


def answers(section: Section, book: Book) -> tuple[list[Row], dict[str, list[Row]]]:
    """A row for each question, and by backend the kinds of reasons against it."""
    rows: list[Row] = []
    rejections: dict[str, list[Row]] = {}
    for key in product(*section.columns.values()):
        try:
            decision = section.ask(*key)
        except ConfigError as error:
            book.errors.add(str(error))
            rows.append((key, "ERROR |"))
            continue
        if decision is None:
            continue
        book.note(decision)
        free = [c for c in decision.candidates if not c.reasons and c.backend != decision.chosen]
        rows.append((key, f"{_choice(decision)} | {' '.join(c.backend for c in free)}"))
        for candidate in decision.candidates:
            is_out = any(_OF_OVERRIDES in reason.text for reason in candidate.reasons)
            if not is_out and (letters := _letters(candidate.reasons)):
                rejections.setdefault(candidate.backend, []).append((key, letters))
    return rows, rejections


def _choice(decision: Decision) -> str:
    by = f"by {decision.origin.rank}{'y' * decision.origin.text.endswith('fell back')}"
    if decision.chosen is None:
        return f"{'REFUSED' if decision.origin.rank <= 4 else 'none'} {by}"
    winner: Candidate = decision.winner
    fit = winner.fit.how if winner.fit is not None else ""
    return " ".join(filter(None, (decision.chosen, str(winner.act), winner.scales, fit, by)))


def _letters(reasons: Iterable[Reason]) -> str:
    letters = dict.fromkeys(_LETTERS[reason.why] for reason in reasons)
    return "F" if "F" in letters else "".join(letters)


def _columns(section: Section) -> Iterator[str]:
    for name, values in section.columns.items():
        first, *others = _joined(tuple(values))
        yield f"{name}: {first}"
        yield from (f"  {line}" for line in others)


def _printed(section: Section, rows: list[Row]) -> Iterator[str]:
    columns = [tuple(column) for column in section.columns.values()]
    groups = [(tuple((value,) for value in key), answer) for key, answer in rows]
    for position in reversed(range(len(columns))):
        groups = _merged(groups, position)
    for key, answer in groups:
        cells = map(_cells, key, columns)
        yield from (" | ".join((*cell, answer)) for cell in product(*cells))


def _merged(groups: list[Group], position: int) -> list[Group]:
    """Groups that differ in one column alone, as one with the values of all."""
    values: dict[tuple[Key, Key, str], tuple[str, ...]] = {}
    for key, answer in groups:
        rest = (key[:position], key[position + 1 :], answer)
        values[rest] = values.get(rest, ()) + key[position]
    return [((*head, own, *tail), answer) for (head, tail, answer), own in values.items()]


def _cells(values: tuple[str, ...], column: tuple[str, ...]) -> Iterable[str]:
    return ["*"] if values == column and len(column) > 1 else _joined(values)


def _joined(values: tuple[str, ...]) -> Iterator[str]:
    """The values with commas, in lines of bearable length."""
    line = values[0]
    for value in values[1:]:
        if len(line) + 1 + len(value) > _MAX_CELL:
            yield line
            line = value
        else:
            line += f",{value}"
    yield line


def main(arguments: list[str], write: Callable[[str], object] = sys.stdout.write) -> int:
    new = table()
    if arguments != ["--check"]:
        write(new)
        return 0
    is_same = FILE.read_text() == new
    write(
        "decisions: unchanged\n" if is_same else f"decisions changed; read them after: {COMMAND}\n"
    )
    return not is_same


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
