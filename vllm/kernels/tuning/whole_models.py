"""How far whole models are from the fastest kernels that a table has for their layers.

For each model, number of ranks and number of tokens: the time of the kernels that the selector
chooses with the table, over all layers of a rank, as a ratio to that of the fastest measured ones.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from vllm.formats.readers.registry import resolve_quantization
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import Chip, Table
from vllm.kernels.problems import layer_problems
from vllm.kernels.report.model_files import find_model
from vllm.kernels.report.question import libs_of
from vllm.kernels.report.text_report import expectation_of
from vllm.kernels.select.decision import Decision, Evidence
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import WeightProblem
from vllm.kernels.selection import Selection
from vllm.kernels.step_bytes import weight_bytes

MODELS = ("Qwen3-8B-FP8", "Qwen3-30B-A3B-FP8", "Qwen3.5-35B-A3B-FP8", "Qwen3-235B-A22B-FP8")
RANKS = (1, 2, 4, 8)
TOKENS = (1, 16, 64, 512, 4096)
# Of a rank's weights: with fewer measured, the sum says nothing of the model.
MIN_SHARE = 0.5


@dataclass(frozen=True)
class WholeModel:
    """num_measured: linear layers and experts whose chosen kernel was measured for all TOKENS, of
    num_layers. share: of the rank's weights, in bytes. ratios: by TOKENS, over those layers; 1 is
    the fastest."""

    chip: Chip
    model: str
    tp: int
    num_layers: int
    num_measured: int
    share: float
    ratios: tuple[float, ...]


def whole_models(table: Table) -> Iterator[WholeModel]:
    """Of models whose weights `table` has for the most part. Every library is taken to be there."""
    for model, tp in product(MODELS, RANKS):
        found = _whole_model(table, model, tp)
        if found.share >= MIN_SHARE:
            yield found


def _whole_model(table: Table, model: str, tp: int) -> WholeModel:
    device = table.chip.device
    files = find_model(model)
    quant = resolve_quantization(files.quantization(), None, model)
    asked = layer_problems(files.config, quant, dtype="bf16", kv_format="bf16", tp=tp)
    counts = Counter(p for _, p in asked if isinstance(p, WeightProblem))
    selection = Selection(device, libs_of("all", device), Policy(), Known((table,)))
    measured = {
        problem: times
        for problem in counts
        if (times := times_of(selection.decide(str(problem), problem), TOKENS)) is not None
    }
    ratios = []
    for place in range(len(TOKENS) if measured else 0):
        pairs = [(counts[problem], times[place]) for problem, times in measured.items()]
        chosen, fastest = (sum(count * pair[i] for count, pair in pairs) for i in (0, 1))
        ratios.append(chosen / fastest)
    size, own = (
        sum(counts[problem] * weight_bytes(problem) for problem in problems)
        for problems in (counts, measured)
    )
    num_measured = sum(counts[problem] for problem in measured)
    layers = counts.total(), num_measured
    return WholeModel(table.chip, model, tp, *layers, own / size, tuple(ratios))


def times_of(decision: Decision, tokens: Sequence[int]) -> list[tuple[float, float]] | None:
    """By number of tokens, microseconds of what is chosen and of the fastest that could be; None
    where the chosen kernel was not measured for all of them."""
    timings = decision.timings
    found = []
    for num_tokens in tokens if timings is not None else ():
        assert timings is not None
        if num_tokens not in timings.tokens:
            return None
        choice = expectation_of(replace(decision, timings=at_tokens(timings, num_tokens)))
        if choice is None:
            return None
        ((_, us),) = choice.us
        found.append((us, us / (1 + choice.worst_regret)))
    return found or None


def at_tokens(timings: Evidence, num_tokens: int) -> Timings:
    """Times for so many tokens alone, which `timings` has."""
    place = timings.tokens.index(num_tokens)
    us = tuple((backend, (times[place],)) for backend, times in timings.us)
    return Timings(timings.source, (num_tokens,), us)


def text(found: Sequence[WholeModel]) -> str:
    """A line for each, under a heading."""
    lines = [
        "whole models, time of the chosen kernels over that of the fastest measured:",
        f"{'chip':<16} {'model':<20} {'TP':>2} {'measured':>11} {'weights':>8}"
        + "".join(f"{f'M={m}':>8}" for m in TOKENS),
    ]
    for one in found:
        chip = one.chip.file_name.removesuffix(".json")
        measured = f"{one.num_measured} of {one.num_layers}"
        ratios = "".join(f"{ratio:>8.3f}" for ratio in one.ratios)
        lines.append(
            f"{chip:<16} {one.model:<20} {one.tp:>2} {measured:>11} {one.share:>8.1%}{ratios}"
        )
    return "\n".join(lines)
