"""The choices made for one model on one device: what layers ask, and what `/kernels` shows."""

from vllm.kernels import explain, registry
from vllm.kernels.select import select
from vllm.kernels.spec import Decision, Device, Libs, NoKernelError, Override, Policy, Problem
from vllm.logger import get_logger

logger = get_logger(__name__)


class Selection:
    """Asks `select` once per distinct problem and remembers which layers each answer covers."""

    def __init__(self, device: Device, libs: Libs, policy: Policy):
        self.device = device
        self.libs = libs
        self.policy = policy
        self.records: list[tuple[str, Decision]] = []
        self._decided: dict[tuple[Problem, Override | None], Decision] = {}

    def choose(self, layer: str, problem: Problem) -> Decision:
        """The decision for `layer`; NoKernelError with every reason when nothing can serve it."""
        key = (problem, self.policy.forced(problem.family, layer))
        decision = self._decided.get(key)
        if decision is None:
            decision = select(problem, self.device, self.libs, self.policy, registry.specs(), layer)
            self._decided[key] = decision
        self.records.append((layer, decision))
        if decision.chosen is None:
            raise NoKernelError(f"no kernel for {layer}\n{explain.table(decision)}", decision)
        return decision

    def to_json(self) -> dict[str, object]:
        return {
            "device": str(self.device),
            "libs": str(self.libs),
            "decisions": explain.to_json(self.records),
        }

    def log(self) -> None:
        """One line per distinct decision, with the number of layers it covers."""
        counts: dict[Decision, int] = {}
        for _, decision in self.records:
            counts[decision] = counts.get(decision, 0) + 1
        for decision, count in counts.items():
            logger.info("%s, %d layer%s", explain.outcome(decision), count, "s" * (count > 1))
