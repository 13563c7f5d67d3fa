"""From flags, variables, the checkpoint and model rules to a `Policy`, by one order of precedence.

1 --kernel (per layer)  2 --linear-backend, --moe-backend  3 environment variables
4 use_deep_gemm of the quantisation config  5 model rule  6 measured  7 default order
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.errors import ConfigError
from vllm.formats import registry as formats
from vllm.kernels import registry
from vllm.kernels.registry import FLAGS
from vllm.kernels.select.policy import (
    RANK_CONFIG,
    RANK_FLAG,
    RANK_LAYER,
    RANK_MODEL_RULE,
    RANK_VARIABLE,
    Exclusion,
    Origin,
    Override,
    Policy,
)
from vllm.kernels.select.reason import Why
from vllm.machine import Device
from vllm.utils.deep_gemm import should_auto_disable_deep_gemm

# Reasons that a single layer gives by itself; the others hold for the whole machine.
_OF_THE_LAYER = frozenset({Why.SHAPE, Why.FORMAT, Why.DTYPE})


@dataclass(frozen=True)
class KernelPreferences:
    """What a user set. kernels: PATTERN=BACKEND texts. backends: by family. use_deep_gemm: of the
    quantisation config, None where nobody decided. model_rule: where the model rule decided it,
    its reason.
    """

    kernels: tuple[str, ...] = ()
    backends: tuple[tuple[str, str], ...] = ()
    on_unmet: str = "error"
    require_native: bool = False
    max_requant_error: float | None = None
    use_deep_gemm: bool | None = None
    model_rule: str = ""

    def for_device(self, model_type: str, device: Device) -> "KernelPreferences":
        """With the model rule decided for another chip than the one of the configuration."""
        if self.use_deep_gemm is not None and not self.model_rule:
            return self
        rule = model_rule(model_type, device)
        return replace(self, use_deep_gemm=False if rule else None, model_rule=rule)


def model_rule(model_type: str, device: Device) -> str:
    """Why this model is not served by DeepGEMM on this chip; "" where it may be."""
    if not should_auto_disable_deep_gemm(model_type, device):
        return ""
    return f"model rule: {model_type} loses accuracy with DeepGEMM's E8M0 scales on {device.family}"


def make_policy(preferences: KernelPreferences, env: Mapping[str, Any]) -> Policy:
    """env: `envs.kernel_variables()`. ConfigError for what contradicts itself."""
    overrides = [
        *_layer_overrides(preferences),
        *_flag_overrides(preferences),
        *_variable_overrides(env),
    ]
    exclusions = _variable_exclusions(env)
    overrides += _config_overrides(preferences, exclusions)
    exclusions += _config_exclusions(preferences, env)
    _refuse_contradictions(overrides, exclusions)
    return Policy(
        overrides=tuple(overrides),
        exclusions=tuple(exclusions),
        falls_back=preferences.on_unmet == "fallback",
        requires_native=preferences.require_native,
        e8m0=env.get("VLLM_USE_DEEP_GEMM_E8M0"),
        max_requant_error=preferences.max_requant_error,
    )


def _layer_overrides(preferences: KernelPreferences) -> list[Override]:
    overrides = []
    for text in preferences.kernels:
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(
                f"--kernel {text!r}: it takes PATTERN=BACKEND, such as '*.down_proj=triton'"
            )
        found = [f for f in registry.FAMILIES if registry.find_backend(f, name)]
        if not found:
            every = sorted({n for f in registry.FAMILIES for n in registry.backend_names(f)})
            raise registry.unknown_backend(f"--kernel {text!r}", name, every)
        origin = Origin(RANK_LAYER, f"--kernel {text}")
        for family in found:
            backend = registry.find_backend(family, name)
            assert backend is not None
            overrides.append(Override(family, backend, origin, pattern))
    return overrides


def _flag_overrides(preferences: KernelPreferences) -> list[Override]:
    return [
        Override(
            family,
            registry.check_backend_name(family, name, FLAGS[family]),
            Origin(RANK_FLAG, f"{FLAGS[family]} {name}"),
        )
        for family, name in preferences.backends
    ]


def _variable_overrides(env: Mapping[str, Any]) -> list[Override]:
    overrides = []
    if (name := env.get("VLLM_LINEAR_BACKEND")) is not None:
        backend = registry.check_backend_name("linear", name, "VLLM_LINEAR_BACKEND")
        overrides.append(Override("linear", backend, _variable("VLLM_LINEAR_BACKEND", name)))
    for kind, known in formats.formats().items():
        variable = known.gemm_variable
        if (name := env.get(variable)) is not None:
            backend = registry.check_backend_name("linear", name, variable)
            origin = _variable(variable, name)
            overrides.append(Override("linear", backend, origin, formats=frozenset({kind})))
    if env.get("VLLM_TEST_FORCE_FP8_MARLIN"):
        origin = _variable("VLLM_TEST_FORCE_FP8_MARLIN", "1")
        overrides += [
            Override(family, "marlin", origin, formats=formats.kinds("fp8"))
            for family in ("linear", "moe")
        ]
    for family, (variable, value) in _deep_gemm_variables(env).items():
        if value:
            origin = _variable(variable, "1")
            overrides.append(Override(family, "deep_gemm", origin, yields_to=_OF_THE_LAYER))
    return overrides


def _variable_exclusions(env: Mapping[str, Any]) -> list[Exclusion]:
    return [
        Exclusion(family, "deep_gemm", _variable(variable, "0"))
        for family, (variable, value) in _deep_gemm_variables(env).items()
        if value is False
    ]


def _deep_gemm_variables(env: Mapping[str, Any]) -> dict[str, tuple[str, bool | None]]:
    """By family, the variable that speaks of it and what it says."""
    both = ("VLLM_USE_DEEP_GEMM", env.get("VLLM_USE_DEEP_GEMM"))
    moe = ("VLLM_MOE_USE_DEEP_GEMM", env.get("VLLM_MOE_USE_DEEP_GEMM"))
    return {"linear": both, "moe": both if moe[1] is None else moe}


def _config_overrides(preferences: KernelPreferences, stronger: list[Exclusion]) -> list[Override]:
    if not preferences.use_deep_gemm:
        return []
    origin = Origin(RANK_CONFIG, "use_deep_gemm = True in the quantisation config")
    excluded = {exclusion.family for exclusion in stronger}
    return [
        Override(family, "deep_gemm", origin, yields_to=frozenset(Why))
        for family in ("linear", "moe")
        if family not in excluded
    ]


def _config_exclusions(preferences: KernelPreferences, env: Mapping[str, Any]) -> list[Exclusion]:
    """What the quantisation config excludes, where no variable speaks."""
    if preferences.use_deep_gemm is not False:
        return []
    origin = Origin(RANK_CONFIG, "use_deep_gemm = False in the quantisation config")
    if preferences.model_rule:
        origin = Origin(RANK_MODEL_RULE, preferences.model_rule)
    said = {family for family, (_, value) in _deep_gemm_variables(env).items() if value is not None}
    return [
        Exclusion(family, "deep_gemm", origin) for family in ("linear", "moe") if family not in said
    ]


def _refuse_contradictions(overrides: list[Override], exclusions: list[Exclusion]) -> None:
    """Two preferences of one rank for one layer contradict each other."""
    for i, first in enumerate(overrides):
        for second in overrides[i + 1 :]:
            same = (first.family, first.origin.rank, first.pattern) == (
                second.family,
                second.origin.rank,
                second.pattern,
            )
            meet = first.pattern != "*" or _formats(first) & _formats(second)
            if same and meet and first.backend != second.backend:
                raise _contradiction(first.origin, second.origin)
        for exclusion in exclusions:
            if (first.family, first.backend, first.origin.rank) == (
                exclusion.family,
                exclusion.backend,
                exclusion.origin.rank,
            ):
                raise _contradiction(first.origin, exclusion.origin)


def _formats(override: Override) -> frozenset[str]:
    """The weight formats that an override of a whole family speaks of."""
    specs = registry.specs(override.family)
    known = (spec.formats for spec in specs if spec.backend == override.backend)
    return override.formats or frozenset().union(*known)


def _contradiction(first: Origin, second: Origin) -> ConfigError:
    return ConfigError(f"{first.text} and {second.text} contradict each other: leave one out")


def _variable(name: str, value: object) -> Origin:
    return Origin(RANK_VARIABLE, f"{name}={value}")
