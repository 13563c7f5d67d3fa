"""What the pages of a report and of a difference share: one file that needs no network."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from vllm.kernels.report.layer_groups import compress
from vllm.kernels.report.page_drawing import DRAWING
from vllm.kernels.report.page_script import SCRIPT
from vllm.kernels.report.page_style import STYLE
from vllm.kernels.report.text_report import GRADES, KINDS
from vllm.kernels.select.grade import Grade


def document(heading: str, about: str, body: str, data: Any) -> str:
    """A whole page. about: what the browser's title adds to the heading. data: what --json prints;
    the script filters by it, and a program can read it back."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}{escape(about)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{breakable(heading)}</h1>\n{body}"
        '<div id="tip" role="tooltip" hidden></div>\n'
        f'<script type="application/json" id="report">{embedded(data)}</script>\n'
        f"<script>{SCRIPT}{DRAWING}</script>\n</body>\n</html>\n"
    )


def embedded(data: Any) -> str:
    """JSON that no text in it can end or change: a `<` is written as an escape."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def facts(rows: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(rows[name])}</dd>" for name in rows)
    return f"<dl>{items}</dl>\n" if items else ""


def filters(kinds: Sequence[str]) -> str:
    """Hidden until the script shows it; without kinds, by layer alone."""
    options = "".join(f"<option>{kind}</option>" for kind in kinds)
    by_kind = (
        '<label>Verdict <select id="by-kind"><option value="">all</option>'
        f"{options}</select></label>"
        if kinds
        else ""
    )
    return (
        '<form id="filters" role="search" hidden><label>Layers <input type="search" id="by-layer" '
        'placeholder="mlp.experts, *.5.*" autocomplete="off" spellcheck="false"></label>'
        f'{by_kind}<output id="found"></output></form>\n'
    )


def chip(kind: str) -> str:
    return f'<b class="{css_class(kind)}">{kind}</b>'


def css_class(kind: str) -> str:
    return "is-" + kind.replace(" ", "-")


def legend(kinds: Iterable[str]) -> str:
    items = "".join(f"<li>{chip(kind)} {KINDS[kind]}</li>" for kind in kinds)
    return f'<ul class="legend" aria-label="Verdicts">{items}</ul>\n'


def grade_legend(grades: Iterable[Grade]) -> str:
    items = "".join(
        f"<li>{grade_mark(grade)} <span>{graded(grade)}</span></li>" for grade in grades
    )
    return f'<ul class="legend grades" aria-label="Evidence">{items}</ul>\n'


def grade_mark(grade: Grade) -> str:
    """A circle, the fuller the better the evidence; read out as the grade's name."""
    return f'<i class="grade-{grade}"></i>'


def graded(grade: Grade) -> str:
    return f"<em>{grade}</em>: {GRADES[grade]}"


def layer_names(layers: Sequence[str]) -> str:
    """As few patterns, one a line."""
    return "<br>".join(f"<code>{_pattern(name)}</code>" for name in compress(layers))


def _pattern(name: str) -> str:
    """A short list of numbers does not break."""
    parts = re.split(r"(\{[^}]{,16}\}\.?)", name)
    return "".join(
        f"<i>{escape(part)}</i><wbr>" if i % 2 else breakable(part) for i, part in enumerate(parts)
    )


def kernel_name(text: str) -> str:
    """Of a split with spaces, at which it breaks: `skinny ≤ 16 | torch`."""
    return breakable(text).replace("|", " | ").replace("&lt;=", " &le; ")


def breakable(text: str) -> str:
    """A long name breaks after a dot first."""
    return escape(text).replace(".", ".<wbr>")
