"""How `vllm top` draws a frame, with rich."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm.entrypoints.cli.top_metrics import QUANTILES, Frame
from vllm.utils.terminal import takes_controls

_MAX_KERNELS = 12
_BAR_WIDTH = 30


class Kernel(NamedTuple):
    """Layers of one format that one backend serves, and what decided."""

    backend: str
    weights: str
    family: str
    by: str


@contextmanager
def shown(console: Console, is_live: bool) -> Iterator[Callable[[RenderableType], None]]:
    """A function that shows a frame in place of the last one, or below it where that cannot be."""
    if not is_live or not takes_controls(console.file):
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda content: live.update(content, refresh=True)


def view(url: str, now: Frame, kernels: Counter[Kernel]) -> RenderableType:
    title = Text.assemble((", ".join(now.models) or "no model", "bold"), f" at {url}")
    return Group(title, "", _load(now), "", _latencies(now), "", _kernels(kernels))


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))


def _load(now: Frame) -> Table:
    table = Table.grid(padding=(0, 2))
    hits = "-" if now.prefix_hits is None else f"{now.prefix_hits:.0%} of prompt tokens"
    rows = [
        ("requests", f"{now.running} running, {now.waiting} waiting",
         f"{now.request_rate:.1f} finished/s"),
        ("tokens", f"{now.generation_rate:.1f} generated/s", f"{now.prompt_rate:.1f} of prompts/s"),
        ("KV cache", f"{now.kv_cache:.1%}", _bar(now.kv_cache)),
        ("prefix hits", hits, f"{now.preemptions} preemptions, {now.restarts} restarts"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _bar(share: float) -> str:
    return f"{'#' * round(share * _BAR_WIDTH):.<{_BAR_WIDTH}}"


def _latencies(now: Frame) -> Table:
    since = "since the start" if now.latencies_since_start else "in the last minute"
    table = _titled(f"Latency {since} (s)")
    table.add_column("")
    for share in QUANTILES:
        table.add_column(f"p{share * 100:.0f}", justify="right")
    for name, values in now.latencies.items():
        texts = ["-"] * len(QUANTILES) if values is None else [f"{value:.3f}" for value in values]
        table.add_row(name, *texts)
    return table


def _kernels(kernels: Counter[Kernel]) -> Table:
    table = _titled("Kernels")
    for name in ("backend", "serves", "weights", "decided by"):
        table.add_column(name)
    table.add_column("layers", justify="right")
    common = kernels.most_common()
    for kernel, number in common[:_MAX_KERNELS]:
        table.add_row(kernel.backend, kernel.family, kernel.weights, kernel.by, str(number))
    if rest := sum(number for _, number in common[_MAX_KERNELS:]):
        table.add_row("others", "", "", "", str(rest))
    return table
