"""The whole configuration: resolved once, frozen, handed to everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.config.cache import CacheConfig
from vllm.config.kernel import KernelConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization import QuantizationConfig


@dataclass(frozen=True)
class VllmConfig:
    """Usable with no arguments; `EngineArgs.create_engine_config` makes a full one.

    quant_config: how the checkpoint's weights are quantised, None for not at all; derived from
    the model config where it is not given.
    """

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    quant_config: "QuantizationConfig | None" = None

    def __post_init__(self) -> None:
        if self.quant_config is None and self.model_config.hf_config is not None:
            from vllm.model_executor.layers.quantization import quantization_config_of

            object.__setattr__(self, "quant_config", quantization_config_of(self.model_config))


_current: ContextVar[VllmConfig] = ContextVar("vllm_config")


@contextmanager
def set_current_vllm_config(config: VllmConfig) -> Iterator[None]:
    """Makes `config` the one `get_current_vllm_config` returns inside the block."""
    token = _current.set(config)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_vllm_config() -> VllmConfig:
    """The config set by the innermost `set_current_vllm_config`, or a default one."""
    return _current.get(None) or VllmConfig()
