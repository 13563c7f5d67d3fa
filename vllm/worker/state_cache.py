"""The recurrent states of running requests: a slot each, of a size that no length changes."""

from collections.abc import Iterable

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
    num_seqs, num_kept = config.scheduler_config.max_num_seqs, len(config.snapshot_slots)
    num_slots = num_seqs + 1 + num_kept  # the first is for rows that fill up a captured graph
    of_one = sum(layer.slot_bytes() for layer in layers)
    free = _free_memory(config, device)
    if num_slots * of_one > free:
        fits = max(free // of_one - 1 - num_kept, 0)
        kept = f" and --num-state-snapshots {num_kept}" if num_kept else ""
        raise ConfigError(
            f"--max-num-seqs {num_seqs}{kept}: so many recurrent states need "
            f"{num_slots * of_one / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB of memory are free; "
            f"lower --max-num-seqs to at most {fits}, less what the KV cache needs"
        )
    for layer in layers:
        layer.allocate(num_slots, device)
    logger.info(
        "Recurrent states: %d requests of %.2f MiB each, %.2f GiB. %s",
        num_seqs,
        of_one / (1 << 20),
        num_slots * of_one / _GIB,
        f"{num_kept} of earlier prompts are kept for those that begin alike"
        if num_kept
        else "Prefix caching is off: a state holds all tokens of its request; with "
        "--enable-prefix-caching copies are kept for others that begin alike",
    )
    return num_slots * of_one


def copy_states(layers: Iterable[GatedDeltaNet], pairs: Iterable[tuple[int, int]]) -> None:
    """Copies states of all layers: pairs of slots, from and to."""
    pairs = list(pairs)
    for layer in layers if pairs else ():
        for states in (layer.conv_state, layer.state):
            for source, target in pairs:
                states[target].copy_(states[source])


def _free_memory(config: VllmConfig, device: torch.device) -> int:
    if device.type == "cpu":
        ranks = config.parallel_config
        return available_memory() // (ranks.num_engine_ranks * ranks.data_parallel_size)
    return gpu_memory(config.cache_config.gpu_memory_utilization).left
