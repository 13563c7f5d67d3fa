"""Kernel times over the number of tokens as a picture, by matplotlib (the extra `plot`)."""

import io
import textwrap
from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import Any, NamedTuple

from vllm.errors import ConfigError
from vllm.kernels.report.curves import Curve, chosen_ranges, colours, curves_of
from vllm.kernels.report.layer_groups import compress
from vllm.kernels.select.decision import Decision

FORMATS = (".svg", ".png", ".html")

_COLUMNS, _PANEL_INCHES, _DPI = 3, (5.2, 4.0), 110
_TITLE_LINE_INCHES, _LEGEND_LINE_INCHES = 0.2, 0.18
_LINE, _TITLE_LINE = 70, 50  # characters over a panel: of its title, of the picture's
_TICKS = tuple(4**i for i in range(8))
# Text stays text, and the same picture is the same file.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "vllm", "font.size": 9}


class Panel(NamedTuple):
    """Layers of one decision."""

    decision: Decision
    layers: list[str]

    @property
    def title(self) -> str:
        """Layers, the size, what was chosen, and where the times come from."""
        first, *others = compress(self.layers)
        name = first + (f" and {len(others)} more" if others else "")
        timings, problem = self.decision.timings, self.decision.problem
        assert timings is not None
        chosen = (self.decision.kernel or "no kernel").replace("|", " | ")
        texts = name, str(problem), f"chosen: {chosen}", f"{timings.grade}: {timings.source}"
        lines = (textwrap.wrap(text, _LINE, subsequent_indent="    ") for text in texts)
        return "\n".join(chain.from_iterable(lines))


def check_installed() -> None:
    """ConfigError where matplotlib is not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("vllm kernels plot needs matplotlib: pip install 'vllm[plot]'") from error


def picture(panels: Sequence[Panel], title: str, suffix: str) -> bytes:
    """suffix: one of FORMATS. panels: of decisions with times, one at least."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure = _figure(panels, title)
        if suffix == ".png":
            return _saved(figure, "png", dpi=_DPI)
        svg = _saved(figure, "svg", metadata={"Date": None, "Creator": None})
    return svg if suffix == ".svg" else _page(title, svg.decode()).encode()


def _saved(figure: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, **options)
    return file.getvalue()


def _page(title: str, svg: str) -> str:
    """One file that needs no other."""
    drawn = svg[svg.index("<svg") :]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>svg {{ max-width: 100%; height: auto }}</style>\n"
        f"</head>\n<body>\n{drawn}</body>\n</html>\n"
    )


def _figure(panels: Sequence[Panel], title: str) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    drawn = [curves_of(panel.decision) for panel in panels]
    colour_of = colours(curve for curves in drawn for curve in curves)
    legend, lines = _legend(colour_of), textwrap.wrap(title, columns * _TITLE_LINE)
    head = (1 + len(lines)) * _TITLE_LINE_INCHES
    foot = (2 + len(legend) // (2 * columns)) * _LEGEND_LINE_INCHES
    width, height = columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + head + foot
    drawn_share = (0, foot / height, 1, 1 - (foot + head) / height)
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=drawn_share))
    for place, (panel, curves) in enumerate(zip(panels, drawn)):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.set_title(panel.title, fontsize=8, loc="left")
        _draw(axes, place, curves, colour_of)
    figure.suptitle(
        "\n".join(lines), x=0.01, y=1 - 0.12 / height, ha="left", va="top", fontweight="bold"
    )
    figure.legend(handles=legend, loc="lower left", ncols=2 * columns, frameon=False, fontsize=8)
    return figure


def _draw(axes: Any, place: int, curves: Sequence[Curve], colour_of: dict[str, str]) -> None:
    """Each line has an id: `times-0-cutlass`, and `chosen-0-cutlass-1` for its second range."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", yscale="log", xlabel="tokens (M)", ylabel="microseconds")
    for curve in curves:
        tokens, us, errors, _ = zip(*curve.points)
        colour = colour_of[curve.backend]
        if any(errors):
            low = [time / (1 + error) for time, error in zip(us, errors)]
            high = [time * (1 + error) for time, error in zip(us, errors)]
            axes.fill_between(tokens, low, high, color=colour, alpha=0.12, linewidth=0,
                              gid=f"error-{place}-{curve.backend}")  # fmt: skip
        axes.plot(tokens, us, gid=f"times-{place}-{curve.backend}", **_line(curve, colour))
        for number, part in enumerate(chosen_ranges(curve.points)):
            tokens, us, *_ = zip(*part)
            axes.plot(tokens, us, gid=f"chosen-{place}-{curve.backend}-{number}",
                      **_chosen_line(colour))  # fmt: skip
    most = max(point.tokens for curve in curves for point in curve.points)
    axes.xaxis.set_major_locator(FixedLocator([m for m in _TICKS if m <= most]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)


def _line(curve: Curve, colour: str) -> dict[str, Any]:
    """Measured: filled marks; else hollow ones and dashes. What cannot run is faint."""
    face = colour if curve.is_measured else "white"
    style = {"color": colour, "marker": "o", "markersize": 4, "markerfacecolor": face}
    style |= {"linestyle": "-" if curve.is_measured else "--", "linewidth": 1}
    return style | {"alpha": 1.0 if curve.can_run else 0.35}


def _chosen_line(colour: str) -> dict[str, Any]:
    return {"color": colour, "linewidth": 5, "alpha": 0.4, "marker": "o", "markersize": 9,
            "markeredgewidth": 0, "solid_capstyle": "round"}  # fmt: skip


def _legend(colour_of: dict[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "#555555"
    kinds = {
        "measured here": _line(Curve("", True, True, ()), grey),
        "estimated, or timed by others": _line(Curve("", False, True, ()), grey),
        "cannot or may not run here": _line(Curve("", True, False, ()), grey),
        "chosen": _chosen_line(grey),
    }
    handles = [Line2D([], [], color=colour, linewidth=3, label=name)
               for name, colour in colour_of.items()]  # fmt: skip
    handles += [Line2D([], [], label=name, **style) for name, style in kinds.items()]
    return [*handles, Patch(color=grey, alpha=0.2, linewidth=0, label="error of estimates")]
