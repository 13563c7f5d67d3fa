"""How reports in a terminal are laid out: rows of columns that wrap, as wide as the terminal."""

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 100
_MIN_WIDTH, _MAX_WIDTH = 72, 120


def text_width() -> int:
    """Of the terminal, within limits; WIDTH where there is none."""
    given = shutil.get_terminal_size((WIDTH, 24)).columns
    return min(_MAX_WIDTH, max(_MIN_WIDTH, given))


def columns(cells: Sequence[str], widths: Sequence[int], total: int) -> list[str]:
    """One row of a table whose last column takes what is left of `total` and wraps, as the others
    do where they are longer than their width."""
    last = max(20, total - sum(widths) - 2 * len(widths))
    wrapped = [_wrap(cell, width) for cell, width in zip(cells, (*widths, last))]
    return [
        "  ".join(f"{part:<{width}}" for part, width in zip(line, (*widths, 0))).rstrip()
        for line in zip_longest(*wrapped, fillvalue="")
    ]


def _wrap(text: str, width: int) -> list[str]:
    """Line breaks stay; what is wrapped keeps the indentation of its line."""
    lines = []
    for line in text.splitlines() or [""]:
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, max(width, 8), break_on_hyphens=False, subsequent_indent=indent
        ) or [""]
    return lines
