"""The variables that name a backend for 4 and 8 bits, and who may multiply in FP8 (W4A8)."""

import logging

import pytest
from selection_cases import LIBS, SCHEMES, ask, linear, moe, parse_device, policy_of

from vllm.formats.act_scheme import ActScheme
from vllm.kernels.select.decision import NoKernelError
from vllm.kernels.select.reason import Why
from vllm.kernels.selection import Selection

CHIPS = ("75", "80", "89", "90", "100", "103", "110", "120", "121")
# Backend -> chips whose NVFP4 linear layers it can be given, with all libraries.
NVFP4 = {
    "marlin": {"80", "89", "90", "100", "103", "110", "120", "121"},
    "cutlass": {"100", "103", "120", "121"},
    "flashinfer-cutlass": {"100", "103", "120", "121"},
    "flashinfer-trtllm": {"100", "103"},
}


def whys(decision, backend):
    (candidate,) = [c for c in decision.candidates if c.backend == backend]
    return {reason.why for reason in candidate.reasons}


@pytest.mark.parametrize("device", CHIPS)
@pytest.mark.parametrize("backend", NVFP4)
def test_the_nvfp4_variable_is_obeyed_or_refused(backend, device):
    wish = f"VLLM_NVFP4_GEMM_BACKEND={backend}"
    decision = ask(linear("nvfp4"), device, "all", wish)
    assert decision.chosen == (backend if device in NVFP4[backend] else None)
    assert decision.origin.text == wish
    if decision.chosen is None:
        assert whys(decision, backend) == {Why.DEVICE}


@pytest.mark.parametrize("backend", NVFP4)
@pytest.mark.parametrize("weight", [w for w in SCHEMES if w != "nvfp4"])
def test_the_nvfp4_variable_says_nothing_of_other_formats(backend, weight):
    wish = f"VLLM_NVFP4_GEMM_BACKEND={backend}"
    assert ask(linear(weight), "100", "all", wish).chosen == ask(linear(weight), "100").chosen


@pytest.mark.parametrize("device", CHIPS[1:])
@pytest.mark.parametrize("weight", ["fp8-tensor", "fp8-channel", "fp8-block"])
@pytest.mark.parametrize("problem", [linear, moe], ids=["dense", "experts"])
def test_forcing_marlin_means_every_fp8_layer_and_widens_it(problem, weight, device):
    decision = ask(problem(weight), device, "all", "VLLM_TEST_FORCE_FP8_MARLIN=1")
    assert (decision.chosen, decision.winner.act) == ("marlin", ActScheme.NONE)


def test_forcing_marlin_where_it_cannot_run_is_refused():
    for device, libs in (("75", "all"), ("90", "no native")):
        decision = ask(linear("fp8-channel"), device, libs, "VLLM_TEST_FORCE_FP8_MARLIN=1")
        assert decision.chosen is None
    refused = ask(linear(), "90", "all", "VLLM_TEST_FORCE_FP8_MARLIN=1 --require-native")
    assert refused.chosen is None and whys(refused, "marlin") == {Why.POLICY}


# ---------------------------------------------------------------- W4A8


def w4a8(problem):
    return problem("int4-group[128]", act=(ActScheme.DYNAMIC_TOKEN, ActScheme.NONE))


@pytest.mark.parametrize("problem", [linear, moe], ids=["dense", "experts"])
@pytest.mark.parametrize("device", [*CHIPS, "130", "131"])
def test_fp8_activations_for_int4_are_of_sm_89_and_of_family_120(problem, device):
    decision = ask(w4a8(problem), device, "all")
    if device in ("89", "120", "121"):
        assert (decision.chosen, decision.winner.act) == ("marlin-w4a8", ActScheme.DYNAMIC_TOKEN)
    else:
        assert Why.DEVICE in whys(decision, "marlin-w4a8")
        assert decision.chosen in ("marlin", "torch", None)
    assert (decision.chosen is None) == (device in ("130", "131"))


def test_int4_by_float_activations_never_meets_the_fp8_kernel():
    for device in ("89", "121"):
        decision = ask(linear("int4-group[128]"), device, "all")
        assert decision.chosen == "marlin"
        assert Why.NUMERICS in whys(decision, "marlin-w4a8")


def test_w4a8_by_float_activations_is_refused_where_native_is_required():
    assert ask(w4a8(linear), "90", "all", "--require-native").chosen is None
    assert ask(w4a8(linear), "121", "all", "--require-native").chosen == "marlin-w4a8"


# ---------------------------------------------------------------- the log


def selection(device, libs="all", wishes="-"):
    return Selection(parse_device(device), LIBS[libs], policy_of(wishes, device=device))


def warnings_of(some, caplog):
    with caplog.at_level(logging.INFO):
        some.log()
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_crossing_is_one_warning_with_all_its_layers(caplog):
    some = selection("90")
    for layer in range(4):
        some.choose(f"model.layers.{layer}.mlp.up_proj", linear("nvfp4"))
        some.choose(f"model.layers.{layer}.mlp.gate", linear("bf16"))
    (line,) = warnings_of(some, caplog)
    assert line.startswith("native -> weight-only: linear nvfp4 by marlin")
    assert line.endswith("(model.layers.{0-3}.mlp.up_proj)")


@pytest.mark.parametrize("device", ["100", "121", "cpu"])
def test_nothing_is_told_where_nothing_is_crossed(device, caplog):
    some = selection(device)
    for problem in (linear("nvfp4"), moe("nvfp4"), linear("int4-group[128]"), linear("bf16")):
        some.choose("model.layers.0.mlp", problem)
    assert warnings_of(some, caplog) == []


def test_a_crossing_that_is_forbidden_stops_the_load():
    with pytest.raises(NoKernelError, match="--require-native, and this is weight-only"):
        selection("90", wishes="--require-native").choose("model.layers.0.mlp", linear("nvfp4"))
