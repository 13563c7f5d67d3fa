"""The recurrent states of running requests: a slot each, of a size that no length changes."""

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import get_logger
from vllm.model_executor.layers.delta_net import GatedDeltaNet
from vllm.platforms.cpu import available_memory
from vllm.platforms.cuda import gpu_memory

logger = get_logger(__name__)

_GIB = 1 << 30


def state_layers(model: nn.Module) -> list[GatedDeltaNet]:
    return [module for module in model.modules() if isinstance(module, GatedDeltaNet)]


def allocate_states(model: nn.Module, config: VllmConfig, device: torch.device) -> int:
    """Gives every recurrent layer its states; returns their bytes, on the CPU of pages that are
    taken only when they are used. ConfigError where memory does not hold them."""
    layers = state_layers(model)
    if not layers:
        return 0
    num_seqs = config.scheduler_config.max_num_seqs
    num_slots = num_seqs + 1  # the first is for rows that fill up a captured graph
    of_one = sum(layer.slot_bytes() for layer in layers)
    free = _free_memory(config, device)
    if num_slots * of_one > free:
        fits = max(free // of_one - 1, 0)
        raise ConfigError(
            f"--max-num-seqs {num_seqs}: the recurrent states of so many requests need "
            f"{num_slots * of_one / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB of memory are free; "
            f"lower it to at most {fits}, less what the KV cache needs"
        )
    for layer in layers:
        layer.allocate(num_slots, device)
    logger.info(
        "Recurrent states: %d requests of %.2f MiB each, %.2f GiB. Prefix caching is off: a state "
        "holds all tokens of its request, and others that only begin alike cannot share it",
        num_seqs,
        of_one / (1 << 20),
        num_slots * of_one / _GIB,
    )
    return num_slots * of_one


def _free_memory(config: VllmConfig, device: torch.device) -> int:
    if device.type == "cpu":
        ranks = config.parallel_config
        return available_memory() // (ranks.num_engine_ranks * ranks.data_parallel_size)
    return gpu_memory(config.cache_config.gpu_memory_utilization).left
