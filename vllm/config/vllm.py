"""The whole configuration: resolved once, frozen, handed to everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm.architectures.cache_groups import WHOLE, CacheGroup, cache_groups
from vllm.config.cache import CacheConfig
from vllm.config.kernel import KernelConfig
from vllm.config.model import ModelConfig
from vllm.config.model_rule import with_model_rule
from vllm.config.parallel import ParallelConfig, check_parallel
from vllm.config.scheduler import SchedulerConfig
from vllm.config.selection import warn_of_model_rule
from vllm.config.speculative import STEP_DRAFT_TOKENS, SpeculativeConfig
from vllm.errors import CheckpointError
from vllm.formats.readers.base import QuantizationConfig
from vllm.formats.readers.registry import find_quantization
from vllm.formats.stored_scales import with_stored_scales
from vllm.kernels.problems import named_wrongly
from vllm.logger import get_logger
from vllm.utils.dataclasses import dataclass, field

logger = get_logger(__name__)


@dataclass(frozen=True)
class VllmConfig:
    """Usable with no arguments; `EngineArgs.create_engine_config` makes a full one.

    quant_config: how the checkpoint's weights are quantised, None for not at all; derived from
    the model config where it is not given. speculative_config: None for no draft tokens.
    """

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    quant_config: QuantizationConfig | None = None
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        self.kernel_config.load_backends()
        if self.quant_config is None and self.model_config.hf_config is not None:
            model = self.model_config
            configs = (model.hf_config, model.hf_text_config)
            found = find_quantization(configs, model.path, model.quantization, model.model)
            object.__setattr__(self, "quant_config", found)
            self._check_named_layers()
        self._decide_use_deep_gemm()
        if self.model_config.decoder is not None:
            check_parallel(self.parallel_config, self.model_config.decoder)

    def _check_named_layers(self) -> None:
        quant, model = self.quant_config, self.model_config
        if quant is None or model.decoder is None:
            return
        if text := named_wrongly(tuple(model.decoder.items()), quant, model.slot_name):
            raise CheckpointError(f"{model.model}: {text}")

    def _decide_use_deep_gemm(self) -> None:
        """By the checkpoint's scales and the model rule, where nobody decided."""
        model, kernels = self.model_config, self.kernel_config
        folder = model.path if model.hf_config is not None else None
        read = with_stored_scales(self.quant_config, None if model.is_dummy else folder)
        decided = with_model_rule(read, model.model_type, kernels.requant)
        object.__setattr__(self, "quant_config", decided)
        if read is not None and decided is not None and read is not decided and folder is not None:
            warn_of_model_rule(model, kernels, self.parallel_config, decided)

    @property
    def max_num_logits(self) -> int:
        """Rows of logits that a step computes at most."""
        drafts = STEP_DRAFT_TOKENS if self.speculative_config is not None else 0
        limits = self.scheduler_config
        return min(limits.max_num_seqs + drafts, limits.max_num_batched_tokens)

    @property
    def num_draft_states(self) -> int:
        """Recurrent states after draft tokens that a step keeps, at most, beside one of each
        request: that after the last accepted token becomes its request's."""
        drafts, limit = self.speculative_config, self.scheduler_config.max_num_seqs
        if drafts is None or not self.model_config.has_recurrent_states:
            return 0
        num_seqs = min(limit, drafts.disable_by_batch_size or limit)
        return min(num_seqs * drafts.num_speculative_tokens, STEP_DRAFT_TOKENS)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers by what they keep of a request; the same on all ranks."""
        decoder = self.model_config.decoder
        if decoder is None or self.cache_config.disable_hybrid_kv_cache_manager:
            return WHOLE
        if self.speculative_config is not None and self.speculative_config.has_model:
            return WHOLE  # what drafts keeps all tokens, under the same block ids
        caches = (layer.mixer.cache for layer in decoder.layers if layer.mixer is not None)
        return cache_groups(caches, self.parallel_config.tensor_parallel_size)

    @property
    def num_draft_blocks(self) -> int:
        """Blocks of the KV cache of a model or layer that drafts, beside those of requests: for
        draft tokens that have none yet."""
        drafts = self.speculative_config
        if drafts is None or not drafts.has_model:
            return 0
        of_one = -(-drafts.num_speculative_tokens // self.cache_config.block_size)
        return min(self.scheduler_config.max_num_seqs * of_one, STEP_DRAFT_TOKENS)

    @property
    def snapshot_slots(self) -> range:
        """Slots of recurrent states that are kept for later requests, after those of running ones
        and their draft tokens (from 1 on; 0 is nobody's)."""
        has_states, cache = self.model_config.has_recurrent_states, self.cache_config
        count = cache.num_state_snapshots if has_states and cache.enable_prefix_caching else 0
        first = self.scheduler_config.max_num_seqs + self.num_draft_states + 1
        return range(first, first + count)


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
