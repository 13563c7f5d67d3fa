"""Chooses where the ranks of an engine run."""

from vllm.config import VllmConfig
from vllm.executor.base import Address, Executor


def make_executor(config: VllmConfig, rendezvous: Address | None = None) -> Executor:
    """Loads the model on all ranks of one engine. rendezvous: address of the store of all
    data-parallel ranks, where they step in lock-step."""
    backend = config.parallel_config.executor_backend
    if backend == "uni":
        from vllm.executor.uniproc import UniprocExecutor

        return UniprocExecutor(config, rendezvous)
    from vllm.executor.workers import Launcher, LocalLauncher, WorkersExecutor

    launcher: Launcher = LocalLauncher(config.parallel_config.data_parallel_size)
    if backend == "ray":
        from vllm.executor.ray import RayLauncher

        launcher = RayLauncher(config)
    return WorkersExecutor(config, launcher, rendezvous)
