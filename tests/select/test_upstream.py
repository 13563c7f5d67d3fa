"""Upstream's flags for the kernels that were chosen: what the table says, and where it has none."""

import json
import re

import pytest
from selection_cases import ask, linear, moe

from vllm.entrypoints.cli.main import main
from vllm.kernels import registry
from vllm.kernels.default_order import DEFAULT_ORDER
from vllm.kernels.report import upstream
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.upstream import EXCLUSIONS, RELEASES, ROWS, Advice, advice

ALL_ROWS = (*ROWS, *EXCLUSIONS.values())
LISTED = {"model": "qwen3_5_moe_text"}


@pytest.fixture
def explain(capsys):
    """explain(*words) -> the JSON of `vllm kernels explain --libs all`."""

    def explained(*words: str) -> dict:
        assert main(["kernels", "explain", *words, "--libs", "all", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return explained


def texts(content: dict) -> dict[tuple[str, str], tuple[int, str]]:
    """(kernel, layers' kind and format) -> number of layers, flag or why there is none."""
    return {
        (one["backend"], f"{one['family']} {one['format']}"): (len(one["layers"]), one["text"])
        for one in content["upstream"]["answers"]
    }


def advice_for(engine: str, *decisions) -> Advice:
    return advice([(f"model.layers.{i}.proj", one) for i, one in enumerate(decisions)], engine)


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: f"{row.engine} {row.family} {row.name}")
def test_every_row_has_a_source_and_the_release_that_it_describes(row):
    assert re.fullmatch(
        r"https://(docs\.vllm\.ai|docs\.sglang\.io|github\.com)/\S+", row.source.url
    )
    assert re.fullmatch(r"latest|\d+\.\d+\.\d+(rc\d+)?", row.source.version)
    assert row.engine in RELEASES
    assert row.value or row.note


@pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: f"{row.engine} {row.family} {row.name}")
def test_what_no_source_says_of_the_current_release_is_marked_inferred(row):
    is_current = row.source.version == RELEASES[row.engine].version
    assert ("inferred" in row.grade) == (not is_current or bool(row.inferred))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.engine} {row.family} {row.backend}")
def test_every_row_is_of_a_kernel_that_takes_its_formats_here(row):
    taken = {
        weight_format
        for spec in registry.specs(row.family)
        for weight_format in spec.formats
        if spec.backend == row.backend
    }
    assert row.backend in DEFAULT_ORDER[row.family]
    assert set(row.formats) <= taken


def test_a_kernel_and_a_format_have_one_row_per_engine():
    keys = [
        (row.engine, row.family, row.backend, weight_format)
        for row in ROWS
        for weight_format in row.formats or ("",)
    ]
    assert len(keys) == len(set(keys))


# ---------------------------------------------------------------- models


def test_a_model_that_loses_accuracy_with_deep_gemm_on_sm_100(explain):
    words = ("Qwen3.5-35B-A3B-FP8", "--device", "sm_100")
    content = explain(*words, "--for", "vllm")
    found = texts(content)
    assert found["cutlass", "linear fp8-block"] == (160, "--linear-backend cutlass")
    assert found["triton", "attention bf16"] == (10, "--attention-backend TRITON_ATTN")
    count, text = found["cutlass", "moe fp8-block"]
    assert count == 40 and "no flag in vLLM 0.33.0 chooses cutlass for moe fp8-block" in text
    assert content["upstream"]["excluding"]["setting"] == "VLLM_USE_DEEP_GEMM=0"
    assert "model rule" in content["upstream"]["deep_gemm_excluded_by"][0]
    assert content["upstream"]["command"] == (
        "VLLM_USE_DEEP_GEMM=0 vllm serve MODEL --linear-backend cutlass "
        "--attention-backend TRITON_ATTN"
    )

    content = explain(*words, "--for", "sglang")
    found = texts(content)
    _, text = found["cutlass", "linear fp8-block"]
    assert "--fp8-gemm-backend cutlass is documented for sm_120 only" in text
    assert found["cutlass", "moe fp8-block"] == (40, "--moe-runner-backend cutlass")
    assert content["upstream"]["command"].startswith(
        "SGLANG_ENABLE_JIT_DEEPGEMM=0 python -m sglang"
    )


def test_a_dense_model_on_sm_90_is_split_by_m_which_no_flag_of_upstream_does(explain):
    words = ("Qwen3-8B-FP8", "--device", "sm_90")
    content = explain(*words, "--for", "vllm")
    found = texts(content)
    assert found["cutlass", "linear fp8-block"] == (144, "--linear-backend cutlass")
    assert found["deep_gemm", "linear fp8-block"] == (144, "--linear-backend deep_gemm")
    assert "no flag in vLLM 0.33.0 chooses skinny" in found["skinny", "linear fp8-block"][1]
    (text,) = content["upstream"]["contradictions"]
    assert "--linear-backend cutlass and --linear-backend deep_gemm contradict each other" in text
    assert "number of tokens M" in text
    assert content["upstream"]["command"] == "vllm serve MODEL --attention-backend TRITON_ATTN"
    assert content["upstream"]["excluding"] is None

    upstream_of = explain(*words, "--for", "sglang")["upstream"]
    assert upstream_of["contradictions"] == []
    (text,) = upstream_of["overreach"]
    assert "--fp8-gemm-backend deep_gemm also decides where other kernels serve here" in text
    assert "skinny (linear fp8-block for some M), cutlass (linear fp8-block for some M)" in text


def test_nvfp4_experts_on_sm_120(explain):
    words = ("Qwen3.5-397B-A17B-NVFP4", "--device", "sm_120")
    found = texts(explain(*words, "--for", "vllm"))
    assert found["cutlass", "moe nvfp4"] == (60, "--moe-backend cutlass")
    assert "--linear-backend is for quantised layers only" in found["torch", "linear bf16"][1]
    found = texts(explain(*words, "--for", "sglang"))
    assert (
        "no flag in SGLang 0.5.23 chooses cutlass for moe nvfp4" in found["cutlass", "moe nvfp4"][1]
    )


# ---------------------------------------------------------------- single decisions


@pytest.mark.parametrize("engine", RELEASES)
def test_a_kernel_without_a_row_is_said_to_have_no_flag(engine):
    found = advice_for(engine, ask(linear(), "90", wishes="--linear-backend emulation"))
    (answer,) = found.answers
    release = str(RELEASES[engine])
    assert answer.text.startswith(f"no flag in {release} chooses emulation for linear fp8-block")
    assert (answer.row, found.settings) == (None, [])
    assert "Together" not in upstream.page(found, 100)


def test_layers_without_a_kernel_are_said_to_have_none():
    (answer,) = advice_for("vllm", ask(linear(), "90", wishes="--linear-backend cpu")).answers
    assert (answer.backend, answer.setting) == ("(none)", "")


def test_two_formats_under_one_flag_contradict_each_other_in_vllm_alone():
    decisions = (
        ask(linear(), wishes="--linear-backend deep_gemm"),
        ask(linear("nvfp4"), wishes="--linear-backend flashinfer-cutlass"),
    )
    found = advice_for("vllm", *decisions)
    (text,) = found.contradictions
    assert "differ by weight format" in text and "linear_backend_per_quant" in text
    assert found.settings == []
    found = advice_for("sglang", *decisions)
    assert found.contradictions == []
    assert found.settings == [
        "--fp8-gemm-backend deep_gemm",
        "--fp4-gemm-backend flashinfer_cutlass",
    ]


def test_a_variable_and_a_flag_for_the_same_layers_contradict_each_other():
    decisions = (
        ask(linear(), wishes="--linear-backend triton"),
        ask(linear("fp8-channel"), wishes="--linear-backend marlin"),
    )
    found = advice_for("sglang", *decisions)
    (text,) = found.contradictions
    assert "--fp8-gemm-backend triton and SGLANG_FORCE_FP8_MARLIN=1 contradict" in text
    assert found.settings == []


@pytest.mark.parametrize("engine", RELEASES)
def test_deep_gemm_that_some_layers_take_is_not_excluded_from_all(engine):
    decisions = (ask(linear(), **LISTED), ask(moe(), wishes="VLLM_USE_DEEP_GEMM=1"))
    found = advice_for(engine, *decisions)
    assert found.excluding is not None
    assert found.excluding.setting not in found.settings
    assert "excludes DeepGEMM from all layers, and here it serves some" in found.contradictions[-1]


@pytest.mark.parametrize("engine", RELEASES)
@pytest.mark.parametrize("libs", ["all", "none"])
def test_the_model_rule_excludes_deep_gemm_whether_or_not_it_is_installed(engine, libs):
    found = advice_for(engine, ask(linear(), "100", libs, **LISTED))
    assert found.settings[0] == EXCLUSIONS[engine].setting


def test_deep_gemm_that_cannot_run_needs_no_exclusion():
    found = advice_for("vllm", ask(linear("bf16"), **LISTED), ask(linear(), "90", **LISTED))
    assert found.excluding is None


# ---------------------------------------------------------------- shown


def test_the_page_names_each_source_once_and_marks_what_is_inferred():
    decisions = (ask(linear(), wishes="--linear-backend cutlass"), ask(linear("bf16")))
    page = " ".join(upstream.page(advice_for("vllm", *decisions), 100).split())
    assert "--linear-backend cutlass [1]" in page
    assert "(undated; inferred for 0.33.0)" in page
    assert page.count("https://") == 2


@pytest.mark.parametrize("width", [72, 100, 120])
def test_no_line_but_one_of_a_long_word_is_wider_than_the_terminal(width):
    page = upstream.page(advice_for("sglang", ask(linear(), **LISTED), ask(moe(), **LISTED)), width)
    assert all(len(line) <= width or "https://" in line for line in page.splitlines())


def test_json_has_the_field_only_when_it_is_asked_for_and_diff_takes_both(explain):
    words = ("Qwen3-8B-FP8", "--device", "sm_90")
    plain, extended = explain(*words), explain(*words, "--for", "vllm")
    assert "upstream" not in plain
    assert {key: extended[key] for key in plain} == plain
    assert report(*parse_report(extended)) == plain


def test_another_engine_is_refused_with_the_names_that_are_taken(capsys):
    with pytest.raises(SystemExit) as error:
        main(["kernels", "explain", "Qwen3-8B-FP8", "--for", "vlm"])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert "vlm" in message and "vllm" in message and "sglang" in message


def test_a_comparison_takes_no_engine(capsys):
    assert main(["kernels", "explain", "--diff", "a", "b", "--for", "vllm"]) == 2
    assert "--for goes with MODEL or --layer" in capsys.readouterr().err
