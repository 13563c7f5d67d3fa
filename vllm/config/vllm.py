"""The whole configuration: resolved once, frozen, handed to everything."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from vllm import envs
from vllm.config.cache import CacheConfig
from vllm.config.kernel import KernelConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig, check_parallel
from vllm.config.policy import model_rule
from vllm.config.scheduler import SchedulerConfig
from vllm.formats.readers.base import QuantizationConfig
from vllm.formats.readers.registry import find_quantization
from vllm.logger import get_logger
from vllm.utils.deep_gemm import current_device, is_deep_gemm_supported

logger = get_logger(__name__)


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
    quant_config: QuantizationConfig | None = None

    def __post_init__(self) -> None:
        if self.quant_config is None and self.model_config.hf_config is not None:
            model = self.model_config
            configs = (model.hf_config, model.hf_text_config)
            found = find_quantization(configs, model.path, model.quantization, model.model)
            object.__setattr__(self, "quant_config", found)
        object.__setattr__(self, "quant_config", self._with_model_rule())
        if self.model_config.decoder is not None:
            check_parallel(self.parallel_config, self.model_config.decoder)

    @property
    def snapshot_slots(self) -> range:
        """Slots of recurrent states that are kept for later requests, after those of running ones
        (1 to max_num_seqs; 0 is nobody's)."""
        has_states, cache = self.model_config.has_recurrent_states, self.cache_config
        count = cache.num_state_snapshots if has_states and cache.enable_prefix_caching else 0
        first = self.scheduler_config.max_num_seqs + 1
        return range(first, first + count)

    def _with_model_rule(self) -> QuantizationConfig | None:
        """An undecided `use_deep_gemm` becomes False for a model that loses accuracy by it.

        A variable that is set explicitly outranks the rule. The message is for those who would
        have run DeepGEMM; elsewhere nothing changes for anyone.
        """
        quant, model_type = self.quant_config, self.model_config.model_type
        if quant is None or not quant.can_use_deep_gemm or quant.use_deep_gemm is not None:
            return quant
        if envs.is_set("VLLM_USE_DEEP_GEMM"):
            return quant
        if not (rule := model_rule(model_type, current_device())):
            return quant
        if is_deep_gemm_supported():
            logger.info(
                "Auto-disabled DeepGemm for model_type=%s on Blackwell. DeepGemm E8M0 scale format "
                "causes accuracy degradation for this architecture. Falling back to CUTLASS. "
                "To disable DeepGemm globally, set VLLM_USE_DEEP_GEMM=0.",
                model_type,
            )
        decided = copy.copy(quant)
        decided.use_deep_gemm, decided.model_rule = False, rule
        return decided


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
