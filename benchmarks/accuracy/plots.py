"""Draws the figures of docs/accuracy.md from a result of ue8m0_models.py, as SVG.

python benchmarks/accuracy/plots.py benchmarks/results/cpu-zen5-2core/arith_ue8m0.json docs/img
"""

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 210, 24, 56, 26
COLOURS = {"held-out": "#1b6ca8", "stretched": "#d1495b"}
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True)
class Dot:
    value: float
    colour: str
    low: float | None = None
    high: float | None = None


Row = tuple[str, Sequence[Dot]]


def dot_plot(
    title: str,
    axis: str,
    rows: Sequence[Row],
    ticks: Sequence[float],
    is_log: bool = False,
    band: tuple[float, float] | None = None,
    legend: dict[str, str] | None = None,
) -> str:
    """Rows of dots on one axis that spans `ticks`; a dot with low and high has a whisker."""
    bottom = TOP + ROW * len(rows)
    scale: Callable[[float], float] = math.log10 if is_log else float
    first, last = scale(ticks[0]), scale(ticks[-1])

    def x(value: float) -> float:
        share = (scale(value) - first) / (last - first)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share)), 1)

    parts = [f'<text x="12" y="20" font-weight="bold">{escape(title)}</text>']
    if band is not None:
        parts.append(
            f'<rect x="{x(band[0])}" y="{TOP}" width="{x(band[1]) - x(band[0]):.1f}" '
            f'height="{bottom - TOP}" fill="#ddd"/>'
        )
    for tick in ticks:
        parts.append(
            f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{bottom}" stroke="#eee"/>'
        )
        parts.append(_text(x(tick), bottom + 16, f"{tick:g}"))
    parts.append(_text((LEFT + WIDTH) / 2, bottom + 34, axis))
    for number, (name, colour) in enumerate((legend or {}).items()):
        place = LEFT + 110 * number
        parts.append(f'<circle cx="{place}" cy="38" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{place + 9}" y="42">{escape(name)}</text>')
    for number, (label, dots) in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        parts.append(_text(LEFT - 10, y + 4, label, "end"))
        for place, dot in enumerate(dots):
            shift = 4 * (place - (len(dots) - 1) / 2) if dot.low is not None else 0
            parts.append(_dot(dot, x, y + shift))
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{bottom + 44}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} fill="#222">\n'
        f'<rect {size} fill="white"/>\n{body}\n</svg>\n'
    )


def _dot(dot: Dot, x: Callable[[float], float], y: float) -> str:
    circle = f'<circle cx="{x(dot.value)}" cy="{y}" r="3.5" fill="{dot.colour}"/>'
    if dot.low is None or dot.high is None:
        return circle
    ends = f'x1="{x(dot.low)}" x2="{x(dot.high)}" y1="{y}" y2="{y}"'
    return f'<line {ends} stroke="{dot.colour}" stroke-width="1.5"/>{circle}'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


# ---------------------------------------------------------------- the figures


def scores(arith: dict[str, Any]) -> str:
    rows = [
        (name, [Dot(found["accuracy"], COLOURS[kind], *found["interval"])
                for kind, found in row["answers"].items()])
        for name, row in arith.items() if "answers" in row
    ]  # fmt: skip
    title = "Answers right of 1,319, with 95 % intervals"
    ticks = (0.75, 0.8, 0.85, 0.9, 0.95, 1)
    return dot_plot(title, "accuracy", rows, ticks, legend=COLOURS)


def divergences(arith: dict[str, Any]) -> str:
    rows = [
        (name, [Dot(found["kl"], COLOURS[kind]) for kind, found in row["against bf16"].items()])
        for name, row in arith.items() if name != "bf16"
    ]  # fmt: skip
    title = "How far each configuration is from bf16, per token"
    axis = "KL(bf16 || configuration), nats"
    ticks = (1e-6, 1e-5, 1e-4, 1e-3)
    return dot_plot(title, axis, rows, ticks, is_log=True, legend=COLOURS)


def layers(measured: dict[str, dict[str, float]]) -> str:
    groups: dict[str, list[Dot]] = {}
    for name, row in measured.items():
        kind = re.sub(r"experts\.\d+", "experts.*", re.sub(r"^model\.layers\.\d+\.", "", name))
        groups.setdefault(kind, []).append(Dot(row["stored ratio"], "#1b6ca8"))
    title = "Error of each layer's output with UE8M0 scales over that with float32 scales"
    axis = "ratio (grey: 1.44 to 1.65)"
    ticks = (1, 1.5, 2, 3, 4, 7)
    return dot_plot(title, axis, sorted(groups.items()), ticks, is_log=True, band=(1.44, 1.65))


def main() -> None:
    source, folder = map(Path, sys.argv[1:])
    found = json.loads(source.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "accuracy_scores": scores(found["arith"]),
        "accuracy_kl": divergences(found["arith"]),
        "accuracy_layers": layers(found["layers"]),
    }
    for name, figure in figures.items():
        (folder / f"{name}.svg").write_text(figure)


if __name__ == "__main__":
    main()
