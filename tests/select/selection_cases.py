"""Problems, machines and wishes that the selection tests and the decision table share.

Wishes are written as a user writes them: `VLLM_USE_DEEP_GEMM=1 --linear-backend cutlass`.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vllm import envs
from vllm.config.policy import KernelPreferences, make_policy
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.problems import expert_act
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
)
from vllm.kernels.select.select import select
from vllm.machine import NATIVE, Device, Lib, Libs

DEVICES = ("75", "80", "89", "90", "100", "103", "110", "120", "121", "cpu")
MODELS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "llama")

# The activation schemes that checkpoints in each format allow, best liked first.
SCHEMES: dict[str, tuple[ActScheme, ...]] = {
    "bf16": (ActScheme.NONE,),
    "fp8-tensor": (ActScheme.STATIC_TENSOR, ActScheme.NONE),
    "fp8-channel": (ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.NONE),
    "fp8-block": (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE),
    "mxfp8": (ActScheme.MXFP8_GROUP32, ActScheme.NONE),
    "mxfp4": (ActScheme.NONE,),
    "nvfp4": (ActScheme.NVFP4_GROUP16, ActScheme.NONE),
    "int4-group[128]": (ActScheme.NONE,),
    "int8-channel": (ActScheme.DYNAMIC_TOKEN_INT8, ActScheme.NONE),
}
FORMATS = tuple(SCHEMES)

_ALL_SPECS = [spec for family in registry.FAMILIES for spec in registry.specs(family)]
_NATIVE_ARCHS = sorted({arch for spec in _ALL_SPECS for arch in spec.native_archs})
_TORCH = Lib("torch", "2.13.0", ("scaled-blocks",))
_BASE = (
    _TORCH,
    Lib("triton", "3.5.0"),
    Lib(NATIVE, "0.1.0", tuple(_NATIVE_ARCHS)),
)
_DEEP_GEMM = Lib("deep_gemm", "2.6")
_DEEP_GEMM_SM120 = Lib("deep_gemm", "2.6", ("sm120",))
_FLASHINFER = Lib("flashinfer", "0.6.13")
_MODULES = ("fused_moe_90", "fused_moe_100", "fused_moe_103", "fused_moe_120")
_WHOLE_FLASHINFER = (Lib("flashinfer", "0.6.13", _MODULES), Lib("flashinfer_cubin", "0.6.13"))
_FLASHINFER_NAMES = tuple(lib.name for lib in _WHOLE_FLASHINFER)
_HUMMING = Lib("humming", "0.1.19")
LIBS: dict[str, Libs] = {
    "none": Libs.of(_BASE),
    "deep_gemm": Libs.of([*_BASE, _DEEP_GEMM]),
    "deep_gemm+sm120": Libs.of([*_BASE, _DEEP_GEMM_SM120]),
    "flashinfer": Libs.of([*_BASE, _FLASHINFER]),
    "all": Libs.of([*_BASE, _DEEP_GEMM_SM120, *_WHOLE_FLASHINFER, _HUMMING]),
    "broken": Libs.of(
        [_TORCH]
        + [
            Lib(name, broken="fails")
            for name in ("triton", NATIVE, "deep_gemm", *_FLASHINFER_NAMES, "humming")
        ]
    ),
    "no native": Libs.of([*_BASE[:2], _DEEP_GEMM_SM120, *_WHOLE_FLASHINFER, _HUMMING]),
}


def linear(weight: str = "fp8-block", **changes: Any) -> LinearProblem:
    weight_format = WeightFormat.parse(weight)
    act = SCHEMES.get(weight) or SCHEMES[weight_format.kind]
    return replace(LinearProblem(4096, 4096, weight_format, act), **changes)


def moe(weight: str = "fp8-block", **changes: Any) -> MoEProblem:
    """The experts of Qwen3.5-35B-A3B."""
    weight_format = WeightFormat.parse(weight)
    act = expert_act(weight_format, SCHEMES[weight])
    return replace(MoEProblem(256, 8, 2048, 512, weight_format, act), **changes)


def attention(cache: str = "bf16", **changes: Any) -> AttentionProblem:
    return replace(AttentionProblem(16, 2, 128, cache), **changes)


def mamba2(**changes: Any) -> Mamba2Problem:
    return replace(Mamba2Problem(64, 8, 64, 128), **changes)


def delta_rule(**changes: Any) -> DeltaRuleProblem:
    return replace(DeltaRuleProblem(16, 32, 128, 128), **changes)


def kv_quant(cache: str = "bf16", **changes: Any) -> KVQuantProblem:
    return replace(KVQuantProblem(2, 128, cache), **changes)


@dataclass(frozen=True)
class Asked:
    """Wishes of flags and configs, and values of the variables that are set."""

    preferences: KernelPreferences
    env: dict[str, Any]


@cache
def parse_wishes(text: str) -> Asked:
    """From `VLLM_X=1 --flag value --on-unmet fallback use_deep_gemm=True`; `-` for none."""
    given: dict[str, Any] = {"kernels": (), "backends": ()}
    env = {}
    words = iter(() if text == "-" else text.split())
    for word in words:
        if word.startswith("VLLM_"):
            name, _, value = word.partition("=")
            env[name] = envs.VARIABLES[name].parse(value)
        elif word.startswith("use_deep_gemm="):
            value = word.partition("=")[2]
            given["use_deep_gemm"] = {"True": True, "False": False, "rule": None}[value]
        elif word in ("--requant", "--on-unmet", "--require-evidence"):
            given[word[2:].replace("-", "_")] = next(words)
        elif word == "--kernel":
            given["kernels"] += (next(words),)
        elif word.endswith("-backend"):
            given["backends"] += ((word[2:].partition("-")[0], next(words)),)
        elif word == "--max-requant-error":
            given["max_requant_error"] = float(next(words))
        else:
            assert word == "--require-native", word
            given["require_native"] = True
    return Asked(KernelPreferences(**given), env)


def parse_device(name: str) -> Device:
    return Device.parse(name if name.startswith("cpu") else f"sm_{name}")


def policy_of(wishes: str = "-", model: str = "llama", device: str = "100") -> Policy:
    asked = parse_wishes(wishes)
    return make_policy(asked.preferences.for_device(model, parse_device(device)), asked.env)


def ask(
    problem: Problem,
    device: str = "100",
    libs: str | Libs = "all",
    wishes: str = "-",
    model: str = "llama",
    layer: str = "model.layers.0.mlp.down_proj",
    timings: Timings | None = None,
) -> Decision:
    """What is chosen for one layer of a model on a machine, as the engine asks it."""
    known = LIBS[libs] if isinstance(libs, str) else libs
    policy = policy_of(wishes, model, device)
    chip = parse_device(device)
    specs = registry.specs(problem.family, chip.family)
    return select(problem, chip, known, policy, specs, layer, timings)


TOKENS = (1, 8, 64, 512, 4096)
SLOW = 100.0


def timed(**ranges: tuple[int, int]) -> Timings:
    """A table in which each backend takes 10 us from its first to its last number of tokens, and
    SLOW otherwise; `flashinfer_cutlass` is flashinfer-cutlass."""
    us = {
        name if name == "deep_gemm" else name.replace("_", "-"): tuple(
            10.0 if first <= m <= last else SLOW for m in TOKENS
        )
        for name, (first, last) in ranges.items()
    }
    return Timings("tuned/example.json", TOKENS, tuple(us.items()))


def whys(decision: Decision, backend: str) -> list[str]:
    """The kinds of the reasons against one candidate."""
    candidate = next(c for c in decision.candidates if c.backend == backend)
    return [reason.why.value for reason in candidate.reasons]
