"""Whole models: time of the chosen kernels of a rank over that of the fastest."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm.kernels.select.problem import Measurable


@dataclass(frozen=True)
class Rank:
    """The linear layers and experts of one rank of a model."""

    model: str
    tp: int
    ep: int
    layers: Counter[Measurable]


@dataclass(frozen=True)
class Whole:
    """timed: layers whose chosen kernel was timed, of `layers`. ratio: 1 is the fastest."""

    model: str
    tp: int
    ep: int
    tokens: int
    timed: int
    layers: int
    ratio: float


Times = Mapping[tuple[Measurable, int], tuple[float, float]]
"""By problem and number of tokens, microseconds of the chosen kernel and of the fastest."""


def wholes(ranks: Iterable[Rank], times: Times, tokens: Sequence[int]) -> list[Whole]:
    """Without those of which nothing was timed."""
    found = []
    for rank in ranks:
        for num_tokens in tokens:
            own = [
                (count, *times[problem, num_tokens])
                for problem, count in rank.layers.items()
                if (problem, num_tokens) in times
            ]
            if own:
                chosen, fastest = (sum(one[0] * one[i] for one in own) for i in (1, 2))
                counts = sum(count for count, *_ in own), rank.layers.total()
                place = rank.model, rank.tp, rank.ep, num_tokens
                found.append(Whole(*place, *counts, chosen / fastest))
    return found


def text_of_wholes(found: Sequence[Whole]) -> str:
    """A line for each rank, by numbers of tokens; of layers the fewest that were timed."""
    tokens = sorted({one.tokens for one in found})
    by_rank: dict[tuple[str, int, int], dict[int, Whole]] = {}
    for one in found:
        by_rank.setdefault((one.model, one.tp, one.ep), {})[one.tokens] = one
    columns = "".join(f"{f'M={m}':>8}" for m in tokens)
    lines = [f"{'chosen / fastest':<26}{'TP':>3}{'EP':>3}  {'layers timed':>14}{columns}"]
    for (model, tp, ep), own in by_rank.items():
        fewest = min(own.values(), key=lambda one: one.timed)
        ratios = "".join(f"{own[m].ratio:>8.3f}" if m in own else f"{'-':>8}" for m in tokens)
        timed = f"{fewest.timed} of {fewest.layers}"
        lines.append(f"{model:<26}{tp:>3}{ep:>3}  {timed:>14}{ratios}")
    return "\n".join(lines)
