"""Over how many processes and devices a model is spread."""

from importlib.util import find_spec

from vllm import envs
from vllm.architectures.decoder import Decoder
from vllm.errors import ConfigError, did_you_mean
from vllm.utils.dataclasses import dataclass

EXECUTOR_BACKENDS = ("uni", "mp", "ray")
_MAX_RANKS = 1024
# Ways of VLLM_ALL2ALL_BACKEND in which the host must learn how many rows come.
_WAITING_BACKENDS = ("naive", "deepep_high_throughput")


@dataclass(frozen=True)
class ParallelConfig:
    """tensor_parallel_size: ranks that share each layer. pipeline_parallel_size: ranks in a row,
    each with some of the layers. data_parallel_size: engines that each serve requests of their
    own; data_parallel_rank: which of them this one is. enable_expert_parallel: the experts of a
    mixture are dealt out whole over the tensor- and data-parallel ranks of a stage.

    distributed_executor_backend: where ranks run: `uni` in the engine's process, `mp` in processes
    of this machine, `ray` on a Ray cluster; None: uni for one rank an engine, else mp.
    distributed_timeout_seconds: the longest that one rank waits for another.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    distributed_timeout_seconds: float = 300.0
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX_RANKS:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag} {value!r}: it takes a whole number from 1 to {_MAX_RANKS}"
                )
        backend = self.distributed_executor_backend
        if backend is not None and backend not in EXECUTOR_BACKENDS:
            raise ConfigError(
                f"--distributed-executor-backend {backend!r} is unknown: it takes "
                f"{', '.join(EXECUTOR_BACKENDS)}{did_you_mean(str(backend), EXECUTOR_BACKENDS)}"
            )
        if backend == "uni" and self.num_engine_ranks > 1:
            raise ConfigError(
                f"--distributed-executor-backend uni runs one rank, but an engine has "
                f"{self.num_engine_ranks} (tensor-parallel size {self.tensor_parallel_size} x "
                f"pipeline-parallel size {self.pipeline_parallel_size}); take mp or ray"
            )
        seconds = self.distributed_timeout_seconds
        if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
            raise ConfigError(
                f"--distributed-timeout-seconds {seconds!r}: it takes a number of seconds above 0"
            )

    @property
    def num_engine_ranks(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that the experts of a layer are dealt out to; 1 where they are not."""
        if not self.enable_expert_parallel:
            return 1
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def is_in_lock_step(self) -> bool:
        """Whether engines exchange tokens at every layer, so that all must compute or none."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def needs_eager(self) -> bool:
        """Whether the host waits inside a step, so that no captured graph can hold it."""
        waits = envs.read("VLLM_ALL2ALL_BACKEND") in _WAITING_BACKENDS
        return self.expert_parallel_size > 1 and waits

    @property
    def executor_backend(self) -> str:
        return self.distributed_executor_backend or ("mp" if self.num_engine_ranks > 1 else "uni")


def _check_exchange(parallel: ParallelConfig) -> None:
    """Before weights are read for minutes."""
    backend = envs.read("VLLM_ALL2ALL_BACKEND")
    wants_library = parallel.expert_parallel_size > 1 and backend.startswith("deepep")
    is_elsewhere = parallel.executor_backend == "ray"  # ranks may be on other machines
    if wants_library and not is_elsewhere and find_spec("deep_ep") is None:
        raise ConfigError(
            f"VLLM_ALL2ALL_BACKEND={backend} needs DeepEP, which is not installed; install it "
            f"(https://github.com/deepseek-ai/DeepEP) or take allgather_reducescatter"
        )


def check_parallel(parallel: ParallelConfig, decoder: Decoder) -> None:
    """ConfigError where the model cannot be spread so."""
    if parallel.enable_expert_parallel:
        _check_exchange(parallel)
    tp, ep = parallel.tensor_parallel_size, parallel.expert_parallel_size
    try:
        decoder.check_ranks(tp, ep)
    except ConfigError as error:
        flags = f"--tensor-parallel-size {tp}"
        if parallel.enable_expert_parallel:
            flags += f" --data-parallel-size {parallel.data_parallel_size} --enable-expert-parallel"
        raise ConfigError(f"{flags}: {error}") from None
    if parallel.enable_expert_parallel and not decoder.has_experts:
        raise ConfigError("--enable-expert-parallel: this model has no experts; leave it out")
    num_layers, stages = len(decoder.layers), parallel.pipeline_parallel_size
    if num_layers < stages:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has {num_layers} layers, and every "
            f"stage needs one"
        )
