"""A model's choices: one per layer, remembered, and checked against what was wished for."""

import pytest
from selection_cases import LIBS, linear, moe, parse_device, policy_of

from vllm.errors import ConfigError
from vllm.kernels.select.decision import NoKernelError
from vllm.kernels.selection import Selection

DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


def selection(wishes: str = "-", device: str = "90", libs: str = "all") -> Selection:
    return Selection(parse_device(device), LIBS[libs], policy_of(wishes, "llama", device))


def test_equal_questions_share_one_decision():
    some = selection()
    assert some.choose(DOWN, linear()) is some.choose(UP, linear())
    assert [layer for layer, _ in some.records] == [DOWN, UP]


def test_layers_that_a_pattern_tells_apart_do_not():
    some = selection("--kernel *.down_proj=triton")
    assert some.choose(UP, linear(k=2048)).chosen == "deep_gemm"
    assert some.choose(DOWN, linear(k=2048)).chosen == "triton"
    assert some.choose(UP, linear(k=2048)).chosen == "deep_gemm"


def test_a_layer_that_nothing_serves_is_an_error_with_its_name_and_every_candidate():
    some = selection("--linear-backend cutlass", "80")
    with pytest.raises(NoKernelError) as caught:
        some.choose(DOWN, linear())
    text = str(caught.value)
    assert DOWN in text and caught.value.decision.chosen is None
    assert all(c.backend in text for c in caught.value.decision.candidates)


def test_what_is_learnt_about_a_weight_may_change_its_kernel_and_keeps_its_place():
    some = selection("--max-requant-error 0.027", "100")
    first = some.choose(DOWN, linear())
    some.choose(UP, linear(n=1024))
    second = some.replace(DOWN, first, linear(requant_error=0.03))
    assert (first.chosen, second.chosen) == ("deep_gemm", "cutlass")
    assert some.records[0] == (DOWN, second) and len(some.records) == 2


def test_a_flag_that_means_no_layer_of_the_model_is_an_error():
    for wishes in ("--kernel *.q_projj=triton", "--moe-backend triton"):
        some = selection(wishes)
        some.choose(DOWN, linear())
        with pytest.raises(ConfigError, match="means no layer") as caught:
            some.check_overrides()
        assert wishes in str(caught.value)


def test_a_variable_that_means_no_layer_is_none():
    some = selection("VLLM_NVFP4_GEMM_BACKEND=cutlass")
    some.choose(DOWN, linear())
    some.check_overrides()


def test_a_permission_that_no_layer_could_use_is_a_warning(caplog):
    some = selection("VLLM_USE_DEEP_GEMM=1")
    some.choose(DOWN, linear(n=4080))
    some.check_overrides()
    (record,) = caplog.records
    assert "VLLM_USE_DEEP_GEMM=1" in record.message and "4080" in record.message
    some.choose(UP, linear())
    some.check_overrides()
    assert len(caplog.records) == 1


def test_a_measured_error_refutes_an_estimate_that_a_budget_allowed_and_a_claim_of_exactness():
    some = selection("--max-requant-error 0.03", "100")
    winner = some.choose(DOWN, linear()).winner
    assert winner.is_lossy and not some.is_refuted(winner, 0.029)
    assert some.is_refuted(winner, 0.031)
    exact = selection("-", "100")
    winner = exact.choose(DOWN, linear(requant_error=0.0)).winner
    assert not exact.is_refuted(winner, 0.0) and exact.is_refuted(winner, 1e-4)


def test_wishes_that_were_followed_pass():
    some = selection("--kernel *.down_proj=triton --linear-backend marlin --moe-backend cutlass")
    some.choose(DOWN, linear())
    some.choose(UP, linear())
    some.choose("model.layers.0.mlp.experts", moe())
    some.check_overrides()


def test_a_flag_that_a_stronger_one_overrules_everywhere_is_no_error():
    some = selection("--kernel *.down_proj=triton --linear-backend marlin")
    some.choose(DOWN, linear())
    some.check_overrides()
