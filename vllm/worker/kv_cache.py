"""Size and allocation of the KV cache."""

from dataclasses import replace

from torch import nn

from vllm import envs
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import get_logger
from vllm.model_executor.layers.attention import Attention
from vllm.ops.paged_attention import PagedAttention
from vllm.platforms.cpu import available_memory
from vllm.utils.math_utils import cdiv

logger = get_logger(__name__)

_GIB = 1 << 30
_DEFAULT_LIMIT = 4 * _GIB


def allocate_kv_cache(model: nn.Module, config: VllmConfig) -> int:
    """Gives every attention layer its part of the cache; returns the number of blocks."""
    kernels = [module.kernel for module in model.modules() if isinstance(module, Attention)]
    num_blocks = config.cache_config.num_blocks or _num_blocks(kernels, config)
    block_size = config.cache_config.block_size
    for kernel in kernels:
        kernel.allocate(num_blocks, block_size)
    size = num_blocks * sum(kernel.block_bytes(block_size) for kernel in kernels) / _GIB
    logger.info("KV cache: %d blocks of %d tokens, up to %.2f GiB", num_blocks, block_size, size)
    return num_blocks


def fit_max_model_len(config: VllmConfig, num_blocks: int) -> VllmConfig:
    """The config with a max_model_len that the cache can hold.

    One that the user gave is not lowered: ConfigError.
    """
    num_tokens = num_blocks * config.cache_config.block_size
    model = config.model_config
    if num_tokens >= model.max_model_len:
        return config
    if model.is_max_model_len_given:
        raise ConfigError(
            f"the KV cache holds {num_tokens} tokens, fewer than --max-model-len "
            f"{model.max_model_len}; lower that to at most {num_tokens}, or raise "
            f"VLLM_CPU_KVCACHE_SPACE (GiB)"
        )
    logger.warning(
        "Serving %d tokens a request instead of the model's %d: that is what the KV cache holds. "
        "Raise VLLM_CPU_KVCACHE_SPACE (GiB) for more.",
        num_tokens,
        model.max_model_len,
    )
    return replace(config, model_config=replace(model, max_model_len=num_tokens))


def _num_blocks(kernels: list[PagedAttention], config: VllmConfig) -> int:
    """As many as all requests can use at their longest, within the memory there is."""
    block_size = config.cache_config.block_size
    block_bytes = sum(kernel.block_bytes(block_size) for kernel in kernels)
    space = envs.VLLM_CPU_KVCACHE_SPACE
    free = available_memory()
    if space is not None:
        if space * _GIB > free:
            raise ConfigError(
                f"VLLM_CPU_KVCACHE_SPACE={space} GiB is more than the {free / _GIB:.1f} GiB of "
                f"memory that are free"
            )
        return int(space * _GIB) // block_bytes
    longest = cdiv(config.model_config.max_model_len, block_size)
    wanted = longest * config.scheduler_config.max_num_seqs
    return min(wanted, min(_DEFAULT_LIMIT, free // 2) // block_bytes)
