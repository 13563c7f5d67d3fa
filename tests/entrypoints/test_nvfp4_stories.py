"""What `vllm kernels explain` tells of NVFP4 models on each kind of machine."""

import json

import pytest

from vllm.entrypoints.cli.main import main

DENSE, EXPERTS = "Llama-3.1-8B-NVFP4", "Qwen3.5-397B-A17B-NVFP4"
# A build whose newest code is for 12.0 alone: no 121a, and no 120f that would serve 12.1 too.
NO_121A = "native==0.1+80+90+90a+100a+120a"
NO_NATIVE = "native=broken: not built"
# FlashInfer with what its experts are made of, which takes too long to build at a first call.
WHOLE_FLASHINFER = "flashinfer==0.6.13+fused_moe_100+fused_moe_120"


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main(["kernels", "explain", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def nvfp4_decision(run, model, device, libs, *words):
    """(exit code, the one decision of the quantised layers)."""
    libraries = ["--libs", libs] if libs else []
    code, out, _ = run(model, "--device", device, *libraries, "--json", *words)
    found = [d for d in json.loads(out)["decisions"] if d["problem"].get("weight") == "nvfp4"]
    outcomes = {(d["chosen"], d.get("event")) for d in found}
    assert len(outcomes) == 1, outcomes
    return code, found[0]


def whys(decision, backend):
    (reasons,) = [c["reasons"] for c in decision["candidates"] if c["backend"] == backend]
    return {reason["why"] for reason in reasons}


STORIES = [
    # device, libraries, who serves linear layers, who serves experts, whether it is native
    ("sm_90", "all", "marlin", "marlin", False),
    ("sm_90", "none", "marlin", "marlin", False),
    ("sm_100", "all", "cutlass", "flashinfer-trtllm", True),
    ("sm_103", "none", "cutlass", "cutlass", True),
    ("sm_120", "all", "cutlass", "cutlass", True),
    ("sm_121", "all", "cutlass", "cutlass", True),
    ("sm_121", "none", "cutlass", "cutlass", True),
    ("sm_121", NO_121A, "torch", "torch", False),
    ("sm_120", NO_121A, "cutlass", "cutlass", True),
    ("sm_121", f"{NO_121A},{WHOLE_FLASHINFER}", *["flashinfer-cutlass"] * 2, True),
    ("sm_121", f"{NO_NATIVE},{WHOLE_FLASHINFER}", *["flashinfer-cutlass"] * 2, True),
    ("sm_100", f"{NO_NATIVE},{WHOLE_FLASHINFER}", *["flashinfer-cutlass"] * 2, True),
    ("sm_80", "all", "marlin", "marlin", False),
]


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
@pytest.mark.parametrize(("device", "libs", "dense", "experts", "is_native"), STORIES)
def test_the_story_of_a_machine(run, model, device, libs, dense, experts, is_native):
    code, decision = nvfp4_decision(run, model, device, libs)
    chosen = decision["chosen"]
    assert (code, chosen) == (0, dense if model == DENSE else experts)
    winner = next(c for c in decision["candidates"] if c["backend"] == chosen)
    assert winner["act"] == ("nvfp4-group16" if is_native else "none")
    assert ("event" in decision) == (not is_native)


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
@pytest.mark.parametrize(("device", "libs", "dense", "experts", "is_native"), STORIES)
def test_require_native_refuses_what_crosses_and_nothing_else(
    run, model, device, libs, dense, experts, is_native
):
    code, decision = nvfp4_decision(run, model, device, libs, "--require-native")
    assert code == (0 if is_native else 1)
    assert (decision["chosen"] is None) == (not is_native)
    assert "policy" in whys(decision, "torch")
    assert "event" not in decision


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_a_missing_121a_is_a_fact_about_the_build_and_not_about_the_chip(run, model):
    _, decision = nvfp4_decision(run, model, "sm_121", NO_121A)
    assert whys(decision, "cutlass") == {"library"}
    assert "no 120f or 121a code" in decision["event"]
    _, decision = nvfp4_decision(run, model, "sm_90", "all")
    assert whys(decision, "cutlass") == {"device"}


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_a_kernel_without_code_here_is_not_promised(run, model):
    """Without --libs the answer is this build's: Marlin without code for the chip is not chosen."""
    code, decision = nvfp4_decision(run, model, "sm_90", None)
    assert code == 0
    assert "library" in whys(decision, "marlin")
    assert decision["chosen"] == "torch" and "by torch" in decision["event"]


def test_the_event_is_told_in_words_with_its_layers_and_the_way_to_forbid_it(run):
    _, out, _ = run(EXPERTS, "--device", "sm_90", "--libs", "all")
    told = " ".join(out.split())
    assert "Event: native -> weight-only: moe nvfp4 by marlin, which widens weights to bf16" in told
    assert "cutlass: runs on sm_10x, sm_12x, not on cuda:sm_90" in told
    assert "--require-native refuses this (model.layers.{0-59}.mlp.experts)" in told
    _, out, _ = run(EXPERTS, "--device", "sm_100", "--libs", "all")
    assert "Event" not in out


def test_a_page_for_the_browser_tells_the_event(run, tmp_path):
    page = tmp_path / "kernels.html"
    run(DENSE, "--device", "sm_90", "--libs", "all", "--html", str(page))
    assert "native -&gt; weight-only: linear nvfp4 by marlin" in page.read_text()


def test_an_event_that_was_asked_for_names_who_asked(run):
    words = ("--linear-backend", "marlin")
    _, decision = nvfp4_decision(run, DENSE, "sm_100", "all", *words)
    assert "--linear-backend marlin; --require-native" in decision["event"]


def test_a_report_with_an_event_is_read_back(run, tmp_path):
    _, out, _ = run(DENSE, "--device", "sm_90", "--libs", "all", "--json")
    (tmp_path / "a.json").write_text(out)
    assert run("--diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")) == (0, "", "")


def test_layers_that_are_kept_cross_nothing(run):
    _, out, _ = run(EXPERTS, "--device", "sm_90", "--libs", "all", "--json")
    events = [d for d in json.loads(out)["decisions"] if "event" in d]
    assert {d["problem"]["family"] for d in events} == {"moe"}


def test_experts_of_flashinfer_wait_for_a_module_that_is_built_beforehand(run):
    """Its dense layers do not: their modules take the time of a first call."""
    libs = f"{NO_NATIVE},flashinfer"
    assert nvfp4_decision(run, DENSE, "sm_100", libs)[1]["chosen"] == "flashinfer-cutlass"
    _, decision = nvfp4_decision(run, EXPERTS, "sm_100", libs)
    assert decision["chosen"] == "torch"
    assert whys(decision, "flashinfer-cutlass") == {"library"}


@pytest.mark.parametrize(
    ("model", "variable", "value", "missing"),
    [
        ("Qwen3-8B-FP8", "VLLM_TEST_FORCE_FP8_MARLIN", "1", "code of marlin_gemm"),
        (DENSE, "VLLM_NVFP4_GEMM_BACKEND", "marlin", "code of marlin_gemm"),
        (DENSE, "VLLM_NVFP4_GEMM_BACKEND", "flashinfer-trtllm", "flashinfer_cubin is not"),
    ],
)
def test_a_variable_that_asks_for_a_kernel_without_code_here_is_refused(
    run, monkeypatch, model, variable, value, missing
):
    monkeypatch.setenv(variable, value)
    code, out, err = run(model, "--device", "sm_100")
    assert code == 1 and "without a kernel" in err
    assert missing in " ".join(out.split()) and f"{variable}={value}" in out
    assert run(model, "--device", "sm_100", "--libs", "all")[0] == 0
