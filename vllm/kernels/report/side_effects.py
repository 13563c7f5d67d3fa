"""Side effects of a decision on a GPU: weights that are rounded a second time or dequantised
(native to weight-only), steps that cannot be captured in a CUDA graph, emulation where no kernel
can run."""

from collections.abc import Callable, Iterable

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.kernels import registry
from vllm.kernels.report.layer_groups import by_text
from vllm.kernels.select.decision import Candidate, Decision, Record
from vllm.kernels.select.problem import WeightProblem
from vllm.kernels.select.reason import DEFAULT_ORDER, Why


def side_effect(decision: Decision) -> str:
    """The side effect and what rejected the preferred kernels; "" for none, as on every CPU."""
    if decision.device.kind == "cpu" or decision.chosen is None:
        return ""
    if waits(decision):
        return _not_captured(decision)
    return _emulated(decision) or _requantised(decision) or _dequantised(decision)


def waits(decision: Decision) -> bool:
    """Whether the host waits for the GPU when it calls the chosen kernel."""
    if decision.device.kind == "cpu" or decision.chosen is None or decision.is_emulated:
        return False
    return any(spec.waits for spec in registry.winning_specs(decision))


def _not_captured(decision: Decision) -> str:
    problem = decision.problem
    return (
        f"no CUDA graphs: {problem.family} {problem.dtype} by {decision.chosen}, for which the "
        f"host waits at every call; {_decider(decision) or _reasons(decision)}"
    )


def _reasons(decision: Decision, counts: Callable[[Candidate], bool] = lambda _: True) -> str:
    """The first reason against each preferred kernel that counts."""
    before = decision.candidates[: decision.candidates.index(decision.winner)]
    own = (c for c in before if c.reasons and counts(c))
    return "; ".join(f"{c.backend}: {c.reasons[0].text}" for c in own)


def _emulated(decision: Decision) -> str:
    is_emulation = any(spec.is_emulation for spec in registry.winning_specs(decision))
    if not is_emulation or decision.is_emulated or _decider(decision):
        return ""
    problem = decision.problem
    return (
        f"no kernel: {problem.family} {problem.format} by {decision.chosen}, which computes what a "
        f"kernel would, many times as slowly; {_reasons(decision)}"
    )


def _requantised(decision: Decision) -> str:
    winner, problem = decision.winner, decision.problem
    if not winner.is_lossy or winner.requant is None or winner.scales == Scales.ACTIVATION:
        return ""
    grade = ", estimated from the format" if winner.requant.is_estimated else ""
    return (
        f"re-quantised: {problem.family} {problem.format} by {winner.backend}, which takes "
        f"{winner.scales} scales: the weights are rounded a second time, a relative error of about "
        f"{winner.requant.error:.2%}{grade}; --requant exact-only avoids it"
    )


def _dequantised(decision: Decision) -> str:
    problem = decision.problem
    if not isinstance(problem, WeightProblem) or problem.act[0] is ActScheme.NONE:
        return ""
    winner = decision.winner
    if winner.act is not ActScheme.NONE or not problem.weight.is_quantized:
        return ""
    return (
        f"native -> weight-only: {problem.family} {problem.weight} by {winner.backend}, which "
        f"widens weights to {problem.dtype} and does not quantise activations ({problem.act[0]}); "
        f"{_decider(decision) or _reasons(decision, _quantises) or 'no kernel quantises them'}; "
        "--require-native refuses this"
    )


def _quantises(candidate: Candidate) -> bool:
    """Whether it takes the format, and quantises activations."""
    takes_format = all(reason.why is not Why.FORMAT for reason in candidate.reasons)
    return takes_format and candidate.act not in (None, ActScheme.NONE)


def _decider(decision: Decision) -> str:
    """The origin of the choice; "" for the default order."""
    return decision.origin.text if decision.origin.rank < DEFAULT_ORDER.rank else ""


def side_effect_lines(records: Iterable[Record]) -> list[str]:
    """One line per distinct side effect, with the layers it covers."""
    return [f"{text} ({layers})" for text, layers in by_text(records, side_effect).items()]
