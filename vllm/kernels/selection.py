"""The choices made for one model on one device: what layers ask, and what `/kernels` shows."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from vllm.errors import ConfigError, nearest_names
from vllm.kernels import registry
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.versions import stale_summary, versions_here
from vllm.kernels.report import json_report, text_report
from vllm.kernels.report.ledger import Ledger
from vllm.kernels.report.report import Report
from vllm.kernels.report.side_effects import side_effect_lines, waits
from vllm.kernels.select.decision import (
    Candidate,
    Decision,
    FasterInBf16,
    NoKernelError,
    Record,
)
from vllm.kernels.select.policy import Policy, Preference
from vllm.kernels.select.problem import Problem
from vllm.kernels.select.reason import RANK_FLAG, RANK_VARIABLE, Origin, Why
from vllm.kernels.select.select import select
from vllm.logger import get_logger
from vllm.machine import Device, Libs
from vllm.utils.dataclasses import dataclass, field, replace

logger = get_logger(__name__)


@dataclass(eq=False)
class Selection:
    """Asks `select` once per distinct problem and remembers which layers each answer covers.

    known: what is known of kernel times on this chip. variables: those that are set and
    that `policy` follows. is_emulated: the chip is not at
    hand. emulated: by family, who chooses instead of this one. records: (layer, decision) in the
    order of asking. ledger: what was re-quantised at load. prefix: of the names of all layers,
    where another model's are beside them.
    """

    device: Device
    libs: Libs
    policy: Policy
    known: Known = field(default_factory=Known)
    variables: Mapping[str, Any] = field(default_factory=dict)
    is_emulated: bool = False
    emulated: "dict[str, Selection]" = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    prefix: str = ""

    def __post_init__(self) -> None:
        self._by_layer = [override for override in self.policy.overrides if override.pattern != "*"]
        self._decided: dict[tuple[Problem, tuple[bool, ...]], Decision] = {}
        # The same by object, which layers that are alike share: hashing it takes longer.
        self._of_objects: dict[int, tuple[Problem, Decision]] = {}

    def afresh(self) -> "Selection":
        """One that has not been asked anything."""
        emulated = {family: one.afresh() for family, one in self.emulated.items()}
        return replace(self, emulated=emulated, records=[], ledger=Ledger())

    def beside(self, other: "Selection", prefix: str) -> "Selection":
        """Of a second model of the engine, whose decisions are listed with those of `other`."""
        return replace(self, records=other.records, ledger=other.ledger, prefix=prefix)

    def choose(self, layer: str, problem: Problem) -> Decision:
        """The decision for `layer`; NoKernelError with every reason when nothing can serve it."""
        decision = self.decide(layer, problem)
        if decision.chosen is None:
            raise NoKernelError(
                f"no kernel for {self.prefix}{layer}\n{text_report.table(decision)}", decision
            )
        return decision

    def decide(self, layer: str, problem: Problem) -> Decision:
        """The same, with `chosen=None` instead of an error."""
        layer = self.prefix + layer
        elsewhere = self.emulated.get(problem.family)
        decision = elsewhere.decide(layer, problem) if elsewhere else self._decided_for(problem)
        if decision is None:
            decision = self._decide(layer, problem)
            self._of_objects[id(problem)] = problem, decision
        self.records.append((layer, decision))
        return decision

    def _decided_for(self, problem: Problem) -> Decision | None:
        """None where it was not asked yet, or the answer depends on the layer's name."""
        found = self._of_objects.get(id(problem))
        return None if found is None or self._by_layer else found[1]

    def _decide(self, layer: str, problem: Problem) -> Decision:
        key = (problem, tuple(override.matches(layer) for override in self._by_layer))
        decision = self._decided.get(key)
        if decision is None:
            specs = registry.specs(problem.family, self.device.family)
            versions = versions_here(problem.family, problem.format, self.device, self.libs)
            timings = self.known.evidence(problem, versions)
            if self.is_emulated:
                problem = replace(problem, dtype="bf16")  # as GPUs serve, whatever is served here
            decision = select(problem, self.device, self.libs, self.policy, specs, layer, timings)
            decision = replace(
                decision,
                is_emulated=self.is_emulated,
                faster_in_bf16=self._faster_in_bf16(decision),
            )
            self._decided[key] = decision
        return decision

    def _faster_in_bf16(self, decision: Decision) -> FasterInBf16 | None:
        if decision.chosen is None:
            return None
        return self.known.faster_in_bf16(decision.problem, decision.parts)

    def is_refuted(self, winner: Candidate, requant_error: float) -> bool:
        """Whether what re-quantising a weight was measured to cost speaks against the winner: more
        than a budget allows, or anything at all where it was taken to be exact."""
        budgets = (b for b in self.policy.budgets if not b.forms or winner.scales in b.forms)
        is_over = any(requant_error > budget.error for budget in budgets)
        return is_over or (requant_error > 0 and not winner.is_lossy)

    def replace(self, layer: str, earlier: Decision, problem: Problem) -> Decision:
        """Decides anew for `layer`, of whose weight more is known now than at first."""
        position = self.records.index((self.prefix + layer, earlier))
        decision = self.choose(layer, problem)
        self.records[position] = self.records.pop()
        return decision

    def check_overrides(self) -> None:
        """Now that all layers have asked: a warning for a preference that no layer follows,
        ConfigError for a flag that means no layer, and
        NoKernelError for a wish that none of the layers it means could follow.

        A variable that means no layer is worth a warning only: variables are set for a machine,
        flags for a model.
        """
        for preference in self.policy.preferred:
            if text := self._unmet(preference):
                logger.warning("%s", text)
        for origin, asked in self._asked().items():
            if not asked and origin.rank <= RANK_FLAG:
                raise ConfigError(f"{origin.text} means no layer of this model{self._fix(origin)}")
            if not asked and origin.rank == RANK_VARIABLE:
                logger.warning("%s means no layer of this model", origin.text)
            must_obey = origin.rank <= RANK_VARIABLE and not self.policy.falls_back
            own = [(backend, d) for backend, d in asked if d.origin.rank >= origin.rank]
            if own and must_obey and all(d.chosen != backend for backend, d in own):
                raise NoKernelError(
                    f"{origin.text}, but no layer of this model can follow it\n"
                    f"{text_report.table(own[0][1])}",
                    own[0][1],
                )

    def _fix(self, origin: Origin) -> str:
        """What to give instead of an override that means no layer."""
        meant = [override for override in self._by_layer if override.origin == origin]
        families = {override.family for override in meant}
        names = [name for name, d in self.records if d.problem.family in families]
        found = nearest_names(meant[0].pattern, names) if meant else []
        return f"; did you mean {' or '.join(found)}?" if found else "; leave it out"

    def _unmet(self, preference: Preference) -> str:
        """Why a backend that is preferred can serve no layer; "" where it can serve one, or where
        none has weights for it."""
        own = [
            candidate
            for _, decision in self.records
            for candidate in decision.candidates
            if decision.problem.family == preference.family
            and candidate.backend == preference.backend
            and all(reason.why is not Why.FORMAT for reason in candidate.reasons)
        ]
        if not own or not all(candidate.reasons for candidate in own):
            return ""
        why = own[0].reasons[0].text
        return f"{preference.origin.text}, but no layer can be served by {own[0].backend}: {why}"

    def _asked(self) -> dict[Origin, list[tuple[str, Decision]]]:
        """By origin of the overrides: the backend each asks for, and the layers it means."""
        asked: dict[Origin, list[tuple[str, Decision]]] = {}
        own = (o for o in self.policy.overrides if o.family not in self.emulated)
        others = (selection.policy.overrides for selection in self.emulated.values())
        for override in chain(own, *others):
            specs = registry.specs(override.family)
            asked.setdefault(override.origin, []).extend(
                (override.backend, decision)
                for layer, decision in self.records
                if override.applies_to(layer, decision.problem, specs)
            )
        return asked

    @property
    def needs_eager(self) -> bool:
        """Whether the host waits for a chosen kernel, so that no CUDA graph can hold a step."""
        return any(waits(decision) for _, decision in self.records)

    def report(self) -> Report:
        """What was decided so far."""
        variables = json_report.variable_texts(self.variables)
        return Report(self.device, self.libs, variables, self.records, self.ledger)

    def to_json(self) -> dict[str, Any]:
        """What GET /kernels and --dump-decisions show."""
        return json_report.report(*self.report())

    def log(self) -> None:
        """One line per distinct decision with the layers it covers, and what was re-quantised."""
        for line in text_report.log_lines(self.records):
            logger.info("%s", line)
        for line in side_effect_lines(self.records):
            logger.warning("%s", line)
        if line := stale_summary(self.records):
            logger.warning("%s", line)
        logger.info("%s", self.ledger.summary())
