"""Who wins: each rank over the next, contradictions, yields, and the facts about DeepGEMM."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selection_cases import LIBS, MODELS, ask, linear, moe, parse_device, policy_of, timed, whys

from vllm.errors import ConfigError
from vllm.formats.scales import Requant, Scales, estimated
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearTensors
from vllm.kernels.select.select import select
from vllm.machine import Lib, Libs
from vllm.ops.fp8 import requant_error
from vllm.utils.fp8 import per_block_cast_to_fp8

QWEN3_5 = "qwen3_5_moe_text"
# What each expert-free layer of Qwen3.5-35B-A3B-FP8 asks for, and its experts.
DENSE = linear(n=9216, k=2048, parts=(8192, 512, 512))
EXPERTS = moe()


FP8 = WeightFormat.parse("fp8-block")


def candidate(decision, backend: str):
    return next(one for one in decision.candidates if one.backend == backend)


def outcome(decision) -> tuple[str | None, int]:
    return decision.chosen, decision.origin.rank


# ---------------------------------------------------------------- DeepGEMM: what must be so


@pytest.mark.parametrize("model", ["qwen3_5_moe_text", "qwen3_5_text"])
@pytest.mark.parametrize("device", ["100", "103"])
def test_on_sm_10x_the_model_rule_keeps_deep_gemm_from_qwen3_5(model, device):
    decision = ask(DENSE, device, "all", model=model)
    assert outcome(decision) == ("cutlass", 5)
    assert whys(decision, "deep_gemm") == ["policy"]
    assert model in decision.origin.text


def test_its_experts_obey_the_rule_too():
    decision = ask(EXPERTS, "100", "deep_gemm", model=QWEN3_5)
    assert outcome(decision) == ("cutlass", 5)
    assert whys(decision, "deep_gemm") == ["policy"]
    assert outcome(ask(EXPERTS, "100", "deep_gemm", model="qwen3_moe")) == ("deep_gemm", 7)


@pytest.mark.parametrize("device", ["100", "103"])
def test_experts_on_sm_10x_are_first_for_the_libraries_kernels_of_that_chip(device):
    for model in (QWEN3_5, "qwen3_moe"):  # the rule decides nothing: DeepGEMM would not serve
        decision = ask(EXPERTS, device, "all", model=model)
        assert outcome(decision) == ("flashinfer-trtllm", 7)
        assert not decision.winner.is_lossy
    free = [c.backend for c in decision.candidates if not c.reasons]
    assert free == ["flashinfer-trtllm", "deep_gemm", "cutlass", "triton", "marlin", "torch"]
    nvfp4 = ask(moe("nvfp4"), device, "all")
    assert outcome(nvfp4) == ("flashinfer-trtllm", 7)
    assert outcome(ask(moe("nvfp4"), device, "none")) == ("cutlass", 7)


@pytest.mark.parametrize("problem", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_variable_set_to_1_overrides_the_rule(problem):
    decision = ask(problem, "100", "all", "VLLM_USE_DEEP_GEMM=1", QWEN3_5)
    assert outcome(decision) == ("deep_gemm", 3)
    assert decision.origin.text == "VLLM_USE_DEEP_GEMM=1"
    assert decision.winner.scales == "ue8m0" and decision.winner.is_lossy


@pytest.mark.parametrize("problem", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("model", MODELS)
def test_the_variable_set_to_0_means_never_and_decides(problem, model):
    decision = ask(problem, "100", "deep_gemm", "VLLM_USE_DEEP_GEMM=0", model)
    assert outcome(decision) == ("cutlass", 3)
    assert decision.origin.text == "VLLM_USE_DEEP_GEMM=0"


def test_without_deep_gemm_nobody_but_the_default_order_decides():
    for libs in ("none", "flashinfer"):
        decision = ask(DENSE, "100", libs, model=QWEN3_5)
        assert outcome(decision) == ("cutlass", 7)
        assert "library" in whys(decision, "deep_gemm")


def test_a_broken_deep_gemm_is_a_missing_one():
    broken = Libs(LIBS["none"].libs | {Lib("deep_gemm", broken="AssertionError")})
    decision = ask(DENSE, "90", broken)
    assert outcome(decision) == ("cutlass", 7)
    assert whys(decision, "deep_gemm") == ["library"]


def test_hopper_keeps_deep_gemm_with_float32_scales():
    decision = ask(DENSE, "90", "all", model=QWEN3_5)
    assert outcome(decision) == ("deep_gemm", 7)
    assert decision.winner.scales == "float32" and not decision.winner.is_lossy


@pytest.mark.parametrize("device", ["120", "121"])
def test_sm_12x_gets_deep_gemm_only_from_a_package_with_its_kernels(device):
    original = ask(DENSE, device, "deep_gemm", model=QWEN3_5)
    assert outcome(original) == ("cutlass", 7)
    assert whys(original, "deep_gemm") == ["device", "policy"]
    assert outcome(ask(DENSE, device, "deep_gemm+sm120", model="llama")) == ("deep_gemm", 7)
    # It takes the same scales there as on SM100.
    assert outcome(ask(DENSE, device, "deep_gemm+sm120", model=QWEN3_5)) == ("cutlass", 5)


def test_other_models_keep_deep_gemm_on_sm_100():
    assert outcome(ask(DENSE, "100", "all", model="qwen3_moe")) == ("deep_gemm", 7)
    assert outcome(ask(DENSE, "100", "all", model="llama")) == ("deep_gemm", 7)


@pytest.mark.parametrize("problem", [linear("nvfp4"), moe("nvfp4")], ids=["dense", "experts"])
@pytest.mark.parametrize("device", ["90", "100", "120"])
def test_nvfp4_is_untouched_by_rule_and_variables(problem, device):
    usual = ask(problem, device, "all", model="llama")
    for wish in ("-", "VLLM_USE_DEEP_GEMM=0", "VLLM_USE_DEEP_GEMM=1", "use_deep_gemm=False"):
        assert outcome(ask(problem, device, "all", wish, QWEN3_5)) == outcome(usual)


def test_e8m0_set_to_0_rules_deep_gemm_out_where_the_chip_takes_nothing_else():
    for device in ("100", "120"):
        decision = ask(DENSE, device, "all", "VLLM_USE_DEEP_GEMM_E8M0=0")
        assert outcome(decision) == ("cutlass", 3)
        assert whys(decision, "deep_gemm") == ["numerics"]
    assert ask(DENSE, "90", "all", "VLLM_USE_DEEP_GEMM_E8M0=0").winner.scales == "float32"


def test_e8m0_set_to_1_reproduces_blackwells_scales_on_hopper():
    decision = ask(DENSE, "90", "all", "VLLM_USE_DEEP_GEMM_E8M0=1")
    assert decision.winner.scales == "float32-ceil-ue8m0" and decision.winner.is_lossy


def test_a_weight_over_the_error_budget_goes_to_the_next_kernel():
    lossy = linear(requant_error=0.0266)
    for budget, expected in (("0.01", ("cutlass", 5)), ("0.03", ("deep_gemm", 7))):
        assert outcome(ask(lossy, "100", "all", f"--max-requant-error {budget}")) == expected
        # What is not known is estimated, and never counts as allowed.
        assert outcome(ask(DENSE, "100", "all", f"--max-requant-error {budget}")) == expected
    exact = linear(requant_error=0.0)
    assert ask(exact, "100", "all", "--max-requant-error 0").chosen == "deep_gemm"
    assert ask(lossy, "90", "all", "--max-requant-error 0").chosen == "deep_gemm"  # float32


# ---------------------------------------------------------------- each rank over the next

LAYER = "model.layers.0.mlp.down_proj"
ALWAYS, NEVER = (1, 8192), (1, 0)


@pytest.mark.parametrize(
    ("wishes", "stronger", "without", "weaker"),
    [
        (
            "--kernel *.down_proj=triton --linear-backend marlin",
            ("triton", 1),
            "--linear-backend marlin",
            ("marlin", 2),
        ),
        (
            "--linear-backend marlin VLLM_USE_DEEP_GEMM=1",
            ("marlin", 2),
            "VLLM_USE_DEEP_GEMM=1",
            ("deep_gemm", 3),
        ),
        (
            "--linear-backend deep_gemm VLLM_USE_DEEP_GEMM=0",
            ("deep_gemm", 2),
            "VLLM_USE_DEEP_GEMM=0",
            ("cutlass", 3),
        ),
        (
            "VLLM_USE_DEEP_GEMM=1 use_deep_gemm=False",
            ("deep_gemm", 3),
            "use_deep_gemm=False",
            ("cutlass", 4),
        ),
        (
            "VLLM_USE_DEEP_GEMM=0 use_deep_gemm=True",
            ("cutlass", 3),
            "use_deep_gemm=True",
            ("deep_gemm", 4),
        ),
        ("use_deep_gemm=True", ("deep_gemm", 4), "-", ("cutlass", 5)),
        ("use_deep_gemm=False", ("cutlass", 4), "use_deep_gemm=rule", ("cutlass", 5)),
    ],
    ids=["1>2", "2>3 force", "2>3 exclude", "3>4 force", "3>4 exclude", "4>5 force", "4>5 exclude"],
)
def test_each_rank_wins_over_the_next(wishes, stronger, without, weaker):
    for wish, expected in ((wishes, stronger), (without, weaker)):
        assert outcome(ask(DENSE, "100", "all", wish, QWEN3_5, LAYER)) == expected


def test_the_model_rule_wins_over_what_was_measured_and_that_over_the_default_order():
    deep_gemm = timed(deep_gemm=ALWAYS, cutlass=NEVER)
    triton = timed(triton=ALWAYS, deep_gemm=NEVER)
    assert outcome(ask(DENSE, "100", model=QWEN3_5, timings=deep_gemm)) == ("cutlass", 5)
    assert outcome(ask(DENSE, "100", timings=triton)) == ("triton", 6)
    assert outcome(ask(DENSE, "100")) == ("deep_gemm", 7)


def test_a_layer_that_no_pattern_names_follows_the_next_rank():
    wishes = "--kernel *.down_proj=triton --linear-backend marlin"
    assert outcome(ask(DENSE, "100", wishes=wishes, layer="model.layers.0.q_proj")) == ("marlin", 2)


def test_a_variable_about_experts_leaves_dense_layers_to_the_other():
    wishes = "VLLM_USE_DEEP_GEMM=1 VLLM_MOE_USE_DEEP_GEMM=0"
    assert outcome(ask(DENSE, "100", wishes=wishes)) == ("deep_gemm", 3)
    assert outcome(ask(EXPERTS, "100", "deep_gemm", wishes)) == ("cutlass", 3)
    assert outcome(ask(DENSE, "100", wishes="VLLM_MOE_USE_DEEP_GEMM=0")) == ("deep_gemm", 7)
    alone = "VLLM_MOE_USE_DEEP_GEMM=1"
    assert outcome(ask(DENSE, "100", wishes=alone, model=QWEN3_5)) == ("cutlass", 5)
    assert outcome(ask(EXPERTS, "100", wishes=alone, model=QWEN3_5)) == ("deep_gemm", 3)


def test_a_wish_about_one_family_leaves_the_others():
    assert outcome(ask(EXPERTS, "100", wishes="--linear-backend triton")) == outcome(
        ask(EXPERTS, "100")
    )


def test_forcing_marlin_for_fp8_leaves_nvfp4_alone():
    wish = "VLLM_TEST_FORCE_FP8_MARLIN=1"
    assert outcome(ask(linear("fp8-channel"), "90", wishes=wish)) == ("marlin", 3)
    assert outcome(ask(linear("nvfp4"), "100", wishes=wish)) == ("cutlass", 7)


# ---------------------------------------------------------------- contradictions of one rank


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--linear-backend triton", "--linear-backend marlin"),
        ("--kernel *.down_proj=triton", "--kernel *.down_proj=marlin"),
        ("VLLM_LINEAR_BACKEND=triton", "VLLM_TEST_FORCE_FP8_MARLIN=1"),
        ("VLLM_LINEAR_BACKEND=deep_gemm", "VLLM_USE_DEEP_GEMM=0"),
        ("VLLM_LINEAR_BACKEND=marlin", "VLLM_NVFP4_GEMM_BACKEND=cutlass"),
    ],
)
def test_two_wishes_of_one_rank_for_one_layer_are_an_error_that_names_both(one, other):
    for wishes in (f"{one} {other}", f"{other} {one}"):
        with pytest.raises(ConfigError, match="contradict") as caught:
            policy_of(wishes)
        assert one in str(caught.value) and other in str(caught.value)


@pytest.mark.parametrize(
    "wishes",
    [
        "--linear-backend triton --moe-backend marlin",
        "--linear-backend triton --linear-backend triton",
        "VLLM_USE_DEEP_GEMM=0 VLLM_TEST_FORCE_FP8_MARLIN=1",
        "VLLM_USE_DEEP_GEMM=1 VLLM_NVFP4_GEMM_BACKEND=cutlass",
        "VLLM_USE_DEEP_GEMM=1 VLLM_TEST_FORCE_FP8_MARLIN=1",
        "VLLM_USE_DEEP_GEMM=0 VLLM_MOE_USE_DEEP_GEMM=1",
        "VLLM_LINEAR_BACKEND=deep_gemm VLLM_NVFP4_GEMM_BACKEND=cutlass",
        "--linear-backend marlin VLLM_LINEAR_BACKEND=triton",
    ],
)
def test_wishes_that_can_all_be_followed_are_no_contradiction(wishes):
    policy_of(wishes)


# ---------------------------------------------------------------- refusals, yields, fallbacks


def test_a_forced_backend_that_cannot_run_is_refused_and_the_others_say_who_asked():
    decision = ask(DENSE, "80", "all", "--linear-backend cutlass")
    assert outcome(decision) == (None, 2)
    assert whys(decision, "cutlass") == ["device"]
    assert whys(decision, "marlin") == ["policy"]


@pytest.mark.parametrize("wish", ["VLLM_USE_DEEP_GEMM=1", "use_deep_gemm=True"])
def test_a_permission_goes_on_without_deep_gemm_where_it_cannot_run(wish):
    for device, libs in (("80", "all"), ("100", "none"), ("120", "deep_gemm"), ("90", "broken")):
        decision = ask(DENSE, device, libs, wish)
        assert outcome(decision) == outcome(ask(DENSE, device, libs)) and whys(
            decision, "deep_gemm"
        )
    narrow = ask(linear(n=4080), "90", "all", wish)
    assert outcome(narrow) == ("cutlass", 7) and whys(narrow, "deep_gemm") == ["shape"]


def test_a_permission_keeps_what_was_measured():
    split = timed(cutlass=(1, 64), deep_gemm=(65, 8192))
    for model in (QWEN3_5, "llama"):
        decision = ask(DENSE, "100", "all", "VLLM_USE_DEEP_GEMM=1", model, timings=split)
        assert outcome(decision) == ("cutlass<=64|deep_gemm", 6)
    assert outcome(ask(DENSE, "100", "all", "VLLM_USE_DEEP_GEMM=1", QWEN3_5)) == ("deep_gemm", 3)


def test_a_permission_puts_deep_gemm_before_any_default_order():
    specs, machine = registry.specs("linear")[::-1], (parse_device("100"), LIBS["all"])
    usual = select(DENSE, *machine, policy_of(), specs)
    assert usual.chosen != "deep_gemm" and usual.origin.rank == 7
    assert outcome(select(DENSE, *machine, policy_of("VLLM_USE_DEEP_GEMM=1"), specs)) == (
        "deep_gemm",
        3,
    )


def test_0_of_the_variable_for_all_outranks_1_of_that_for_experts_and_says_so():
    decision = ask(EXPERTS, "90", "all", "VLLM_USE_DEEP_GEMM=0 VLLM_MOE_USE_DEEP_GEMM=1")
    assert decision.chosen != "deep_gemm" and whys(decision, "deep_gemm") == ["policy"]
    (reason,) = candidate(decision, "deep_gemm").reasons
    assert "VLLM_USE_DEEP_GEMM=0" in reason.text and "VLLM_MOE_USE_DEEP_GEMM=1" in reason.text


# ---------------------------------------------------------------- the cause: a second rounding


@pytest.mark.parametrize("device", ["100", "103", "120", "121"])
@pytest.mark.parametrize("problem", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_scales_that_are_powers_of_two_keep_deep_gemm_for_every_model(problem, device):
    exact = replace(problem, requant_error=0.0)
    for wish in ("-", "--requant exact-only", "--max-requant-error 0"):
        decision = ask(exact, device, "deep_gemm+sm120", wish, QWEN3_5)
        assert outcome(decision) == ("deep_gemm", 7) and not decision.winner.is_lossy
        assert decision.winner.requant == Requant(0.0)


@pytest.mark.parametrize("device", ["100", "120"])
def test_exact_only_keeps_weights_of_all_models_from_being_rounded_again(device):
    for problem in (DENSE, replace(DENSE, requant_error=0.0266)):
        decision = ask(problem, device, "deep_gemm+sm120", "--requant exact-only")
        assert outcome(decision) == ("cutlass", 5) and "exact-only" in decision.origin.text
        assert whys(decision, "deep_gemm") == ["numerics"]
    # Scales in the type of activations do not round the weight's codes.
    usual = ask(linear("int4-group[128]"), "90", "all")
    assert ask(linear("int4-group[128]"), "90", "all", "--requant exact-only") == usual


def test_allow_lifts_the_rule_and_no_budget():
    assert outcome(ask(DENSE, "100", "all", "--requant allow", QWEN3_5)) == ("deep_gemm", 7)
    both = "--requant allow --max-requant-error 0.01"
    assert outcome(ask(DENSE, "100", "all", both, QWEN3_5)) == ("cutlass", 5)


def test_the_form_of_scales_that_rounds_is_what_counts_not_the_chip():
    hopper = ask(DENSE, "90", "all", "VLLM_USE_DEEP_GEMM_E8M0=1 --requant exact-only")
    assert outcome(hopper) == ("cutlass", 5)
    assert ask(DENSE, "90", "all", "--requant exact-only").chosen == "deep_gemm"


def test_the_estimate_of_a_second_rounding_is_that_of_normally_distributed_weights():
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(5):
        weight = torch.randn(1024, 1024, generator=generator) * 0.02
        q, scales = per_block_cast_to_fp8(weight, (128, 128))
        tensors = LinearTensors(FP8, q, (1024,), scales)
        errors.append(requant_error(tensors).relative)
    assert estimated(Scales.UE8M0, "bf16").error == pytest.approx(sorted(errors)[2], rel=0.05)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_estimate_of_scales_in_the_type_of_activations_is_that_of_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(torch.rand(100_000, generator=generator) * 4) / 64
    rounded = scales.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).float()
    error = float(((rounded - scales) / scales).square().mean().sqrt())
    assert estimated(Scales.ACTIVATION, dtype).error == pytest.approx(error, rel=0.05)


def test_on_unmet_fallback_takes_the_next_kernel_and_records_it():
    wish = "--linear-backend cutlass --on-unmet fallback"
    decision = ask(DENSE, "80", "all", wish)
    assert outcome(decision) == ("marlin", 2)
    assert decision.origin.text != "--linear-backend cutlass"
    assert whys(decision, "cutlass") == ["device"]
    assert outcome(ask(DENSE, "90", "all", wish)) == ("cutlass", 2)


def test_a_fallback_never_goes_to_what_is_excluded():
    wish = "--linear-backend marlin --on-unmet fallback"
    assert ask(DENSE, "100", "no native", wish, QWEN3_5).chosen == "triton"
    decided = f"{wish} use_deep_gemm=True"
    assert ask(DENSE, "100", "no native", decided, QWEN3_5).chosen == "deep_gemm"


def test_require_native_refuses_what_only_widens_weights():
    assert outcome(ask(DENSE, "80", "all", "--require-native")) == (None, 2)
    assert ask(linear("int4-group[128]"), "80", "all", "--require-native").chosen == "marlin"
    decision = ask(DENSE, "89", "all", "--require-native")
    assert decision.chosen == "triton" and whys(decision, "marlin") == ["policy"]


# ---------------------------------------------------------------- purity

ASK = """
import sys
sys.path.insert(0, "tests/select")
from selection_cases import ask, linear, moe
for device in ("90", "100", "120", "cpu"):
    for problem in (linear(), linear("nvfp4"), moe()):
        print(ask(problem, device, model="qwen3_5_moe_text"))
assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_selection_needs_no_torch_and_reads_no_environment():
    root = Path(__file__).parents[2]
    said = [
        subprocess.run(
            [sys.executable, "-c", ASK], cwd=root, env=env, check=True, capture_output=True
        ).stdout
        for env in (
            {"PYTHONPATH": str(root)},
            {"PYTHONPATH": str(root), "PYTHONHASHSEED": "7", "VLLM_USE_DEEP_GEMM": "1"},
            {"PYTHONPATH": str(root), "PYTHONHASHSEED": "8", "VLLM_LINEAR_BACKEND": "triton"},
        )
    ]
    assert said[0] and said[0] == said[1] == said[2]
