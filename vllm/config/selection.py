"""From what was asked for, on one chip, to the object that layers ask for their kernels.

The engine and `vllm kernels explain` both get theirs here, so that they cannot differ.
"""

from collections.abc import Mapping
from typing import Any

from vllm import envs
from vllm.config.emulate import emulate, not_emulated
from vllm.config.kernel import KernelConfig
from vllm.config.model import ModelConfig
from vllm.config.model_rule import FALLBACK_MESSAGE
from vllm.config.parallel import ParallelConfig
from vllm.config.policy import KernelPreferences, make_policy
from vllm.formats.readers.base import QuantizationConfig
from vllm.kernels.evidence.tables import Chip, find_tables
from vllm.kernels.problems import layer_problems
from vllm.kernels.selection import Selection
from vllm.logger import get_logger
from vllm.machine import Device, Libs
from vllm.platforms.probe import installed_kernel_libs
from vllm.utils.deep_gemm import current_device, is_deep_gemm_supported

logger = get_logger(__name__)


def selection_for(
    device: Device,
    chip: Chip,
    libs: Libs,
    preferences: KernelPreferences,
    env: Mapping[str, Any],
    model_type: str,
) -> Selection:
    """chip: what measurements of `device` depend on. env: `envs.kernel_variables()`. ConfigError
    for what contradicts itself."""
    policy = make_policy(not_emulated(preferences), env)
    selection = Selection(device, libs, policy, find_tables(chip))
    emulate(selection, preferences, env, model_type)
    return selection


def warn_of_model_rule(
    model: ModelConfig,
    kernels: KernelConfig,
    parallel: ParallelConfig,
    undecided: QuantizationConfig,
    decided: QuantizationConfig,
) -> None:
    """Says what serves instead of DeepGEMM, where the rule changes anything: it would have served a
    layer of this model on this machine."""
    if model.decoder is None or not is_deep_gemm_supported():
        return
    device = current_device()
    problems = layer_problems(
        model.hf_config.to_dict(),
        decided,
        dtype=model.dtype,
        kv_format=model.dtype,
        tp=parallel.tensor_parallel_size,
    )
    before, after = (
        selection_for(
            device,
            Chip(device),
            installed_kernel_libs(device),
            kernels.preferences(quant),
            envs.kernel_variables(),
            model.model_type,
        )
        for quant in (undecided, decided)
    )
    instead = {
        after.decide(name, problem).chosen
        for name, problem in problems
        if "deep_gemm" in str(before.decide(name, problem).chosen)
    }
    if instead:
        logger.warning(
            FALLBACK_MESSAGE,
            model.model_type,
            ", ".join(sorted(name.upper() for name in instead if name)) or "no kernel",
        )
