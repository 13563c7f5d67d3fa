"""Configuration: frozen dataclasses, one file each."""

from vllm.config.cache import CacheConfig
from vllm.config.kernel import KernelConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.vllm import VllmConfig, get_current_vllm_config, set_current_vllm_config

__all__ = [
    "CacheConfig",
    "KernelConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "VllmConfig",
    "get_current_vllm_config",
    "set_current_vllm_config",
]
