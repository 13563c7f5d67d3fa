"""Every rejection has all its reasons, each of the right kind."""

from dataclasses import replace

import pytest
from selection_cases import LIBS, ask, attention, linear, moe, parse_device, policy_of, whys

from vllm.formats.act_scheme import ActScheme
from vllm.kernels.report.question import parse_lib
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.select import select
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import BUILD, NATIVE, Lib, Libs
from vllm.utils.versions import version_key

# A kernel with one requirement of each kind, and a problem that breaks them all.
STRICT = KernelSpec(
    backend="strict",
    family="linear",
    devices=frozenset({"sm_9x"}),
    formats=frozenset({"fp8-block"}),
    dtypes=frozenset({"bf16"}),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    libs=(("deep_gemm", "2.1"),),
    n_align=64,
    k_align=128,
    takes_bias=False,
    check=lambda problem: [Reason(Why.SHAPE, "never")],
)
ALL_WRONG = linear("bf16", n=100, k=200, dtype="fp32", bias=True)
MILD = replace(STRICT, check=None, takes_bias=True)

MILD_ACT = (ActScheme.DYNAMIC_GROUP128,)


def kinds(spec, problem, device="90", libs=LIBS["all"]) -> list[str]:
    decision = select(problem, parse_device(device), libs, Policy(), [spec])
    return whys(decision, spec.backend)


def test_every_unmet_requirement_is_listed():
    wrong = linear("fp8-block[64x64]", n=100, k=200, dtype="fp32", bias=True)
    found = kinds(replace(STRICT, blocks=frozenset({(128, 128)})), wrong, "90", LIBS["none"])
    assert sorted(found) == sorted(["library", "dtype", "format", *["shape"] * 4])
    weight_only = replace(linear(), act=(ActScheme.NONE,))
    assert kinds(MILD, weight_only) == ["numerics"]


def test_sizes_do_not_matter_on_another_chip_or_in_another_format():
    assert kinds(STRICT, ALL_WRONG, "cpu", LIBS["none"]) == (
        ["device", "library", "dtype", "numerics", "format"]
    )
    assert kinds(MILD, linear(n=100), "cpu") == ["device"]
    assert kinds(MILD, linear("bf16", n=100, act=MILD_ACT)) == ["format"]


def test_a_kernel_that_meets_everything_has_no_reason():
    assert kinds(MILD, linear()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("deep_gemm=2.1", []),
        ("deep_gemm=2.10", []),
        ("deep_gemm", []),
        ("deep_gemm=2.0.9", ["library"]),
        ("deep_gemm=broken: AssertionError", ["library"]),
        ("other=2.1", ["library"]),
    ],
)
def test_a_library_is_absent_broken_too_old_or_fine(text, expected):
    assert kinds(MILD, linear(), libs=Libs.of([parse_lib(text)])) == expected


@pytest.mark.parametrize(
    ("devices", "accepted"),
    [
        ({"sm_10x"}, ["100", "103"]),
        ({"sm_12x"}, ["120", "121"]),
        ({"sm_90"}, ["90"]),
        ({"sm_89", "sm_9x"}, ["89", "90"]),
        ({"cpu"}, ["cpu"]),
    ],
)
def test_a_family_is_a_set_of_chips_and_never_an_order(devices, accepted):
    spec = replace(MILD, devices=frozenset(devices))
    for device in ("80", "89", "90", "100", "103", "110", "120", "121", "cpu"):
        expected = [] if device in accepted else ["device"]
        assert kinds(spec, linear(), device) == expected, device


@pytest.mark.parametrize(
    ("arch", "chips"),
    [
        ("80", ["80", "86", "89"]),
        ("90a", ["90"]),
        ("90", ["90"]),
        ("100a", ["100"]),
        ("100f", ["100", "103"]),
        ("103a", ["103"]),
        ("110f", ["110"]),
        ("120a", ["120"]),
        ("120f", ["120", "121"]),
        ("121a", ["121"]),
        ("121f", ["121"]),
    ],
)
def test_code_for_an_architecture_runs_on_the_chips_its_suffix_says(arch, chips):
    every = ("75", "80", "86", "89", "90", "100", "103", "110", "120", "121", "cpu")
    assert [chip for chip in every if parse_device(chip).runs(arch)] == chips


def test_our_own_kernel_needs_code_for_the_chip_in_this_build():
    def built_for(*archs):
        return Libs.of([Lib("torch", "2.13.0"), Lib(NATIVE, "0.1.0", archs)])

    nvfp4 = linear("nvfp4")
    for device, archs, expected in (
        ("121", ("121a",), []),
        ("121", ("120f",), []),
        ("121", ("120a", "100f"), ["library"]),
        ("100", ("100f",), []),
        ("103", ("100a",), ["library"]),
        ("103", ("103a",), []),
    ):
        assert whys(ask(nvfp4, device, built_for(*archs)), "cutlass") == expected, (device, archs)


def test_a_backend_whose_code_is_not_in_this_build_has_a_library_reason():
    code = Lib(BUILD, archs=("linear/cutlass/fp8-block", "linear/triton/fp8-block"))
    libs = Libs(LIBS["all"].libs | {code})
    decision = ask(linear(), "90", libs)
    assert decision.chosen == "cutlass" and whys(decision, "deep_gemm") == ["library"]
    assert "library" in whys(ask(linear("fp8-tensor"), "90", libs), "scaled_mm")


def test_shapes_deep_gemm_lacks_are_shape_reasons_and_other_types_dtype_reasons():
    for problem, expected in (
        (linear(n=4064), ["shape"]),
        (linear(k=4160), ["shape"]),
        (linear(n=16, k=16), ["shape", "shape"]),
        (linear(dtype="fp16"), ["dtype"]),
        (linear("fp8-block[64x64]"), ["format"]),
        (linear(n=576, cut_n=32), []),
        (linear(k=576, cut_k=32), []),
    ):
        assert whys(ask(problem, "90"), "deep_gemm") == expected, problem


def test_a_cut_weight_of_blocks_that_a_kernel_lacks_is_still_refused():
    cut = linear("fp8-block[64x64]", n=544, cut_n=2)
    assert whys(ask(cut, "90"), "deep_gemm") == ["format"]


def test_batched_experts_are_a_shape_reason_for_kernels_that_take_tokens_by_router():
    decision = ask(moe(layout="batched"), "100")
    assert decision.chosen == "deep_gemm"
    assert whys(decision, "cutlass") == ["shape"]


@pytest.mark.parametrize(
    ("head_dim", "device", "chosen"),
    [
        (256, "90", "triton"),
        (512, "90", "torch"),
        (128, "cpu", "cpu"),
        (20, "cpu", "torch"),
        (512, "cpu", "torch"),
    ],
)
def test_a_head_size_that_a_kernel_lacks_is_a_shape_reason(head_dim, device, chosen):
    decision = ask(attention(head_dim=head_dim), device)
    assert decision.chosen == chosen
    for candidate in decision.candidates[: [c.backend for c in decision.candidates].index(chosen)]:
        assert {reason.why for reason in candidate.reasons} & {Why.SHAPE, Why.DEVICE}


def test_attention_that_compiles_for_a_minute_serves_where_it_is_asked_for():
    wish = "--attention-backend flashinfer"
    for head_dim in (64, 128, 256):
        problem = attention(head_dim=head_dim)
        assert ask(problem, "90").chosen == "triton"
        assert ask(problem, "90", wishes=wish).chosen == "flashinfer"
    refused = ask(attention(head_dim=96), "90", wishes=wish)
    assert refused.chosen is None
    assert whys(refused, "flashinfer") == ["shape"]


def test_an_fp8_cache_needs_a_chip_that_triton_compiles_e4m3_for():
    assert ask(attention("fp8"), "89", "none").chosen == "triton"
    decision = ask(attention("fp8"), "80", "none")
    assert decision.chosen == "torch" and whys(decision, "triton") == ["device"]


def test_without_the_native_library_the_reference_serves_the_cpu():
    assert ask(linear(), "cpu", "none").chosen == "cpu"
    for libs in ("no native", "broken"):
        decision = ask(linear(), "cpu", libs)
        assert decision.chosen == "torch" and whys(decision, "cpu") == ["library"]


def test_a_machine_that_can_serve_nothing_gets_nothing_with_every_reason():
    decision = ask(moe("nvfp4"), "130")
    assert decision.chosen is None and decision.origin.rank == 7
    assert all(candidate.reasons for candidate in decision.candidates)


def test_a_forced_kernel_is_not_charged_with_the_exclusions_it_outranks():
    policy = policy_of("--linear-backend deep_gemm use_deep_gemm=False")
    assert policy.exclusions
    decision = ask(linear(), "100", wishes="--linear-backend deep_gemm use_deep_gemm=False")
    assert decision.winner.backend == "deep_gemm" and not decision.winner.reasons


def test_versions_compare_by_number():
    assert version_key("0.6.13") > version_key("0.6.9")
    assert version_key("0.1.15.post2") > version_key("0.1.15")


def test_experts_with_biases_are_rejected_by_kernels_that_take_none():
    decision = ask(moe(bias=True), "90")
    texts = {c.backend: [r.text for r in c.reasons] for c in decision.candidates}
    assert texts["cutlass"] == texts["deep_gemm"] == ["takes no biases of experts"]
    assert not texts["triton"]
