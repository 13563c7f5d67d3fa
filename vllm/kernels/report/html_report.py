"""A report as one self-contained page: layers down, candidates across, reasons at each cell."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import log2
from typing import NamedTuple

from vllm.kernels import registry
from vllm.kernels.evidence.versions import stale_lines
from vllm.kernels.report import upstream_report
from vllm.kernels.report.calls import steps_text
from vllm.kernels.report.columns import WIDTH
from vllm.kernels.report.html_document import (
    breakable,
    chip,
    css_class,
    document,
    facts,
    filters,
    grade_legend,
    grade_mark,
    graded,
    kernel_name,
    layer_names,
    legend,
)
from vllm.kernels.report.layer_groups import by_decision, by_outcome, counted
from vllm.kernels.report.report import Report
from vllm.kernels.report.side_effects import side_effect, side_effect_lines
from vllm.kernels.report.text_report import (
    CHOSEN,
    COULD_RUN,
    EXPECTED_TOKENS,
    GRADES,
    KINDS,
    asks,
    bf16_line,
    expected_line,
    how,
    notes,
    requant_text,
    where,
    why,
)
from vllm.kernels.report.upstream import Advice
from vllm.kernels.select.decision import Candidate, Decision, Parts
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import Problem
from vllm.kernels.select.reason import Why

_NO_KERNEL = "NO KERNEL"
_HINT = (
    "Select a cell for its reasons: with the pointer, or with Tab and the arrow keys (Esc closes). "
    "Kernels stand in the default order of preference. M is the number of tokens of a step."
)


class _Row(NamedTuple):
    """number: its place among the decisions of the JSON."""

    number: int
    decision: Decision
    layers: list[str]


class _Verdict(NamedTuple):
    """What the page says of a candidate; the same of many layers stands once, with a number."""

    family: str
    candidate: Candidate
    lines: tuple[tuple[str, str], ...]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self.lines))


def html_page(report: Report, title: str, found: Advice | None = None) -> str:
    """A page for a browser without a network. title: what was asked about; found: flags of an
    upstream engine."""
    rows = [
        _Row(number, decision, layers)
        for number, (decision, layers) in enumerate(by_decision(report.records).items())
    ]
    verdicts = _Verdicts()
    families: dict[str, list[_Row]] = {}
    for row in rows:
        families.setdefault(row.decision.problem.family, []).append(row)
    grids = "".join(_grid(family, own, verdicts) for family, own in families.items())
    kinds = [kind for kind in KINDS if kind == CHOSEN or kind in verdicts.kinds()]
    grades = [grade for grade in GRADES if grade in verdicts.grades()]
    decisions = "".join(map(_decision, rows))
    flags = "" if found is None else _upstream(found)
    body = (
        f"{facts(_facts(report))}{_notes(report)}{legend(kinds)}{grade_legend(grades)}"
        f"{filters(kinds)}"
        f'<p class="hint">{_HINT}</p>\n{grids}'
        f'{flags}<section id="decisions"><h2>Decisions</h2>\n<ol>\n{decisions}</ol>'
        f'</section>\n<section id="verdicts"><h2>Verdicts</h2>\n{verdicts.html()}</section>\n'
    )
    content = upstream_report.content(report, found)
    return document(f"Kernels of {title}", f" on {report.device}", body, content)


def _upstream(found: Advice) -> str:
    heading, _, text = upstream_report.page(found, WIDTH).partition("\n\n")
    return (
        f'<section id="upstream"><h2>{escape(heading)}</h2>\n'
        f'<div class="scroll"><pre>{escape(text)}</pre></div></section>\n'
    )


def _facts(report: Report) -> dict[str, str]:
    ledger = {} if report.ledger is None else {"ledger": report.ledger.summary()}
    steps = {} if report.calls is None else {"steps": steps_text(report.calls)}
    return {**where(report, ", "), **ledger, **steps}


def _notes(report: Report) -> str:
    records = report.records
    of_model = report.model.notes if report.model else ()
    said = [*of_model, *(text.removeprefix("Note: ") for text in notes(by_outcome(records)))]
    said += [*side_effect_lines(records), *stale_lines(records)]
    return "".join(f'<p class="note">{escape(text)}</p>\n' for text in said)


# ---------------------------------------------------------------- verdicts


class _Verdicts:
    """Distinct verdicts by the number that cells refer to."""

    def __init__(self) -> None:
        self._numbers: dict[_Verdict, int] = {}

    def number(self, one: _Verdict) -> int:
        return self._numbers.setdefault(one, len(self._numbers) + 1)

    def kinds(self) -> set[str]:
        return {kind for one in self._numbers for kind in one.kinds}

    def grades(self) -> set[Grade]:
        return {one.candidate.grade for one in self._numbers}

    def html(self) -> str:
        families = dict.fromkeys(one.family for one in self._numbers)
        return "".join(
            f"<h3>{family}</h3>\n<ul>\n"
            + "".join(_entry(one, i) for one, i in self._numbers.items() if one.family == family)
            + "</ul>\n"
            for family in families
        )


def _verdict(candidate: Candidate, decision: Decision) -> _Verdict:
    """The format first: what else is said of a kernel that does not take it matters less."""
    if candidate.reasons:
        by_format = sorted(candidate.reasons, key=lambda reason: reason.why is not Why.FORMAT)
        lines = [(str(reason.why), reason.text) for reason in by_format]
    else:
        kind = CHOSEN if candidate.backend == decision.chosen else COULD_RUN
        lines = [(kind, ", ".join(how(candidate, decision)))]
    return _Verdict(decision.problem.family, candidate, tuple(lines))


def _entry(one: _Verdict, number: int) -> str:
    candidate = one.candidate
    lines = "".join(f"<div>{chip(kind)} {escape(text)}</div>" for kind, text in one.lines)
    loss = ""
    if candidate.reasons and candidate.requant is not None:
        loss = f"<div>{candidate.scales} scales: {requant_text(candidate.requant)}</div>"
    return (
        f'<li id="v{number}"><strong>{kernel_name(candidate.backend)}</strong>{lines}{loss}'
        f"<div>{grade_mark(candidate.grade)} {graded(candidate.grade)}</div></li>\n"
    )


# ---------------------------------------------------------------- tables


def _grid(family: str, rows: Sequence[_Row], verdicts: _Verdicts) -> str:
    backends = _columns(family, [row.decision for row in rows])
    has_others = any(_other_splits(row.decision) for row in rows)
    heads = ["other split"] * has_others + [breakable(name) for name in backends]
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    num_layers = sum(len(row.layers) for row in rows)
    lines = "\n".join(_line(row, backends, has_others, verdicts) for row in rows)
    return (
        f'<section class="family"><h2 id="{family}">{family} <small>'
        f"{counted(num_layers, 'layer')}, {counted(len(rows), 'problem')}</small></h2>\n"
        f'<div class="scroll"><table role="grid" aria-readonly="true" aria-labelledby="{family}">\n'
        f'<thead><tr><th scope="col">layers</th><th scope="col">kernel</th>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div></section>\n"
    )


def _columns(family: str, decisions: Sequence[Decision]) -> list[str]:
    """Backends in the chip's default order; those that are not known here last."""
    used = dict.fromkeys(c.backend for d in decisions for c in d.candidates if not c.parts)
    device_family = decisions[0].device.family
    known = [name for name in registry.backend_names(family, device_family) if name in used]
    return list(dict.fromkeys((*known, *used)))


def _other_splits(decision: Decision) -> list[Candidate]:
    return [c for c in decision.candidates if c.parts and c.backend != decision.chosen]


def _line(row: _Row, backends: Iterable[str], has_others: bool, verdicts: _Verdicts) -> str:
    number, decision, layers = row
    by_name = {candidate.backend: candidate for candidate in decision.candidates}
    cells = "".join(_cell(by_name.get(name), decision, verdicts) for name in backends)
    if has_others:
        others = "".join(
            f'<a class="split {css_class(one.kinds[0])}" href="#v{verdicts.number(one)}">'
            f"{one.kinds[0]} {grade_mark(one.candidate.grade)}"
            f"{_ranges(one.candidate.parts, decision.problem)}</a>"
            for one in (_verdict(c, decision) for c in _other_splits(decision))
        )
        cells = f"<td>{others}</td>{cells}"
    return (
        f'<tr data-d="{number}"><th scope="row"><div class="names">{layer_names(layers)}</div>'
        f"<small>{counted(len(layers), 'layer')}, {_sizes(decision.problem)}</small></th>"
        f"{_chosen_cell(number, decision)}{cells}</tr>"
    )


def _sizes(problem: Problem) -> str:
    """The problem's text, which breaks between its sizes."""
    text = escape(str(problem)).replace(":", ":<wbr>").replace(")", ")<wbr>")
    return text.replace("(", "<wbr>(")


def _chosen_cell(number: int, decision: Decision) -> str:
    """What serves, a split as its ranges of M, and what decided."""
    decided = f"<small>{escape(decision.origin.text)}</small>"
    if decision.chosen is None:
        name = f"<strong>{_NO_KERNEL}</strong>"
        return f'<td class="kernel none"><a href="#d{number}">{name}{decided}</a></td>'
    winner, mark = decision.winner, grade_mark(decision.winner.grade)
    if winner.parts:
        emulated = f"of {decision.device}, emulated" if decision.is_emulated else ""
        name = (
            f'<span class="m">by M {mark}</span>{_ranges(winner.parts, decision.problem)}{emulated}'
        )
    else:
        name = f"<strong>{breakable(decision.kernel or '')}</strong> {mark}"
    return f'<td class="kernel"><a href="#d{number}">{name}{_loss(winner)}{decided}</a></td>'


def _loss(candidate: Candidate) -> str:
    requant = candidate.requant
    is_lossy = candidate.is_lossy and requant is not None
    return f"<small>error {requant.error:.2%}</small>" if is_lossy and requant else ""


def _cell(candidate: Candidate | None, decision: Decision, verdicts: _Verdicts) -> str:
    if candidate is None:
        return "<td></td>"
    one = _verdict(candidate, decision)
    kind = one.kinds[0]
    more = f" +{len(one.lines) - 1}" if len(one.lines) > 1 else ""
    serves = ""
    if decision.chosen is not None and kind != CHOSEN:
        ranges = (_m_text(*span) for span in _spans(decision.winner.parts, candidate.backend))
        serves = "".join(f'<small class="{css_class(CHOSEN)}">M {text}</small>' for text in ranges)
    return (
        f'<td><a class="{css_class(kind)}" href="#v{verdicts.number(one)}">{kind}{more} '
        f"{grade_mark(candidate.grade)}{_loss(candidate)}{serves}</a></td>"
    )


# ---------------------------------------------------------------- ranges of M


def _bounds(parts: Parts) -> Iterator[tuple[int, int | None, str]]:
    """(first M, last M or None, backend) of each part."""
    first = 1
    for limit, backend in parts:
        yield first, limit, backend
        first = (limit or 0) + 1


def _spans(parts: Parts, backend: str) -> list[tuple[int, int | None]]:
    return [(first, last) for first, last, name in _bounds(parts) if name == backend]


def _m_text(first: int, last: int | None) -> str:
    """`1`, `9–64`, `1025+`"""  # noqa: RUF002 - as shown
    if last is None:
        return f"{first}+"
    return str(first) if first == last else f"{first}\N{EN DASH}{last}"


def _ranges(parts: Parts, problem: Problem) -> str:
    """Each range of M a line with its backend, over a bar at its place on a logarithmic scale."""
    greatest = max(getattr(problem, "m_range", EXPECTED_TOKENS)[1], *(m or 0 for m, _ in parts), 2)
    lines = []
    for first, last, backend in _bounds(parts):
        left = 100 * log2(first) / log2(greatest + 1)
        right = 100 * log2((last or greatest) + 1) / log2(greatest + 1)
        lines.append(
            f'<span class="part"><i>{_m_text(first, last)}</i> {breakable(backend)}'
            f'<s style="left:{left:.0f}%;right:{100 - right:.0f}%"></s></span>'
        )
    return "".join(lines)


# ---------------------------------------------------------------- decisions


def _decision(row: _Row) -> str:
    number, decision, layers = row
    (one,) = by_outcome((layer, decision) for layer in layers)
    decided, _, blocks = why(one).partition("\n")
    rows = {"problem": asks(decision.problem), "decided by": decided, "blocks": blocks}
    grade = ""
    if decision.chosen is not None:
        rows["how"] = ", ".join(how(decision.winner, decision))
        grade = f"{grade_mark(decision.winner.grade)} {graded(decision.winner.grade)}"
    rows["expected"], rows["bf16"] = expected_line(decision), bf16_line(decision)
    rows["event"] = side_effect(decision)
    name = f"<strong>{_NO_KERNEL}</strong>"
    if decision.chosen is not None:
        name = f"<strong>{kernel_name(decision.winner.backend)}</strong> {chip(CHOSEN)}"
    return (
        f'<li id="d{number}" data-d="{number}">{name}'
        f'<div class="names">{layer_names(layers)}</div>'
        f"{facts({what: text for what, text in rows.items() if text})}{grade}</li>\n"
    )
