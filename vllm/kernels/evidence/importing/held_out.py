"""What choosing by imported tables costs, for sizes that are in them and for sizes left out."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.evidence.imported import ImportedTimes, Kind, Size, formats, place_in_tables
from vllm.kernels.evidence.known import as_evidence
from vllm.kernels.select.decision import Evidence, Parts
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem, WeightProblem
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs

# Where the README of the measurements splits all sizes alike.
ONE_SPLIT = 1024
# Most that the time of the chosen kernel may be over the fastest's, as a geometric mean.
GOAL = 1.05


class HeldOut(NamedTuple):
    """What choosing costs. mean, worst: time of the chosen kernel over the fastest's. num_sizes:
    those asked; num_unknown: those of them where a kernel is chosen that nobody measured; chosen:
    decisions there, each once."""

    how: str
    mean: float
    worst: float
    num_sizes: int
    num_unknown: int = 0
    chosen: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.num_unknown < self.num_sizes

    @property
    def reaches_goal(self) -> bool:
        return self.is_known and self.mean <= GOAL


class Chooser:
    """The selector of a chip with these libraries, for problems of one kind of table."""

    def __init__(self, device: Device, libs: Libs, kind: Kind):
        self._device, self._libs, self._kind = device, libs, kind
        self._weight, acts = next(
            (WeightFormat.parse(text), acts) for text, (name, acts) in formats().items()
            if name == kind.format
        )  # fmt: skip
        self._act = tuple(dict.fromkeys((*map(ActScheme, acts), ActScheme.NONE)))

    def choice(self, size: Size, times: ImportedTimes | None) -> tuple[str, Parts]:
        """What serves a layer of that size, where `times` are all that is known."""
        problem = self._problem(size)
        evidence: Evidence | None = None
        # Of partial scale blocks a kernel computes other sizes than those that were measured.
        if times is not None and place_in_tables(problem, self._kind.routing) is not None:
            evidence = as_evidence(times)
        specs = registry.specs(problem.family, self._device.family)
        decision = select(problem, self._device, self._libs, Policy(), specs, evidence=evidence)
        if decision.chosen is None:
            return "no kernel", ()
        return decision.chosen, decision.parts

    def _problem(self, size: Size) -> WeightProblem:
        if len(size) == 2:
            return LinearProblem(*size, self._weight, self._act, "bf16")
        hidden, intermediate, top_k, num_experts, ranks = size
        return MoEProblem(
            *(num_experts, top_k, hidden, intermediate, self._weight, self._act, "bf16"),
            cut_experts=ranks,
            activation=self._kind.activation,
        )


def held_out(kind: Kind, chooser: Chooser) -> list[HeldOut]:
    """Over the sizes with a time of every backend, where there are several: what the selector
    chooses with all that is measured, with single sizes left out and with whole models left out;
    for comparison one choice for all, and the best single split. [] where there is no choice."""
    if len(kind.by_backend) < 2 or not kind.complete_sizes():
        return []
    found = [_choosing(kind, chooser, "nothing left out", _none)]
    if found[0].is_known:
        found.append(_choosing(kind, chooser, "single sizes left out", _is_same))
    if found[0].is_known and len(kind.complete_sizes()[0]) > 2:
        found.append(_choosing(kind, chooser, "whole models left out", is_cut))
    names = list(kind.by_backend)
    found += [_fixed(kind, f"always {name}", ((None, name),)) for name in names]
    splits = (
        _fixed(
            kind,
            f"{few} up to {ONE_SPLIT} tokens, then {many}",
            ((ONE_SPLIT, few), (None, many)),
        )
        for few, many in permutations(names, 2)
    )
    return [*found, min(splits, key=lambda one: one.mean)]


def _none(a: Size, b: Size) -> bool:
    return False


def _is_same(a: Size, b: Size) -> bool:
    return a == b


def is_cut(a: Size, b: Size) -> bool:
    """Whether two sizes of experts may be ranks' shares of one model."""
    return len(a) > 2 and (a[0], *a[2:4]) == (b[0], *b[2:4]) and _is_power_of_two(a[1], b[1])


def _is_power_of_two(a: int, b: int) -> bool:
    ratio, rest = divmod(max(a, b), min(a, b))
    return not rest and not ratio & (ratio - 1)


def _choosing(
    kind: Kind, chooser: Chooser, how: str, is_left_out: Callable[[Size, Size], bool]
) -> HeldOut:
    logs: list[float] = []
    unknown: list[str] = []
    for size in kind.complete_sizes():
        chosen, parts = chooser.choice(size, kind.at(size, skip=partial(is_left_out, size)))
        if all(backend in kind.by_backend for _, backend in parts) and parts:
            logs += _costs(kind, size, parts)
        else:
            unknown.append(chosen)
    return _held_out(kind, how, logs, unknown)


def _fixed(kind: Kind, how: str, parts: Parts) -> HeldOut:
    logs = [cost for size in kind.complete_sizes() for cost in _costs(kind, size, parts)]
    return _held_out(kind, how, logs, [])


def _held_out(kind: Kind, how: str, logs: Sequence[float], unknown: Sequence[str]) -> HeldOut:
    mean, worst = exp(fmean(logs or [0.0])), exp(max(logs, default=0.0))
    num_sizes, names = len(kind.complete_sizes()), tuple(dict.fromkeys(unknown))
    return HeldOut(how, mean, worst, num_sizes, len(unknown), names)


def _costs(kind: Kind, size: Size, parts: Parts) -> Iterator[float]:
    """log(chosen / fastest) for each token count that every backend was measured for."""
    measured = kind.at(size)
    assert measured is not None
    us = dict(measured.us)
    for i, tokens in enumerate(measured.tokens):
        known = {name: time for name, own in us.items() if (time := own[i]) is not None}
        if len(known) == len(us):
            chosen = next(name for limit, name in parts if limit is None or tokens <= limit)
            yield log(known[chosen] / min(known.values()))
