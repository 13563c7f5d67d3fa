"""What the table of decisions asks: one section per theme, each a product of columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from selection_cases import (
    DEVICES,
    FORMATS,
    LIBS,
    MODELS,
    ask,
    attention,
    delta_rule,
    kv_quant,
    linear,
    mamba2,
    moe,
    timed,
)

from vllm.architectures.decoder import RELU2
from vllm.kernels import registry
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.problem import WeightProblem


@dataclass(frozen=True)
class Section:
    """`ask` gets one value of each column; None where a combination means nothing."""

    title: str
    family: str
    columns: dict[str, Sequence[str]]
    ask: Callable[..., Decision | None]


def _both(use: str, e8m0: str) -> str:
    """Wishes of the two variables."""
    values = {"VLLM_USE_DEEP_GEMM": use, "VLLM_USE_DEEP_GEMM_E8M0": e8m0}
    return " ".join(f"{k}={v}" for k, v in values.items() if v != "unset") or "-"


_RULED, _FREE = "qwen3_5_moe_text", "qwen3_moe"
# One of each kind of chip that selection tells apart for FP8 blocks.
_CHIPS = ("80", "89", "90", "100", "110", "120", "cpu")
_DEEP_GEMM_CHIPS = ("80", "90", "100", "120")
_DEEP_GEMM_LIBS = ("none", "deep_gemm", "deep_gemm+sm120", "flashinfer", "all", "broken")

_SHAPES: dict[str, dict[str, object]] = {
    "4096x4096": {},
    "N 4080": {"n": 4080},
    "N 4064": {"n": 4064},
    "K 4160": {"k": 4160},
    "K 4144": {"k": 4144},
    "16x16": {"n": 16, "k": 16},
    "N 18432/32": {"n": 576, "cut_n": 32},
    "K 18432/32": {"k": 576, "cut_k": 32},
    "N /32 and K 4160": {"n": 576, "k": 4160, "cut_n": 32},
    "QKV 576+192+192": {"n": 960, "k": 576, "parts": (576, 192, 192)},
    "gate-up 2x1536": {"n": 3072, "k": 576, "parts": (1536, 1536)},
    "bias": {"bias": True},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
}
_EXPERTS: dict[str, dict[str, object]] = {
    "256 of 512x2048": {},
    "EP 8": {"cut_experts": 8},
    "TP 4": {"intermediate": 128, "cut": 4},
    "TP 8": {"intermediate": 64, "cut": 8},
    "batched": {"layout": "batched"},
    "batched EP 8": {"layout": "batched", "cut_experts": 8},
    "intermediate 576": {"intermediate": 576},
    "hidden 2080": {"hidden": 2080},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
}
_HEADS: dict[str, dict[str, object]] = {
    "16/2 of 128": {},
    "16/2 of 64": {"head_dim": 64},
    "16/2 of 256": {"head_dim": 256},
    "16/2 of 80": {"head_dim": 80},
    "16/2 of 20": {"head_dim": 20},
    "16/2 of 512": {"head_dim": 512},
    "window 4096": {"sliding_window": 4096},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
}

_VARIABLES = (
    "-",
    "VLLM_USE_DEEP_GEMM=1",
    "VLLM_USE_DEEP_GEMM=0",
    "VLLM_MOE_USE_DEEP_GEMM=1",
    "VLLM_MOE_USE_DEEP_GEMM=0",
    "VLLM_USE_DEEP_GEMM=1 VLLM_MOE_USE_DEEP_GEMM=0",
    "VLLM_USE_DEEP_GEMM=0 VLLM_MOE_USE_DEEP_GEMM=1",
)
_E8M0 = (
    "VLLM_USE_DEEP_GEMM_E8M0=0",
    "VLLM_USE_DEEP_GEMM_E8M0=1",
    "VLLM_USE_DEEP_GEMM=1 VLLM_USE_DEEP_GEMM_E8M0=0",
    "VLLM_USE_DEEP_GEMM=1 VLLM_USE_DEEP_GEMM_E8M0=1",
)
_CONFIGS = (
    "use_deep_gemm=True",
    "use_deep_gemm=False",
    "use_deep_gemm=rule",
    "use_deep_gemm=False VLLM_USE_DEEP_GEMM=1",
    "use_deep_gemm=True VLLM_USE_DEEP_GEMM=0",
    "use_deep_gemm=rule VLLM_USE_DEEP_GEMM=1",
    "use_deep_gemm=True VLLM_MOE_USE_DEEP_GEMM=0",
    "use_deep_gemm=False VLLM_MOE_USE_DEEP_GEMM=1",
)
_LAYER = "--kernel *.down_proj="
_EACH_OVER_THE_NEXT = (
    f"{_LAYER}triton --linear-backend marlin",
    f"{_LAYER}triton VLLM_USE_DEEP_GEMM=1",
    "--kernel *.q_proj=triton --linear-backend marlin",
    "--linear-backend marlin VLLM_USE_DEEP_GEMM=1",
    "--linear-backend marlin VLLM_LINEAR_BACKEND=triton",
    "--linear-backend deep_gemm",
    "--linear-backend deep_gemm VLLM_USE_DEEP_GEMM=0",
    "--linear-backend deep_gemm use_deep_gemm=False",
    f"{_LAYER}deep_gemm VLLM_USE_DEEP_GEMM=0",
    "VLLM_USE_DEEP_GEMM=1 use_deep_gemm=False",
    "VLLM_USE_DEEP_GEMM=0 use_deep_gemm=True",
    "VLLM_TEST_FORCE_FP8_MARLIN=1 use_deep_gemm=True",
    "VLLM_LINEAR_BACKEND=triton use_deep_gemm=True",
    "use_deep_gemm=True",
    "use_deep_gemm=False",
    "use_deep_gemm=rule",
    "-",
)
_CONTRADICTIONS = (
    "--linear-backend triton --linear-backend marlin",
    "VLLM_USE_DEEP_GEMM=1 VLLM_TEST_FORCE_FP8_MARLIN=1",
    "VLLM_USE_DEEP_GEMM=1 VLLM_LINEAR_BACKEND=triton",
    "VLLM_USE_DEEP_GEMM=0 VLLM_LINEAR_BACKEND=deep_gemm",
    "VLLM_TEST_FORCE_FP8_MARLIN=1 VLLM_LINEAR_BACKEND=triton",
    "VLLM_LINEAR_BACKEND=marlin VLLM_NVFP4_GEMM_BACKEND=cutlass",
    "VLLM_LINEAR_BACKEND=deep_gemm VLLM_NVFP4_GEMM_BACKEND=cutlass",
    "VLLM_USE_DEEP_GEMM=0 VLLM_LINEAR_BACKEND=triton",
    f"{_LAYER}triton {_LAYER}marlin",
    f"{_LAYER}triton --kernel model.layers.0.*=marlin",
)
_UNMET = (
    "--linear-backend marlin",
    "--linear-backend marlin --on-unmet fallback",
    "--linear-backend deep_gemm",
    "--linear-backend deep_gemm --on-unmet fallback",
    f"{_LAYER}deep_gemm --on-unmet fallback",
    f"{_LAYER}deep_gemm --linear-backend triton --on-unmet fallback",
    "VLLM_USE_DEEP_GEMM=1",
    "VLLM_USE_DEEP_GEMM=1 --on-unmet fallback",
)
_MEASURED: dict[str, Timings | None] = {
    "nothing": None,
    "triton": timed(triton=(1, 8192), deep_gemm=(1, 0), cutlass=(1, 0)),
    "deep_gemm": timed(deep_gemm=(1, 8192), cutlass=(1, 0)),
    "triton to 64 then cutlass": timed(triton=(1, 64), cutlass=(65, 8192), deep_gemm=(1, 0)),
    "cutlass to 64 then deep_gemm": timed(cutlass=(1, 64), deep_gemm=(65, 8192)),
    "triton alone": timed(triton=(1, 8192)),
}


def _forced(family: str) -> list[str]:
    return [f"--{family}-backend {name}" for name in registry.backend_names(family)]


def _if_meant(decision: Decision) -> Decision | None:
    """None where the wish speaks of other formats, which the other sections show."""
    return decision if decision.origin.rank <= 4 else None


def _requantised(kind: str, error: str) -> WeightProblem:
    changes = {} if error == "unknown" else {"requant_error": float(error)}
    return linear(**changes) if kind == "linear" else moe(**changes)


_LINEAR_SECTIONS = [
    Section(
        "Linear: chips, libraries and formats (4096x4096)",
        "linear",
        {"format": FORMATS, "libs": tuple(LIBS), "device": DEVICES},
        lambda form, libs, device: ask(linear(form), device, libs),
    ),
    Section(
        "Linear: shapes, shards and types (all libraries)",
        "linear",
        {"format": FORMATS, "shape": tuple(_SHAPES), "device": _CHIPS},
        lambda form, shape, device: ask(linear(form, **_SHAPES[shape]), device),
    ),
    Section(
        "Linear: other sizes of scale blocks (all libraries)",
        "linear",
        {
            "format": ("fp8-block[64x64]", "fp8-block[128x64]", "fp8-block[1x128]"),
            "shape": ("4096x4096", "N 18432/32"),
            "device": _CHIPS,
        },
        lambda form, shape, device: ask(linear(form, **_SHAPES[shape]), device),
    ),
    Section(
        "Linear: the model rule (fp8-block and what it must leave alone)",
        "linear",
        {
            "format": ("fp8-block", "fp8-tensor", "fp8-channel", "nvfp4", "bf16"),
            "libs": _DEEP_GEMM_LIBS,
            "model": MODELS,
            "device": DEVICES,
        },
        lambda form, libs, model, device: ask(linear(form), device, libs, "-", model),
    ),
    Section(
        "Linear: DeepGEMM by variables (fp8-block 4096x4096)",
        "linear",
        {
            "wishes": (*_VARIABLES, *_E8M0),
            "model": (_RULED, _FREE),
            "libs": ("none", "deep_gemm", "all"),
            "device": _DEEP_GEMM_CHIPS,
        },
        lambda wishes, model, libs, device: ask(linear(), device, libs, wishes, model),
    ),
    Section(
        "Linear: DeepGEMM by the quantisation config (fp8-block 4096x4096)",
        "linear",
        {
            "wishes": _CONFIGS,
            "model": (_RULED, _FREE),
            "libs": ("none", "deep_gemm", "all"),
            "device": _DEEP_GEMM_CHIPS,
        },
        lambda wishes, model, libs, device: ask(linear(), device, libs, wishes, model),
    ),
    Section(
        "Linear: permissions and forces (all libraries)",
        "linear",
        {
            "wishes": ("VLLM_USE_DEEP_GEMM=1", "use_deep_gemm=True", "--linear-backend deep_gemm"),
            "format": ("fp8-block", "fp8-tensor", "bf16", "fp8-block[64x64]"),
            "shape": ("4096x4096", "N 4080", "K 4160", "16x16", "N 18432/32", "fp16"),
            "device": ("80", "90", "100"),
        },
        lambda wishes, form, shape, device: ask(
            linear(form, **_SHAPES[shape]), device, "all", wishes, _RULED
        ),
    ),
    Section(
        "Linear: every backend by --linear-backend, formats it has a kernel for (all libraries)",
        "linear",
        {"wishes": _forced("linear"), "format": FORMATS, "device": DEVICES},
        lambda wishes, form, device: _if_meant(ask(linear(form), device, "all", wishes)),
    ),
    Section(
        "Linear: VLLM_NVFP4_GEMM_BACKEND and VLLM_TEST_FORCE_FP8_MARLIN (all libraries)",
        "linear",
        {
            "wishes": (
                "VLLM_NVFP4_GEMM_BACKEND=cutlass",
                "VLLM_NVFP4_GEMM_BACKEND=marlin",
                "VLLM_NVFP4_GEMM_BACKEND=flashinfer-cutlass",
                "VLLM_NVFP4_GEMM_BACKEND=flashinfer-trtllm",
                "VLLM_TEST_FORCE_FP8_MARLIN=1",
            ),
            "format": FORMATS,
            "device": DEVICES,
        },
        lambda wishes, form, device: _if_meant(ask(linear(form), device, "all", wishes)),
    ),
    Section(
        "Linear: --require-native",
        "linear",
        {
            "format": FORMATS,
            "libs": ("none", "all", "broken", "no native"),
            "device": DEVICES,
        },
        lambda form, libs, device: ask(linear(form), device, libs, "--require-native"),
    ),
    Section(
        "Linear: who wins (fp8-block, sm_100, all libraries; the layer is *.down_proj)",
        "linear",
        {"wishes": _EACH_OVER_THE_NEXT, "model": (_RULED, _FREE)},
        lambda wishes, model: ask(linear(), "100", "all", wishes, model),
    ),
    Section(
        "Linear: contradictions of one rank",
        "linear",
        {"wishes": _CONTRADICTIONS, "format": ("fp8-block", "nvfp4")},
        lambda wishes, form: ask(linear(form), "100", "all", wishes),
    ),
    Section(
        "Linear: --on-unmet fallback",
        "linear",
        {
            "wishes": _UNMET,
            "libs": ("none", "all"),
            "device": ("75", "80", "90", "100", "120"),
        },
        lambda wishes, libs, device: ask(linear(), device, libs, wishes, _RULED),
    ),
    Section(
        "Linear: measured (fp8-block)",
        "linear",
        {
            "measured": tuple(_MEASURED),
            "wishes": ("-", "VLLM_USE_DEEP_GEMM=0", "--linear-backend marlin"),
            "model": (_RULED, _FREE),
            "device": ("80", "90", "100"),
        },
        lambda measured, wishes, model, device: ask(
            linear(), device, "all", wishes, model, timings=_MEASURED[measured]
        ),
    ),
]
_REQUANT_SECTIONS = [
    Section(
        f"{title}: --requant, --max-requant-error (all libraries; error: what UE8M0 would cost)",
        kind,
        {
            "wishes": (
                "-",
                "--max-requant-error 0",
                "--max-requant-error 0.01",
                "--max-requant-error 0.03",
                "--max-requant-error 0.01 VLLM_USE_DEEP_GEMM_E8M0=1",
                "--max-requant-error 0.01 VLLM_USE_DEEP_GEMM=1",
                "--requant exact-only",
                "--requant exact-only VLLM_USE_DEEP_GEMM=1",
                "--requant allow",
                "--requant allow --max-requant-error 0.01",
            ),
            "error": ("unknown", "0", "0.0266"),
            "model": (_RULED, _FREE),
            "device": ("90", "100", "120"),
        },
        lambda wishes, error, model, device, kind=kind: ask(
            _requantised(kind, error), device, "all", wishes, model
        ),
    )
    for kind, title in (("linear", "Linear"), ("moe", "MoE"))
]
_RULE_SECTIONS = [
    Section(
        f"{title}: Qwen3.5 on Blackwell, with a DeepGEMM that carries the chip or does not",
        kind,
        {
            "VLLM_USE_DEEP_GEMM": ("unset", "0", "1"),
            "VLLM_USE_DEEP_GEMM_E8M0": ("unset", "0", "1"),
            "dtype": ("bf16", "fp16"),
            "libs": ("deep_gemm", "deep_gemm+sm120"),
            "device": ("100", "103", "120", "121"),
        },
        lambda use, e8m0, dtype, libs, device, problem=problem: ask(
            replace(problem, dtype=dtype), device, libs, _both(use, e8m0), _RULED
        ),
    )
    for kind, title, problem in (("linear", "Linear", linear()), ("moe", "MoE", moe()))
]
_MOE_SECTIONS = [
    Section(
        "MoE: chips, libraries and formats (256 experts of 512x2048)",
        "moe",
        {"format": FORMATS, "libs": tuple(LIBS), "device": DEVICES},
        lambda form, libs, device: ask(moe(form), device, libs),
    ),
    Section(
        "MoE: layouts, shards and types (all libraries)",
        "moe",
        {"format": FORMATS, "experts": tuple(_EXPERTS), "device": _CHIPS},
        lambda form, experts, device: ask(moe(form, **_EXPERTS[experts]), device),
    ),
    Section(
        "MoE: experts without a gate (all libraries)",
        "moe",
        {"format": FORMATS, "device": DEVICES},
        lambda form, device: ask(moe(form, activation=RELU2), device),
    ),
    Section(
        "MoE: the model rule",
        "moe",
        {
            "format": ("fp8-block", "nvfp4"),
            "libs": _DEEP_GEMM_LIBS,
            "model": MODELS,
            "device": DEVICES,
        },
        lambda form, libs, model, device: ask(moe(form), device, libs, "-", model),
    ),
    Section(
        "MoE: DeepGEMM by variables and config (fp8-block)",
        "moe",
        {
            "wishes": (*_VARIABLES, *_E8M0, *_CONFIGS),
            "model": (_RULED, _FREE),
            "libs": ("none", "deep_gemm", "all"),
            "device": _DEEP_GEMM_CHIPS,
        },
        lambda wishes, model, libs, device: ask(moe(), device, libs, wishes, model),
    ),
    Section(
        "MoE: every backend by --moe-backend, formats it has a kernel for (all libraries)",
        "moe",
        {"wishes": _forced("moe"), "format": FORMATS, "device": DEVICES},
        lambda wishes, form, device: _if_meant(ask(moe(form), device, "all", wishes)),
    ),
    Section(
        "MoE: other wishes (all libraries)",
        "moe",
        {
            "wishes": (
                "VLLM_TEST_FORCE_FP8_MARLIN=1",
                "--require-native",
                "--kernel *=triton",
                "--linear-backend triton",
                "--moe-backend triton VLLM_MOE_USE_DEEP_GEMM=1",
                "--moe-backend deep_gemm --on-unmet fallback",
            ),
            "format": FORMATS,
            "device": ("80", "90", "100", "120"),
        },
        lambda wishes, form, device: ask(moe(form), device, "all", wishes, _RULED),
    ),
]
_ATTENTION_SECTIONS = [
    Section(
        "Attention: chips, libraries and caches (16/2 heads of 128)",
        "attention",
        {"cache": ("bf16", "fp8"), "libs": tuple(LIBS), "device": DEVICES},
        lambda cache, libs, device: ask(attention(cache), device, libs),
    ),
    Section(
        "Attention: heads and types",
        "attention",
        {
            "cache": ("bf16", "fp16", "fp32", "fp8"),
            "heads": tuple(_HEADS),
            "libs": ("none", "all"),
            "device": ("75", "80", "90", "120", "cpu"),
        },
        lambda cache, heads, libs, device: ask(attention(cache, **_HEADS[heads]), device, libs),
    ),
    Section(
        "Attention: every backend by --attention-backend (all libraries)",
        "attention",
        {"wishes": _forced("attention"), "cache": ("bf16", "fp8"), "device": DEVICES},
        lambda wishes, cache, device: ask(attention(cache), device, "all", wishes),
    ),
    Section(
        "KV cache writes: chips, libraries and caches",
        "kv_quant",
        {
            "cache": ("bf16", "fp16", "fp32", "fp8"),
            "heads": ("16/2 of 128", "16/2 of 20", "fp32"),
            "libs": ("all", "broken", "no native"),
            "device": DEVICES,
        },
        lambda cache, heads, libs, device: ask(kv_quant(cache, **_HEADS[heads]), device, libs),
    ),
    Section(
        "Delta rule: chips, libraries and dtypes",
        "delta_rule",
        {
            "dtype": ("bf16", "fp32"),
            "libs": ("all", "broken"),
            "device": DEVICES,
        },
        lambda dtype, libs, device: ask(delta_rule(dtype=dtype), device, libs),
    ),
    Section(
        "Mamba2: chips, libraries and dtypes",
        "mamba2",
        {
            "dtype": ("bf16", "fp32"),
            "libs": ("all", "broken"),
            "device": DEVICES,
        },
        lambda dtype, libs, device: ask(mamba2(dtype=dtype), device, libs),
    ),
]
SECTIONS = [
    *_LINEAR_SECTIONS,
    *_RULE_SECTIONS,
    *_REQUANT_SECTIONS,
    *_MOE_SECTIONS,
    *_ATTENTION_SECTIONS,
]
