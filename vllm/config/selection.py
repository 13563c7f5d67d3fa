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
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.tables import Chip
from vllm.kernels.problems import layer_problems
from vllm.kernels.selection import Selection
from vllm.logger import get_logger
from vllm.machine import Device, Libs
from vllm.platforms.probe import installed_kernel_libs
from vllm.utils.dataclasses import dataclass, field, replace
from vllm.utils.deep_gemm import current_device, is_deep_gemm_supported

logger = get_logger(__name__)


@dataclass(frozen=True)
class Facts:
    """What decisions depend on besides the model and the flags. libs: with the kernels in
    quarantine. known: of kernel times on this chip. variables: by name, those that are set and
    that kernel selection follows."""

    device: Device
    libs: Libs
    known: Known = field(default_factory=Known)
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, chip: Chip, libs: Libs) -> "Facts":
        """With the tables and variables of this machine. ConfigError for a table that is broken."""
        return cls(chip.device, libs, Known.of(chip), envs.kernel_variables())


def selection_for(facts: Facts, preferences: KernelPreferences, model_type: str) -> Selection:
    """preferences: of the flags and the checkpoint; the model rule is decided here, for the chip of
    `facts`. ConfigError for what contradicts itself."""
    preferences, variables = preferences.for_device(model_type, facts.device), facts.variables
    policy = make_policy(not_emulated(preferences), variables)
    selection = Selection(facts.device, facts.libs, policy, facts.known, variables)
    emulate(selection, preferences, variables, model_type)
    return selection


def warn_of_model_rule(
    model: ModelConfig,
    kernels: KernelConfig,
    parallel: ParallelConfig,
    quant: QuantizationConfig,
) -> None:
    """Says what serves instead of DeepGEMM, where the rule changes anything: it would have served a
    layer of this model on this machine."""
    if model.decoder is None or not is_deep_gemm_supported():
        return
    device = current_device()
    facts = Facts.of(Chip(device), installed_kernel_libs(device))
    problems = layer_problems(
        model.hf_config.to_dict(),
        quant,
        dtype=model.dtype,
        kv_format=model.dtype,
        tp=parallel.tensor_parallel_size,
        ep=parallel.expert_parallel_size,
    )
    ruled = kernels.preferences(quant)
    before, after = (
        selection_for(facts, preferences, model.model_type)
        for preferences in (replace(ruled, requant="allow"), ruled)
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
