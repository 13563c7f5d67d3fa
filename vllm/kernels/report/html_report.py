"""A report as one self-contained page: layers down, candidates across, reasons at each cell."""

from collections.abc import Iterable
from html import escape

from vllm.kernels.evidence.versions import stale_lines
from vllm.kernels.report.layer_groups import by_decision, by_outcome, compress, counted
from vllm.kernels.report.page_style import SCRIPT, STYLE
from vllm.kernels.report.report import Report
from vllm.kernels.report.side_effects import side_effect_lines
from vllm.kernels.report.text_report import KINDS, NO_KERNEL, notes, verdict, where
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.reason import DEFAULT_ORDER


def html_page(report: Report, title: str) -> str:
    """A page for a browser without a network; `title` says what was asked about."""
    families: dict[str, list[tuple[Decision, list[str]]]] = {}
    for decision, layers in by_decision(report.records).items():
        families.setdefault(decision.problem.family, []).append((decision, layers))
    facts = where(report, ", ").items()
    rows = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    records = report.records
    of_model = report.model.notes if report.model else ()
    texts = [
        *of_model,
        *notes(by_outcome(records)),
        *side_effect_lines(records),
        *stale_lines(records),
    ]
    said = "".join(f'<p class="note">{escape(text)}</p>' for text in texts)
    grids = "".join(_grid(family, decided) for family, decided in families.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Kernels: {escape(title)} on {escape(str(report.device))}</title>\n"
        f"<style>{STYLE}</style>\n"
        "<noscript><style>.why { display: block }</style></noscript>\n</head>\n<body>\n"
        f"<h1>Kernels of {escape(title)}</h1>\n<dl>{rows}</dl>\n{said}{_legend()}\n{grids}"
        f'<div id="tip" role="tooltip" hidden></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _legend() -> str:
    items = "".join(
        f'<li><span class="{_class(kind)}">{kind}</span> {text}</li>'
        for kind, text in KINDS.items()
    )
    return (
        f'<ul class="legend" aria-label="Legend">{items}</ul>\n'
        '<p class="hint">Point at a cell, or move to one with Tab and the arrow keys, for every '
        "reason. Columns stand in order of preference.</p>"
    )


def _grid(family: str, decided: list[tuple[Decision, list[str]]]) -> str:
    backends = list(
        dict.fromkeys(c.backend for decision, _ in decided for c in decision.candidates)
    )
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in backends)
    rows = "\n".join(_row(decision, layers, backends) for decision, layers in decided)
    return (
        f'<section><h2>{family}</h2>\n<div class="scroll"><table>\n<thead><tr><th scope="col">'
        f'layers</th><th scope="col">kernel</th>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div></section>\n"
    )


def _row(decision: Decision, layers: list[str], backends: Iterable[str]) -> str:
    # Long names may break after a dot.
    parts = (escape(name).replace(".", ".<wbr>") for name in compress(layers))
    names = "<br>".join(f"<code>{part}</code>" for part in parts)
    by_name = {candidate.backend: candidate for candidate in decision.candidates}
    cells = "".join(
        _cell(by_name[name], decision) if name in by_name else "<td></td>" for name in backends
    )
    winner = escape(decision.kernel or NO_KERNEL)
    missing = "" if decision.chosen else ' class="missing"'
    return (
        f'<tr{missing}><th scope="row">{names}<div class="problem">'
        f"{counted(len(layers), 'layer')}, {escape(str(decision.problem))}</div></th>"
        f'<td class="winner"><strong>{winner}</strong><div class="problem">'
        f'{escape(decision.origin.text)} <span class="rank">(rank {decision.origin.rank} of '
        f"{DEFAULT_ORDER.rank})</span></div></td>{cells}</tr>"
    )


def _cell(candidate: Candidate, decision: Decision) -> str:
    reasons = verdict(candidate, decision)
    kind = reasons[0][0]
    more = f'<span class="more">+{len(reasons) - 1}</span>' if len(reasons) > 1 else ""
    lines = "".join(
        f'<span class="line"><b class="{_class(kind)}">{kind}</b> {escape(text)}</span>'
        for kind, text in reasons
    )
    return (
        f'<td><button type="button" class="{_class(kind)}">{kind}{more}'
        f'<span class="why"><span class="line"><strong>{escape(candidate.backend)}</strong></span>'
        f"{lines}</span></button></td>"
    )


def _class(kind: str) -> str:
    return "is-" + kind.replace(" ", "-")
