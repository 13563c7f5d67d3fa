"""From flags, variables, the checkpoint and model rules to a `Policy`, by one order of precedence.

1 --kernel (per layer)  2 --linear-backend, --moe-backend  3 environment variables
4 use_deep_gemm of the quantisation config  5 accuracy: --max-requant-error, --requant, the model
rule  6 measured  7 default order
"""

from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

from vllm.config.model_rule import REQUANT, model_rule
from vllm.errors import ConfigError
from vllm.formats import registry as formats
from vllm.formats.scales import Scales
from vllm.kernels import registry
from vllm.kernels.own_backend import SYNTAX, OwnBackend
from vllm.kernels.registry import FLAGS
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.policy import Budget, Override, Policy, Preference
from vllm.kernels.select.reason import (
    RANK_ACCURACY,
    RANK_CONFIG,
    RANK_FLAG,
    RANK_LAYER,
    RANK_VARIABLE,
    Origin,
)
from vllm.machine import Device
from vllm.utils.dataclasses import dataclass, replace


@dataclass(frozen=True)
class KernelPreferences:
    """What a user set. kernels: PATTERN=BACKEND and
    PATTERN=FILE:NAME texts. backends: by family. requant: of REQUANT. require_evidence: a Grade.
    use_deep_gemm: of the quantisation config, None where nobody decided. model_rule: where the
    model rule decided it, its reason. is_exact: the checkpoint's scales are powers of two.
    """

    kernels: tuple[str, ...] = ()
    backends: tuple[tuple[str, str], ...] = ()
    on_unmet: str = "error"
    require_native: bool = False
    max_requant_error: float | None = None
    requant: str = REQUANT[0]
    require_evidence: str = Grade.COMPILED
    use_deep_gemm: bool | None = None
    model_rule: str = ""
    is_exact: bool = False

    def for_device(self, model_type: str, device: Device) -> "KernelPreferences":
        """With the model rule decided for `device`, whatever chip it was decided for before."""
        if self.use_deep_gemm is not None and not self.model_rule:
            return self
        applies = self.requant == REQUANT[0] and not self.is_exact
        rule = model_rule(model_type, device) if applies else ""
        return replace(self, use_deep_gemm=False if rule else None, model_rule=rule)


def make_policy(preferences: KernelPreferences, env: Mapping[str, Any]) -> Policy:
    """env: the kernel variables that are set. ConfigError for what contradicts itself."""
    preferred, exclusions = _deep_gemm(preferences, env)
    overrides = [
        *_layer_overrides(preferences),
        *_flag_overrides(preferences),
        *_variable_overrides(env),
    ]
    _refuse_contradictions(overrides, exclusions)
    exclusions += [Preference(*own, _ONLY_NAMED) for own in registry.own_backends()]
    return Policy(
        overrides=tuple(overrides),
        exclusions=tuple(exclusions),
        preferred=tuple(preferred),
        falls_back=preferences.on_unmet == "fallback",
        requires_native=preferences.require_native,
        least_grade=Grade(preferences.require_evidence),
        e8m0=env.get("VLLM_USE_DEEP_GEMM_E8M0"),
        budgets=tuple(_budgets(preferences)),
    )


def _budgets(preferences: KernelPreferences) -> Iterator[Budget]:
    limit = preferences.max_requant_error
    if limit is not None:
        yield Budget(limit, Origin(RANK_ACCURACY, f"--max-requant-error {limit:.2%}"))
    if preferences.requant == "exact-only":
        origin = Origin(RANK_ACCURACY, "--requant exact-only")
        yield Budget(0.0, origin, frozenset({Scales.UE8M0, Scales.FLOAT32_CEIL_UE8M0}))


_ONLY_NAMED = Origin(RANK_LAYER, "a backend of a file serves the layers that --kernel names")


def _layer_overrides(preferences: KernelPreferences) -> list[Override]:
    overrides = []
    for text in preferences.kernels:
        origin = Origin(RANK_LAYER, f"--kernel {text}")
        if (own := OwnBackend.parse(text)) is not None:
            overrides += [Override(*named, origin, own.pattern) for named in own.load().items()]
            continue
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(
                f"--kernel {text!r}: it takes PATTERN=BACKEND, such as '*.down_proj=triton', or "
                f"{SYNTAX}"
            )
        found = {family: registry.find_backend(family, name) for family in registry.FAMILIES}
        if not any(found.values()):
            every = sorted({n for f in registry.FAMILIES for n in registry.backend_names(f)})
            raise registry.unknown_backend(f"--kernel {text!r}", name, every)
        overrides += [
            Override(f, backend, origin, pattern) for f, backend in found.items() if backend
        ]
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
    variables = [
        ("VLLM_LINEAR_BACKEND", "linear", frozenset[str]()),
        ("VLLM_ATTENTION_BACKEND", "attention", frozenset[str]()),
    ]
    variables += [
        (f.gemm_variable, "linear", frozenset({kind})) for kind, f in formats.formats().items()
    ]
    for variable, family, kinds in variables:
        name = env.get(variable)
        if name is not None and not registry.is_automatic(family, name):
            backend = registry.check_backend_name(family, name, variable)
            origin = _variable(variable, name)
            overrides.append(Override(family, backend, origin, formats=kinds))
    if env.get("VLLM_TEST_FORCE_FP8_MARLIN"):
        origin = _variable("VLLM_TEST_FORCE_FP8_MARLIN", "1")
        overrides += [
            Override(family, "marlin", origin, formats=formats.kinds("fp8"))
            for family in ("linear", "moe")
        ]
    return overrides


def _deep_gemm(
    preferences: KernelPreferences, env: Mapping[str, Any]
) -> tuple[list[Preference], list[Preference]]:
    """What variables say of DeepGEMM: 1 permits and prefers it, 0 excludes it, of
    VLLM_USE_DEEP_GEMM for experts too. Then the quantisation config or the model rule."""
    preferred: list[Preference] = []
    exclusions: list[Preference] = []
    both = ("VLLM_USE_DEEP_GEMM", env.get("VLLM_USE_DEEP_GEMM"))
    moe = ("VLLM_MOE_USE_DEEP_GEMM", env.get("VLLM_MOE_USE_DEEP_GEMM"))
    rule, decided = preferences.model_rule, preferences.use_deep_gemm
    config = Origin(RANK_CONFIG, f"use_deep_gemm = {decided} in the quantisation config")
    if rule and decided is False:
        config = Origin(RANK_ACCURACY, rule)
    of_experts = both if moe[1] is None or both[1] is False else moe
    for family, (variable, said) in (("linear", both), ("moe", of_experts)):
        origin = config if said is None else _variable(variable, int(said))
        if family == "moe" and said is False and moe[1]:
            origin = Origin(RANK_VARIABLE, f"{origin.text}, which outranks {moe[0]}=1")
        answer = decided if said is None else said
        if answer:
            preferred.append(Preference(family, "deep_gemm", origin))
        elif answer is False:
            exclusions.append(Preference(family, "deep_gemm", origin, origin.text == rule))
    return preferred, exclusions


def _refuse_contradictions(overrides: list[Override], exclusions: list[Preference]) -> None:
    """Two preferences of one rank for one layer contradict each other."""
    for first, second in combinations(overrides, 2):
        same = (first.family, first.pattern) == (second.family, second.pattern)
        meet = first.pattern != "*" or _formats(first) & _formats(second)
        if same and meet and first.backend != second.backend:
            _refuse(first.origin, second.origin)
    for override, exclusion in product(overrides, exclusions):
        if (override.family, override.backend) == (exclusion.family, exclusion.backend):
            _refuse(override.origin, exclusion.origin)


def _formats(override: Override) -> frozenset[str]:
    """The weight formats that an override of a whole family speaks of."""
    specs = registry.specs(override.family)
    known = (spec.formats for spec in specs if spec.backend == override.backend)
    return override.formats or frozenset().union(*known)


def _refuse(first: Origin, second: Origin) -> None:
    """Of two ranks the stronger one counts."""
    if first.rank == second.rank:
        raise ConfigError(f"{first.text} and {second.text} contradict each other: leave one out")


def _variable(name: str, value: object) -> Origin:
    return Origin(RANK_VARIABLE, f"{name}={value}")
