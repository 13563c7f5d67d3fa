"""The interface between the engine and the ranks that run its model."""

from typing import TYPE_CHECKING, Any, Protocol

from vllm.config import VllmConfig
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from torch import Tensor

Address = tuple[str, int]


class PendingOutput(Protocol):
    """The output of a step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step. To be called once, in the order of the steps."""
        ...


class Executor(Protocol):
    """Ranks with the model loaded. config: as resolved with it; max_model_len may be lower.

    num_blocks: of the KV cache, the same on all ranks. async_scheduling: one step may be started
    while the result of the one before it is pending.

    Every method but `shutdown` raises EngineDeadError, with the rank's name, when a rank is gone.
    """

    config: VllmConfig
    num_blocks: int
    async_scheduling: bool

    def execute_model(
        self, scheduler_output: SchedulerOutput, bitmasks: "dict[str, Tensor]"
    ) -> PendingOutput:
        """Starts a step. bitmasks: allowed tokens of requests with a grammar."""
        ...

    def kernels(self) -> dict[str, Any]:
        """The kernel decisions of all layers, those of a pipeline stage by its first rank."""
        ...

    def check_alive(self) -> None: ...

    def shutdown(self) -> None: ...
