"""Selection is a pure function whose every rejection has a typed reason."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.errors import ConfigError
from vllm.kernels import explain, registry
from vllm.kernels.select import select, unmet, version_key
from vllm.kernels.selection import Selection
from vllm.kernels.spec import (
    ActScheme,
    AttentionProblem,
    Device,
    KernelSpec,
    Lib,
    Libs,
    LinearProblem,
    NoKernelError,
    Origin,
    Override,
    Policy,
    Reason,
    WeightFormat,
    Why,
)

CPU = Device.parse("cpu:avx2")
NATIVE = Libs.of([Lib("torch", "2.13.0"), Lib("native", "0.1.0")])
BLOCK_FP8 = WeightFormat.parse("fp8-block[128x128]")
PROBLEM = LinearProblem(
    960, 576, BLOCK_FP8, (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE), dtype="fp32"
)
FORCE_TORCH = Policy((Override("linear", "torch", Origin(2, "--linear-backend torch")),))

# A spec with one requirement of each kind, for a problem that breaks them all.
STRICT = KernelSpec(
    backend="strict",
    family="linear",
    devices=frozenset({"sm_90"}),
    formats=frozenset({"fp8-block"}),
    dtypes=frozenset({"bf16"}),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    libs=(("deep_gemm", "2.1"),),
    n_align=64,
    k_align=128,
    check=lambda problem, device, libs: [Reason(Why.POLICY, "never")],
)
ALL_WRONG = LinearProblem(100, 200, WeightFormat("bf16"), (ActScheme.NONE,), dtype="fp32")


def whys(spec, problem, device, libs):
    return [reason.why for reason in unmet(spec, problem, device, libs)]


def test_the_native_kernels_come_first_on_the_cpu():
    decision = select(PROBLEM, CPU, NATIVE, Policy(), registry.specs())
    assert decision.chosen == "cpu"
    assert decision.act == ActScheme.NONE
    assert decision.origin.rank == 7
    assert [c.backend for c in decision.candidates] == ["cpu", "torch"]


def test_without_the_native_library_the_reference_serves_and_the_reason_is_kept():
    for libs, text in (
        (Libs.of([Lib("torch")]), "not installed"),
        (Libs.of([Lib("native", broken="no such symbol")]), "no such symbol"),
    ):
        decision = select(PROBLEM, CPU, libs, Policy(), registry.specs())
        assert decision.chosen == "torch"
        reason = decision.candidates[0].reasons[0]
        assert reason.why == Why.LIBRARY and text in reason.text


def test_a_forced_backend_is_chosen_and_the_others_say_why_not():
    decision = select(PROBLEM, CPU, NATIVE, FORCE_TORCH, registry.specs())
    assert decision.chosen == "torch" and decision.origin.text == "--linear-backend torch"
    assert [r.why for r in decision.candidates[0].reasons] == [Why.POLICY]


def test_a_forced_backend_that_cannot_run_is_refused_with_every_reason():
    policy = Policy((Override("linear", "cpu", Origin(2, "--linear-backend cpu")),))
    selection = Selection(Device.parse("sm_90"), NATIVE, policy)
    with pytest.raises(NoKernelError) as caught:
        selection.choose("model.layers.0.mlp.down_proj", PROBLEM)
    text = str(caught.value)
    assert "model.layers.0.mlp.down_proj" in text and "runs on cpu, not on cuda:sm_90" in text
    assert caught.value.decision.chosen is None


def test_the_strongest_override_of_a_layer_wins():
    strong = Override("linear", "torch", Origin(1, "--kernel"), "*.down_proj")
    weak = Override("linear", "cpu", Origin(3, "variable"))
    policy = Policy((weak, strong))
    for layer, backend in (("a.down_proj", "torch"), ("a.up_proj", "cpu")):
        decision = select(PROBLEM, CPU, NATIVE, policy, registry.specs(), layer)
        assert decision.chosen == backend


def test_an_override_of_one_family_leaves_the_others():
    problem = AttentionProblem(9, 3, 64, "fp32", "fp32")
    assert select(problem, CPU, NATIVE, FORCE_TORCH, registry.specs()).chosen == "cpu"


def test_every_unmet_requirement_is_listed_with_its_kind():
    found = whys(STRICT, ALL_WRONG, CPU, NATIVE)
    assert found == [
        Why.DEVICE,
        Why.LIBRARY,
        Why.FORMAT,
        Why.DTYPE,
        Why.NUMERICS,
        Why.SHAPE,
        Why.SHAPE,
        Why.POLICY,
    ]


def test_a_library_that_is_too_old_or_broken_is_a_library_reason():
    spec = dataclasses.replace(STRICT, check=None)
    good = LinearProblem(128, 128, BLOCK_FP8, (ActScheme.DYNAMIC_GROUP128,))
    h100 = Device.parse("sm_90")
    for text, expected in (
        ("deep_gemm=2.1", []),
        ("deep_gemm=2.10", []),
        ("deep_gemm=2.0.9", [Why.LIBRARY]),
        ("deep_gemm=broken: AssertionError", [Why.LIBRARY]),
    ):
        assert whys(spec, good, h100, Libs.of([Lib.parse(text)])) == expected


def test_a_family_is_not_an_order():
    spec = dataclasses.replace(STRICT, devices=frozenset({"sm_100"}), check=None, libs=())
    good = LinearProblem(128, 128, BLOCK_FP8, (ActScheme.DYNAMIC_GROUP128,))
    for name, accepted in (
        ("sm_100", 1),
        ("sm_103", 1),
        ("sm_90", 0),
        ("sm_120", 0),
        ("sm_121", 0),
    ):
        assert (whys(spec, good, Device.parse(name), NATIVE) == []) == bool(accepted), name


def test_an_attention_head_size_the_kernel_lacks_is_a_shape_reason():
    decision = select(AttentionProblem(4, 2, 20, "fp32", "fp32"), CPU, NATIVE, Policy(),
                      registry.specs())  # fmt: skip
    assert decision.chosen == "torch"
    assert [r.why for r in decision.candidates[0].reasons] == [Why.SHAPE]


@pytest.mark.parametrize(
    "text", ["cpu", "cpu:avx512", "cuda:sm_90", "cuda:sm_121a", "cuda:sm_100f"]
)
def test_devices_round_trip_through_their_text(text):
    assert str(Device.parse(text)) == text


@pytest.mark.parametrize("text", ["gpu", "sm_", "sm_9", "cuda:sm_90x", "cpu:sse"])
def test_an_unknown_device_is_refused(text):
    with pytest.raises(ConfigError, match="unknown device"):
        Device.parse(text)


NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
LIBS = st.one_of(
    st.builds(Lib, NAMES),
    st.builds(
        Lib,
        NAMES,
        st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,3}", fullmatch=True),
        st.lists(st.from_regex(r"sm[0-9]{2,3}[af]?", fullmatch=True), max_size=2).map(tuple),
    ),
    st.builds(
        Lib, NAMES, broken=st.from_regex(r"[A-Za-z: ]{1,20}[a-z]", fullmatch=True).map(str.strip)
    ),
)


@given(LIBS)
def test_libraries_round_trip_through_their_text(lib):
    assert Lib.parse(str(lib)) == lib


@given(st.permutations([Lib("a", "1"), Lib("b"), Lib("c", broken="x")]))
def test_the_order_of_libraries_does_not_matter(libs):
    assert Libs.of(libs) == Libs.of(reversed(libs))
    assert str(Libs.of(libs)) == "a=1,b,c=broken: x"


@pytest.mark.parametrize("text", ["bf16", "fp8-tensor", "fp8-channel", "fp8-block[128x128]"])
def test_weight_formats_round_trip_through_their_text(text):
    assert str(WeightFormat.parse(text)) == text


def test_versions_compare_by_number():
    assert version_key("0.6.13") > version_key("0.6.9")
    assert version_key("0.1.15.post2") > version_key("0.1.15")


def test_json_groups_layers_of_equal_decisions():
    selection = Selection(CPU, NATIVE, Policy())
    for layer in ("a", "b"):
        selection.choose(layer, PROBLEM)
    selection.choose("c", dataclasses.replace(PROBLEM, n=64))
    decisions = explain.to_json(selection.records)
    assert [d["layers"] for d in decisions] == [["a", "b"], ["c"]]
    assert decisions[0]["chosen"] == "cpu"
    assert [c["backend"] for c in decisions[0]["candidates"]] == ["cpu", "torch"]


def test_selection_needs_no_torch():
    code = (
        "import sys; from vllm.kernels import registry, select, explain, selection;"
        "registry.specs(); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
