"""Hypothesis strategies over everything that selection can be asked."""

from dataclasses import replace

from hypothesis import strategies as st
from selection_cases import (
    DEVICES,
    FORMATS,
    MODELS,
    attention,
    delta_rule,
    kv_quant,
    linear,
    mamba2,
    moe,
)

from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.machine import NATIVE, Lib, Libs

devices = st.sampled_from(DEVICES)
models = st.sampled_from(MODELS)
_SIZES = st.sampled_from([16, 48, 64, 192, 576, 1024, 2080, 4096])
_DTYPES = st.sampled_from(["bf16", "fp16", "fp32"])
_WEIGHTS = st.sampled_from([*FORMATS, "fp8-block[64x64]"])


@st.composite
def linears(draw, weights=_WEIGHTS) -> LinearProblem:
    parts = draw(st.lists(_SIZES, min_size=1, max_size=3))
    return linear(
        draw(weights),
        n=sum(parts),
        k=draw(_SIZES),
        parts=tuple(parts) if len(parts) > 1 else (),
        dtype=draw(_DTYPES),
        bias=draw(st.booleans()),
        cut_n=draw(st.sampled_from([1, 2, 8])),
        cut_k=draw(st.sampled_from([1, 2, 8])),
        requant_error=draw(st.sampled_from([None, 0.0, 0.0266])),
    )


@st.composite
def moes(draw) -> MoEProblem:
    return moe(
        draw(st.sampled_from(FORMATS)),
        hidden=draw(_SIZES),
        intermediate=draw(_SIZES),
        dtype=draw(_DTYPES),
        layout=draw(st.sampled_from(["standard", "batched"])),
        cut=draw(st.sampled_from([1, 4])),
        cut_experts=draw(st.sampled_from([1, 8])),
        requant_error=draw(st.sampled_from([None, 0.0, 0.0266])),
    )


_CACHES = st.sampled_from(["bf16", "fp16", "fp32", "fp8"])
_HEADS = st.sampled_from([20, 64, 80, 128, 256, 512])
attentions = st.builds(
    lambda cache, dtype, heads, window: attention(
        cache, dtype=dtype, head_dim=heads, sliding_window=window
    ),
    _CACHES,
    _DTYPES,
    _HEADS,
    st.sampled_from([0, 4096]),
)
kv_quants = st.builds(
    lambda cache, dtype, heads: replace(kv_quant(cache), dtype=dtype, head_dim=heads),
    _CACHES,
    _DTYPES,
    _HEADS,
)
delta_rules = st.builds(
    lambda dtype, key_dim: delta_rule(dtype=dtype, key_dim=key_dim), _DTYPES, _HEADS
)
mamba2s = st.builds(lambda dtype, size: mamba2(dtype=dtype, state_size=size), _DTYPES, _HEADS)
problems = st.one_of(linears(), moes(), attentions, kv_quants, delta_rules, mamba2s)

_ARCHS = {
    "deep_gemm": ["sm120"],
    NATIVE: ["80", "90", "90a", "100a", "100f", "103a", "110f", "120a", "120f", "121a"],
}
_VERSIONS = {"flashinfer": ["0.5.3", "0.6.13"], "triton": ["3.1.0", "3.5.0"]}


@st.composite
def some_libs(draw) -> Libs:
    """Each library absent, broken, or of some version with some architectures."""
    libs = []
    for name in ("triton", NATIVE, "deep_gemm", "flashinfer"):
        state = draw(st.sampled_from(["absent", "broken", "works", "works"]))
        if state == "broken":
            libs.append(Lib(name, broken="fails"))
        elif state == "works":
            version = draw(st.sampled_from(_VERSIONS.get(name, ["1.0"])))
            archs = draw(st.lists(st.sampled_from(_ARCHS.get(name, [""])), unique=True))
            libs.append(Lib(name, version, tuple(filter(None, archs))))
    return Libs.of(libs)


# Wishes that exclude, and those that force.
excluding = st.sampled_from(
    [
        "-",
        "VLLM_USE_DEEP_GEMM=0",
        "VLLM_MOE_USE_DEEP_GEMM=0",
        "VLLM_USE_DEEP_GEMM_E8M0=0",
        "VLLM_USE_DEEP_GEMM_E8M0=1",
        "use_deep_gemm=False",
        "use_deep_gemm=rule",
        "--require-native",
        "--max-requant-error 0.01",
    ]
)
forcing = st.sampled_from(
    [
        "VLLM_USE_DEEP_GEMM=1",
        "VLLM_MOE_USE_DEEP_GEMM=1",
        "VLLM_TEST_FORCE_FP8_MARLIN=1",
        "VLLM_NVFP4_GEMM_BACKEND=flashinfer-cutlass",
        "use_deep_gemm=True",
        "--linear-backend cutlass",
        "--moe-backend triton",
        "--attention-backend torch",
        "--kernel *.down_proj=triton",
        "--linear-backend marlin --on-unmet fallback",
    ]
)
wishes = st.one_of(excluding, forcing)
