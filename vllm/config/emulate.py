"""`emulate:deep_gemm@sm_100`: another chip's choice and numbers, computed on this device.

    --linear-backend emulate:sm_100             what the selector picks on that chip
    --linear-backend emulate:deep_gemm@sm_100   that backend, as if asked for there

The chip is taken to have every library. Problems are judged in bfloat16, as GPUs serve them, and
the kernel of `backends/emulation.py` reproduces how the winner rounds weights and activations.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config.policy import KernelPreferences, make_policy
from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.registry import FLAGS
from vllm.kernels.report import question
from vllm.kernels.select.reason import RANK_FLAG, Origin
from vllm.kernels.selection import Selection
from vllm.machine import Device
from vllm.utils.dataclasses import dataclass, replace

PREFIX = "emulate:"
_FAMILIES = ("linear", "moe")


@dataclass(frozen=True)
class Emulated:
    """device: the chip. backend: which one it is to use, None for its own choice."""

    device: Device
    backend: str | None

    @classmethod
    def parse(cls, family: str, text: str) -> "Emulated | None":
        """None for a name that asks for no emulation; ConfigError for a wrong one that does."""
        if not text.startswith(PREFIX):
            return None
        source = f"{FLAGS[family]} {text}"
        if family not in _FAMILIES:
            raise ConfigError(f"{source}: only {' and '.join(FLAGS[f] for f in _FAMILIES)} emulate")
        name, at, chip = text.removeprefix(PREFIX).rpartition("@")
        try:
            device = question.device_of(chip)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        if device.kind != "cuda":
            raise ConfigError(f"{source}: it takes a GPU's architecture, such as {PREFIX}sm_100")
        return cls(device, registry.check_backend_name(family, name, source) if at else None)


def emulate(
    here: Selection, preferences: KernelPreferences, env: Mapping[str, Any], model_type: str
) -> None:
    """Gives `here` a selection for each family that is to be emulated."""
    for family, text in preferences.backends:
        emulated = Emulated.parse(family, text)
        if emulated is None:
            continue
        asked = [(family, emulated.backend)] if emulated.backend else []
        there = replace(preferences, backends=tuple(asked)).for_device(model_type, emulated.device)
        policy = make_policy(there, env)
        origin = Origin(RANK_FLAG, f"{FLAGS[family]} {text}")
        own = tuple(
            replace(override, origin=origin) if override.origin.rank == RANK_FLAG else override
            for override in policy.overrides
            if override.family == family
        )
        libs = question.libs_of("all", emulated.device)
        here.emulated[family] = Selection(
            emulated.device, libs, replace(policy, overrides=own), is_emulated=True
        )


def not_emulated(preferences: KernelPreferences) -> KernelPreferences:
    """The preferences for this device itself."""
    kept = tuple((f, text) for f, text in preferences.backends if not text.startswith(PREFIX))
    return replace(preferences, backends=kept)
