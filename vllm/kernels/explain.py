"""Decisions as text for people and as JSON for programs."""

from collections.abc import Iterable
from typing import Any

from vllm.kernels.spec import Decision


def outcome(decision: Decision) -> str:
    """One line: what was chosen for the problem, by whom, or that nothing was."""
    if decision.chosen is None:
        return f"{decision.problem} on {decision.device}: no kernel ({decision.origin.text})"
    return f"{decision.problem} -> {decision.chosen} ({decision.origin.text})"


def table(decision: Decision) -> str:
    """The outcome, then every candidate with all reasons against it."""
    lines = [outcome(decision)]
    width = max((len(c.backend) for c in decision.candidates), default=0)
    for candidate in decision.candidates:
        if candidate.backend == decision.chosen:
            verdict = f"chosen, activations: {candidate.act}"
        elif candidate.reasons:
            verdict = "; ".join(map(str, candidate.reasons))
        else:
            verdict = "could run, later in the order"
        lines.append(f"  {candidate.backend:<{width}}  {verdict}")
    return "\n".join(lines)


def to_json(records: Iterable[tuple[str, Decision]]) -> list[dict[str, Any]]:
    """Decisions with the layers they cover, equal ones grouped, in order of first use."""
    grouped: dict[Decision, list[str]] = {}
    for layer, decision in records:
        grouped.setdefault(decision, []).append(layer)
    return [_decision_json(decision, layers) for decision, layers in grouped.items()]


def _decision_json(decision: Decision, layers: list[str]) -> dict[str, Any]:
    return {
        "layers": layers,
        "problem": {"family": decision.problem.family, "text": str(decision.problem)},
        "chosen": decision.chosen,
        "origin": {"rank": decision.origin.rank, "text": decision.origin.text},
        "candidates": [
            {
                "backend": c.backend,
                "act": c.act,
                "reasons": [{"why": r.why.value, "text": r.text} for r in c.reasons],
            }
            for c in decision.candidates
        ],
    }
