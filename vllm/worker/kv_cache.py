"""Size and allocation of what layers keep of requests, by the kind of cache that each has: pages
of the KV cache, and recurrent states."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vllm import envs
from vllm.architectures.kv_cache import FullAttentionSpec, RecurrentStateSpec
from vllm.config import VllmConfig
from vllm.core.kv_blocks import BlockNeeds
from vllm.errors import ConfigError
from vllm.logger import get_logger
from vllm.model_executor.layers.recurrent import RecurrentLayer
from vllm.platforms.cpu import available_memory
from vllm.platforms.cuda import gpu_memory
from vllm.utils.math_utils import cdiv
from vllm.worker.block_table import TableLayout
from vllm.worker.cache_layout import CacheLayout
from vllm.worker.touch import touch_in_background

logger = get_logger(__name__)

_GIB = 1 << 30
_DEFAULT_LIMIT = 4 * _GIB
_GRAPH_BYTES = 1 * _GIB


def allocate_kv_cache(
    model: nn.Module,
    config: VllmConfig,
    device: torch.device,
    peak_bytes: int,
    promised_bytes: int,
    agree: Callable[[float], float],
    drafting: nn.Module | None = None,
) -> tuple[int, tuple[TableLayout, ...]]:
    """Gives every attention layer its part of the cache; returns the number of blocks, and where
    they lie for each cache group.

    peak_bytes: memory of a GPU that the largest step needs beyond what is allocated now.
    promised_bytes: memory of the CPU that is spoken for without being taken yet. agree: the least
    number of all ranks, given that of this one. drafting: the part of the model whose layers
    have blocks besides for drafts.
    """
    layers = _layers_with(model, FullAttentionSpec)
    block_size = config.cache_config.block_size
    num_blocks = config.cache_config.num_blocks
    num_bytes = config.cache_config.kv_cache_memory_bytes
    ranks = config.parallel_config.tensor_parallel_size
    others = _layers_with(drafting, FullAttentionSpec) if drafting is not None else []
    layout = CacheLayout(layers, config.cache_groups, ranks, others, config.num_draft_blocks)
    block_bytes = block_size * layout.token_bytes
    scratch_bytes = block_size * layout.scratch_bytes
    if num_blocks is not None and layers:
        num_blocks = num_blocks * layout.whole_bytes // layout.token_bytes
    elif num_blocks is None and not layers:
        # Of a stage, or a model, of recurrent layers alone: blocks that take no memory.
        num_blocks = _most_blocks(config)
    elif num_blocks is None and num_bytes is not None:
        num_blocks = max(0, num_bytes - scratch_bytes) // block_bytes
    elif num_blocks is None and device.type == "cpu":
        num_blocks = _num_blocks_on_cpu(block_bytes, config, promised_bytes + scratch_bytes)
    elif num_blocks is None:
        num_blocks = _num_blocks_on_gpu(block_bytes, config, peak_bytes + scratch_bytes)
    num_blocks = int(agree(num_blocks))
    _check_size(block_bytes, config, device, num_blocks)
    caches = layout.allocate(num_blocks, block_size, device)
    if device.type == "cpu":
        states = (tensor for layer in state_layers(model) for tensor in _state_tensors(layer))
        touch_in_background((*states, *caches))
    _log_size(config, num_blocks, num_blocks * block_bytes / _GIB)
    return num_blocks, layout.tables


def _needs(config: VllmConfig) -> BlockNeeds:
    limits = config.scheduler_config
    size = config.cache_config.block_size
    return BlockNeeds(size, config.cache_groups, limits.max_num_batched_tokens)


def _log_size(config: VllmConfig, num_blocks: int, gib: float) -> None:
    needs, block_size = _needs(config), config.cache_config.block_size
    if not any(group.window for group in needs.groups):
        logger.info("KV cache: %d blocks of %d tokens, up to %.2f GiB", num_blocks, block_size, gib)
        return
    kinds = [
        f"{size} tokens in layers with {f'a window of {group.window}' if group.window else 'none'}"
        for group, size in zip(needs.groups, needs.sizes)
    ]
    longest = needs.longest(num_blocks, config.model_config.max_model_len)
    logger.info(
        "KV cache: %d blocks, up to %.2f GiB, each of %s: %.1f requests of %d tokens (all layers "
        "keeping all: %.1f)",
        num_blocks, gib, ", or of ".join(reversed(kinds)), num_blocks / needs.resting(longest),
        longest, num_blocks / sum(cdiv(longest, size) for size in needs.sizes),
    )  # fmt: skip


def _layers_with(model: nn.Module, kind: type[Any]) -> list[Any]:
    """Layers whose description has a cache of this kind."""
    return [part for part in model.modules() if isinstance(getattr(part, "cache_spec", None), kind)]


def _check_size(
    block_bytes: int, config: VllmConfig, device: torch.device, num_blocks: int
) -> None:
    """ConfigError where the cache has no room for a block, or memory none for the cache."""
    block_size = config.cache_config.block_size
    gib = block_bytes / _GIB
    if num_blocks < 2:
        raise ConfigError(
            f"--block-size {block_size}: a block takes {gib:.3g} GiB, and the KV cache has no room "
            f"for 2 of them: lower it, or {_for_more_room(config, device.type)}"
        )
    cache = config.cache_config
    if cache.num_blocks is None and cache.kv_cache_memory_bytes is None:
        return  # sized from what is free
    free = (available_memory() if device.type == "cpu" else gpu_memory(1.0).free) / _GIB
    if num_blocks * gib > free and cache.num_blocks is None:
        raise ConfigError(
            f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes} is more than the {free:.1f} "
            f"GiB of memory that are free"
        )
    if num_blocks * gib > free:
        given, taken = cache.num_blocks or 0, num_blocks * gib
        raise ConfigError(
            f"--num-gpu-blocks-override {given}: blocks of {block_size} tokens take {taken:.1f} "
            f"GiB, and {free:.1f} GiB of memory are free; take at most {int(free / taken * given)}"
        )


def _for_more_room(config: VllmConfig, device_kind: str) -> str:
    """What makes the cache larger."""
    if config.cache_config.num_blocks is not None:
        return "raise --num-gpu-blocks-override"
    if config.cache_config.kv_cache_memory_bytes is not None:
        return "raise --kv-cache-memory-bytes"
    if device_kind == "cpu":
        return "raise VLLM_CPU_KVCACHE_SPACE (GiB)"
    cache = config.cache_config
    narrower = "" if cache.kv_cache_dtype.startswith("fp8") else ", take --kv-cache-dtype fp8"
    return (
        f"raise --gpu-memory-utilization (now {cache.gpu_memory_utilization}){narrower}, or spread "
        f"the model over more GPUs (--tensor-parallel-size)"
    )


def fit_max_model_len(config: VllmConfig, num_blocks: int, device_kind: str) -> VllmConfig:
    """The config with a max_model_len that the cache can hold. One that the user gave is not
    lowered: ConfigError."""
    model = config.model_config
    num_tokens = _needs(config).longest(num_blocks, model.max_model_len)
    if num_tokens >= model.max_model_len:
        return config
    if model.is_max_model_len_given:
        raise ConfigError(
            f"the KV cache holds {num_tokens} tokens, fewer than --max-model-len "
            f"{model.max_model_len}; lower that to at most {num_tokens}, or "
            f"{_for_more_room(config, device_kind)}"
        )
    logger.warning(
        "Serving %d tokens a request instead of the model's %d: that is what the KV cache holds. "
        "For more, %s.",
        num_tokens, model.max_model_len, _for_more_room(config, device_kind),
    )  # fmt: skip
    return replace(config, model_config=replace(model, max_model_len=num_tokens))


def _num_blocks_on_gpu(block_bytes: int, config: VllmConfig, peak_bytes: int) -> int:
    """What is left beside weights, the largest step and captured graphs with their logits: of this
    engine's share of the GPU (gpu_memory_utilization, whatever others use), and of what is free at
    all."""
    share = config.cache_config.gpu_memory_utilization
    memory = gpu_memory(share)
    logit_bytes = 4 * config.scheduler_config.max_num_seqs * config.model_config.vocab_size
    needed = peak_bytes + _GRAPH_BYTES + logit_bytes
    left = memory.left - needed
    if left < 2 * block_bytes:
        raise ConfigError(
            f"--gpu-memory-utilization {share}: {memory.total * share / _GIB:.1f} of "
            f"{memory.total / _GIB:.1f} GiB. Of these the weights take {memory.own / _GIB:.1f} and "
            f"a step {needed / _GIB:.1f}, and {memory.free / _GIB:.1f} GiB of the GPU are free, "
            f"which leaves no KV cache: raise it, lower --max-num-batched-tokens, or end what else "
            f"uses the GPU"
        )
    return left // block_bytes


def _num_blocks_on_cpu(block_bytes: int, config: VllmConfig, promised_bytes: int) -> int:
    """As many as all requests can use at their longest, within the memory there is."""
    space = envs.VLLM_CPU_KVCACHE_SPACE
    free = max(0, available_memory() - promised_bytes)
    if space is not None:
        if space * _GIB > free:
            raise ConfigError(
                f"VLLM_CPU_KVCACHE_SPACE={space} GiB is more than the {free / _GIB:.1f} GiB of "
                f"memory that are free"
            )
        return int(space * _GIB) // block_bytes
    ranks = config.parallel_config
    num_ranks = ranks.num_engine_ranks * ranks.data_parallel_size
    return min(_most_blocks(config), min(_DEFAULT_LIMIT, free // 2 // num_ranks) // block_bytes)


def _most_blocks(config: VllmConfig) -> int:
    """All requests at their longest."""
    longest = _needs(config).of(config.model_config.max_model_len)
    return longest * config.scheduler_config.max_num_seqs


# ---------------------------------------------------------------- recurrent states


def state_layers(model: nn.Module) -> list[RecurrentLayer]:
    return _layers_with(model, RecurrentStateSpec)


def _state_tensors(layer: RecurrentLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.conv_state, layer.state


def allocate_states(model: nn.Module, config: VllmConfig, device: torch.device) -> int:
    """Gives every recurrent layer its states; returns their bytes, on the CPU of pages that are
    taken only when they are used. ConfigError where memory does not hold them."""
    layers = state_layers(model)
    if not layers:
        return 0
    num_seqs, num_kept = config.scheduler_config.max_num_seqs, len(config.snapshot_slots)
    num_drafts = config.num_draft_states
    # The first is for rows that fill up a captured graph.
    num_slots = 1 + num_seqs + num_drafts + num_kept
    ranks = config.parallel_config.tensor_parallel_size
    of_one = sum(layer.cache_spec.request_bytes(layer.dtype.itemsize, ranks) for layer in layers)
    free = _free_memory(config, device)
    if num_slots * of_one > free:
        fits = max(free // of_one - 1 - num_drafts - num_kept, 0)
        kept = f" and --num-state-snapshots {num_kept}" if num_kept else ""
        drafts = f" and {num_drafts} draft tokens (--speculative-config)" if num_drafts else ""
        raise ConfigError(
            f"--max-num-seqs {num_seqs}{kept}{drafts}: so many recurrent states need "
            f"{num_slots * of_one / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB of memory are free; "
            f"lower --max-num-seqs to at most {fits}, less what the KV cache needs"
        )
    for layer in layers:
        layer.allocate(num_slots, device)
    logger.info(
        "Recurrent states: %d requests of %.2f MiB each, %.2f GiB%s. %s",
        num_seqs,
        of_one / (1 << 20),
        num_slots * of_one / _GIB,
        f" with those after {num_drafts} draft tokens" if num_drafts else "",
        f"{num_kept} of earlier prompts are kept for those that begin alike"
        if num_kept
        else "Prefix caching is off: a state holds all tokens of its request; with "
        "--enable-prefix-caching copies are kept for others that begin alike",
    )
    return num_slots * of_one


def copy_states(layers: Iterable[RecurrentLayer], pairs: list[tuple[int, int]]) -> None:
    """Copies states of all layers: pairs of slots, from and to."""
    for layer in layers if pairs else ():
        for states in _state_tensors(layer):
            for source, target in pairs:
                states[target].copy_(states[source])


def _free_memory(config: VllmConfig, device: torch.device) -> int:
    if device.type == "cpu":
        ranks = config.parallel_config
        return available_memory() // (ranks.num_engine_ranks * ranks.data_parallel_size)
    return gpu_memory(config.cache_config.gpu_memory_utilization).left
