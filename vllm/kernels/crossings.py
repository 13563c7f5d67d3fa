"""Where weights made for quantised arithmetic are widened instead: from native to weight-only."""

from collections.abc import Iterable

from vllm.kernels.layer_groups import Record, compress
from vllm.kernels.problem import ActScheme, LinearProblem, MoEProblem
from vllm.kernels.spec import DEFAULT_ORDER, Decision, Why


def crossing(decision: Decision) -> str:
    """What happened, and what kept the native kernels away; "" where nothing did.

    Only GPUs have native kernels: on a CPU there is nothing to cross from.
    """
    problem = decision.problem
    if decision.device.kind == "cpu" or decision.chosen is None:
        return ""
    if not isinstance(problem, LinearProblem | MoEProblem) or problem.act[0] is ActScheme.NONE:
        return ""
    winner = decision.winner
    if winner.act is not ActScheme.NONE or not problem.weight.is_quantized:
        return ""
    return (
        f"native -> weight-only: {problem.family} {problem.weight} by {winner.backend}, which "
        f"widens weights to {problem.dtype} and does not quantise activations ({problem.act[0]}); "
        f"{_why(decision)}; --require-native refuses this"
    )


def _why(decision: Decision) -> str:
    if decision.origin.rank < DEFAULT_ORDER.rank:
        return decision.origin.text
    before = decision.candidates[: decision.candidates.index(decision.winner)]
    texts = [
        f"{candidate.backend}: {candidate.reasons[0].text}"
        for candidate in before
        if candidate.act not in (None, ActScheme.NONE)
        and not any(reason.why is Why.FORMAT for reason in candidate.reasons)
    ]
    return "; ".join(texts) or "no kernel quantises them"


def crossing_lines(records: Iterable[Record]) -> list[str]:
    """One line per distinct crossing, with the layers it covers."""
    layers_of: dict[str, list[str]] = {}
    for layer, decision in records:
        if text := crossing(decision):
            layers_of.setdefault(text, []).append(layer)
    return [f"{text} ({', '.join(compress(layers))})" for text, layers in layers_of.items()]
