"""What changed between two reports as one self-contained page."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from vllm.kernels.report.diff import Change, Detail, context
from vllm.kernels.report.html_document import (
    chip,
    document,
    facts,
    filters,
    kernel_name,
    layer_names,
    legend,
)
from vllm.kernels.report.layer_groups import counted
from vllm.kernels.report.report import Report
from vllm.kernels.report.text_report import KINDS


def html_diff(
    before: Report, after: Report, found: Sequence[Change], names: tuple[str, str]
) -> str:
    """names: those of the two reports."""
    num_layers = sum(len(change.layers) for change in found)
    total = len({(layer, d.problem.family) for r in (before, after) for layer, d in r.records})
    rows = {"before": names[0], "after": names[1]}
    rows["differ"] = f"{num_layers} of {counted(total, 'layer')}"
    where = context(before, after)
    table = f'<div class="scroll">{_table(where)}</div>\n' if where else ""
    texts = [text for change in found for row in change.details for text in row[1:]]
    told = {kind for text in texts for kind, _ in _split(text)}
    kinds = [kind for kind in KINDS if kind in told]
    articles = "".join(_article(number, change) for number, change in enumerate(found))
    body = (
        f"{facts(rows)}{table}{legend(kinds)}{filters(()) if found else ''}"
        f"{articles or '<p>No layer differs.</p>'}\n"
    )
    heading = "Kernels: what changed"
    return document(heading, f" from {names[0]} to {names[1]}", body, [c.to_json() for c in found])


def _article(number: int, change: Change) -> str:
    title = kernel_name(change.title).replace("-&gt;", "&rarr;")
    return (
        f'<article class="change" data-d="{number}"><h2>{title} <small>'
        f"{counted(len(change.layers), f'{change.family} layer')}</small></h2>\n"
        f'<div class="names">{layer_names(change.layers)}</div>\n'
        f"{_table(change.details) if change.details else ''}</article>\n"
    )


def _table(rows: Iterable[Detail]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{kernel_name(what)}</th><td>{_text(before)}</td>'
        f"<td>{_text(after)}</td></tr>\n"
        for what, before, after in rows
    )
    return (
        '<table class="changes"><thead><tr><th scope="col">what</th><th scope="col">before</th>'
        f'<th scope="col">after</th></tr></thead>\n<tbody>\n{lines}</tbody></table>\n'
    )


def _text(text: str) -> str:
    verdicts = _split(text)
    if not verdicts:
        return escape(text) or "&mdash;"
    return "".join(f"<div>{chip(kind)} {escape(said)}</div>" for kind, said in verdicts)


_KIND = re.compile(rf"(?:^|; )({'|'.join(KINDS)})(?=: |; |$)")


def _split(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each verdict that a detail tells; empty for one that is about none."""
    before, *parts = _KIND.split(text)
    return [] if before else [(k, t.removeprefix(": ")) for k, t in zip(parts[::2], parts[1::2])]
