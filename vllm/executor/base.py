"""What the engine asks of the ranks that compute for it."""

from typing import TYPE_CHECKING, Any, Protocol

from vllm.config import VllmConfig

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.core.scheduler import Step
    from vllm.worker.model_runner import StepResult

Address = tuple[str, int]


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> "StepResult":
        """Waits for its end. To be called once, in the order of launching."""
        ...


class Executor(Protocol):
    """Ranks with the model loaded. config: as resolved with it; max_model_len may have come down.

    num_blocks: of the KV cache, the same on all ranks. runs_ahead: a step may be launched before
    the result of the one before it was taken; of two before it, the first must have been.

    Every method but `shutdown` raises EngineDeadError, with the rank's name, when one is gone.
    """

    config: VllmConfig
    num_blocks: int
    runs_ahead: bool

    def launch(self, step: "Step", bitmasks: "dict[str, Tensor]") -> Launched:
        """Starts a step. bitmasks: allowed tokens of requests that follow a grammar."""
        ...

    def kernels(self) -> dict[str, Any]:
        """The kernel decisions of the first rank."""
        ...

    def check_alive(self) -> None: ...

    def shutdown(self) -> None: ...


def make_executor(config: VllmConfig, meeting: "Address | None" = None) -> Executor:
    """Loads the model on all ranks of one engine.

    meeting: where the ranks of all engines meet, if engines compute in lock step.
    """
    backend = config.parallel_config.executor_backend
    if backend == "uni":
        from vllm.executor.uniproc import UniprocExecutor

        return UniprocExecutor(config, meeting)
    from vllm.executor.workers import WorkersExecutor

    if backend == "ray":
        from vllm.executor.ray import RayLauncher

        return WorkersExecutor(config, RayLauncher(config), meeting)
    from vllm.executor.multiproc import LocalLauncher

    return WorkersExecutor(
        config, LocalLauncher(config.parallel_config.data_parallel_size), meeting
    )
