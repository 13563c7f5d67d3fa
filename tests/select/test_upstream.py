"""Upstream's flags for the kernels that were chosen: what the table says, and where it has none."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from selection_cases import ask, linear, moe

from vllm.architectures.registry import builtin_names
from vllm.entrypoints.cli.main import main
from vllm.formats.act_scheme import ActScheme
from vllm.formats.registry import formats
from vllm.formats.scales import Scales
from vllm.kernels import registry
from vllm.kernels.default_order import DEFAULT_ORDER
from vllm.kernels.report import upstream, upstream_report
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.upstream import ENGINES, Advice, Entry, advice, table

REPOSITORY = Path(__file__).parents[2]
TABLE = table()
ENTRIES = TABLE.entries
ROWS = (*ENTRIES, *TABLE.exclusions, *TABLE.per_format)
EXCLUDING = {one.engine: one.setting for one in TABLE.exclusions}
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


def entry_id(entry: Entry) -> str:
    return f"{entry.engine} {entry.family} {entry.backend} {','.join(entry.formats)}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.engine} {row.sources[0].url[-20:]}")
def test_every_row_has_sources_and_the_release_that_they_describe(row):
    assert row.engine in TABLE.engines and row.sources
    for source in row.sources:
        domains = r"docs\.vllm\.ai|docs\.sglang\.io|github\.com/vllm-project"
        assert re.fullmatch(rf"https://({domains})/\S+", source.url)
        assert re.fullmatch(r"latest|\d+\.\d+\.\d+(rc\d+)?|20\d\d-\d\d", source.version)


def test_no_source_is_listed_that_no_row_has():
    content = json.loads((REPOSITORY / "vllm/kernels/report/upstream_flags.json").read_text())
    used = {source for row in ROWS for source in row.sources}
    assert {(one["url"], one["version"]) for one in content["sources"].values()} == used


def test_the_flag_takes_the_engines_of_the_table():
    assert tuple(TABLE.engines) == ENGINES


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_an_entry_names_what_the_registries_know(entry):
    assert entry.backend in DEFAULT_ORDER[entry.family]
    known = {name for spec in registry.specs(entry.family) for name in spec.formats}
    assert known <= {*formats(), "fp8"}  # of a KV cache
    assert all(any(upstream.fnmatchcase(name, own) for name in known) for own in entry.formats)
    assert set(entry.scales) <= set(Scales)
    assert all(re.fullmatch(r"sm_\d+x?", chip) for chip in entry.chips)


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_an_entry_has_settings_or_says_what_upstream_does_instead(entry):
    assert bool(entry.settings) != bool(entry.instead)
    for setting in entry.settings:
        assert re.fullmatch(r"--[\w-]+ [\w]+|(VLLM|SGLANG)_[A-Z0-9_]+=\w+", setting)


RECURRENCES = ("delta_rule", "mamba2")


def kernels() -> Iterator[tuple[str, str, str, str]]:
    """(family, backend, format, form of scales) of every declared kernel, but those of
    recurrences: of the choice of their kernels nothing is documented."""
    for spec in registry.all_specs():
        if spec.family in RECURRENCES:
            continue
        forms = {str(form) for _, form in spec.scales} or {""}
        for weight_format, form in product(spec.formats, forms):
            yield spec.family, spec.backend, weight_format, form


def of_kernel(entries, engine: str, family: str, backend: str, weight_format: str, form: str):
    return [
        entry
        for entry in entries
        if (entry.engine, entry.backend) == (engine, backend)
        and entry.is_of(family, weight_format)
        and (not entry.scales or form in entry.scales)
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kernel", sorted(set(kernels())), ids="-".join)
def test_every_kernel_has_one_entry_per_engine(kernel, engine):
    assert len(of_kernel(ENTRIES, engine, *kernel)) == 1


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_without_an_entry_some_kernel_has_none(entry):
    others = [other for other in ENTRIES if other != entry]
    assert any(not of_kernel(others, entry.engine, *kernel) for kernel in kernels())


@pytest.mark.parametrize("name", ["upstream.py", "upstream_report.py"])
def test_the_code_that_reads_the_table_names_no_kernel_and_no_format(name):
    source = (REPOSITORY / "vllm/kernels/report" / name).read_text()
    names = {name for order in DEFAULT_ORDER.values() for name in order} | set(formats())
    assert not [one for one in names if re.search(rf"(?<![\w-]){one}(?![\w-])", source)]


def test_every_file_of_the_package_that_is_not_python_is_in_a_wheel():
    setup = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = REPOSITORY / "vllm"
    shipped = {file for own in setup["package-data"]["vllm"] for file in package.glob(own)}
    files = {
        file for file in package.rglob("*") if file.is_file() and "__pycache__" not in str(file)
    }
    assert {file for file in files if file.suffix != ".py"} <= shipped
    assert REPOSITORY / "vllm/kernels/report/upstream_flags.json" in shipped


def test_explain_reads_the_table_only_where_it_is_asked_for(explain):
    table.cache_clear()
    explain("Qwen3-8B-FP8", "--device", "sm_90")
    assert table.cache_info().currsize == 0
    explain("Qwen3-8B-FP8", "--device", "sm_90", "--for", "vllm")
    assert table.cache_info().currsize == 1


# ---------------------------------------------------------------- models


@pytest.fixture(scope="module")
def reports():
    """reports(model, chip) -> what is decided for a built-in model with every library."""
    found: dict[tuple[str, str], dict] = {}

    def reported(model: str, chip: str, capsys) -> dict:
        if (model, chip) not in found:
            main(["kernels", "explain", model, "--device", chip, "--libs", "all", "--json"])
            found[model, chip] = json.loads(capsys.readouterr().out)
        return found[model, chip]

    return reported


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chip", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("model", list(builtin_names()))
def test_every_layer_of_a_model_has_flags_or_is_said_to_have_none(
    model, chip, engine, reports, capsys
):
    records = parse_report(reports(model, chip, capsys)).records
    found = advice(records, engine)
    serving = {(one.problem.family, layer, p) for layer, one in records for p in parts(one)}
    answered = [(a.family, layer, a.backend) for a in found.answers for layer in a.layers]
    assert sorted(answered) == sorted(serving)
    for answer in found.answers:
        refusal = f"no flag in {TABLE.engines[engine]} chooses {answer.backend} for "
        if answer.settings:
            assert answer.text == " with ".join(answer.settings)
        elif answer.backend == "(none)":
            assert answer.text == "no kernel serves these layers here"
        else:
            assert answer.text.startswith(refusal) and len(answer.text) > len(refusal)
        is_documented = answer.backend != "(none)" and answer.family not in RECURRENCES
        assert (answer.entry is not None) == is_documented
    page = " ".join(upstream_report.page(found, 100).split())
    assert all(answer.text in page for answer in found.answers)
    assert all(source.url in page for a in found.answers if a.entry for source in a.entry.sources)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chip", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("model", list(builtin_names()))
def test_a_command_has_no_flag_twice_and_none_that_contradicts_another(
    model, chip, engine, reports, capsys
):
    found = advice(parse_report(reports(model, chip, capsys)).records, engine)
    names = [upstream.name_of(setting) for setting in found.settings]
    assert len(names) == len(set(names))
    by_name: dict[str, set[str]] = {}
    for answer in found.answers:
        for setting in answer.settings:
            by_name.setdefault(upstream.name_of(setting), set()).add(setting)
    for name, settings in by_name.items():
        is_said = any(name in text for text in found.contradictions)
        assert is_said or (settings <= set(found.settings) and len(settings) == 1)


def parts(decision) -> list[str]:
    """The kernels that serve the layers of a decision."""
    if decision.chosen is None:
        return ["(none)"]
    return [name for _, name in decision.parts]


def test_a_model_that_loses_accuracy_with_deep_gemm_on_sm_100(explain):
    words = ("Qwen3.5-35B-A3B-FP8", "--device", "sm_100")
    content = explain(*words, "--for", "vllm")
    found = texts(content)
    assert found["cutlass", "linear fp8-block"] == (160, "--linear-backend cutlass")
    assert found["triton", "attention bf16"] == (10, "--attention-backend TRITON_ATTN")
    count, text = found["flashinfer-trtllm", "moe fp8-block"]
    assert count == 40 and text.startswith("--moe-backend flashinfer_trtllm")
    (excluded,) = content["upstream"]["exclusions"]
    assert excluded["setting"] == "VLLM_USE_DEEP_GEMM=0"
    assert "model rule" in excluded["excluded_by"][0]
    assert content["upstream"]["command"] == (
        "VLLM_USE_DEEP_GEMM=0 vllm serve MODEL --linear-backend cutlass "
        "--moe-backend flashinfer_trtllm --attention-backend TRITON_ATTN"
    )

    content = explain(*words, "--for", "sglang")
    found = texts(content)
    _, text = found["cutlass", "linear fp8-block"]
    assert "--fp8-gemm-backend cutlass is documented for sm_120 only" in text
    _, text = found["flashinfer-trtllm", "moe fp8-block"]
    assert text.startswith("--moe-runner-backend flashinfer_trtllm")
    assert content["upstream"]["command"].startswith(
        "SGLANG_ENABLE_JIT_DEEPGEMM=0 python -m sglang"
    )


def test_a_dense_model_on_sm_90_is_split_by_m_which_no_flag_of_upstream_does(explain):
    words = ("Qwen3-8B-FP8", "--device", "sm_90")
    content = explain(*words, "--for", "vllm")
    found = texts(content)
    assert found["cutlass", "linear fp8-block"] == (144, "--linear-backend cutlass")
    deep_gemm = "--linear-backend deep_gemm with VLLM_USE_DEEP_GEMM_E8M0=0"
    assert found["deep_gemm", "linear fp8-block"] == (144, deep_gemm)
    assert "no flag in vLLM 0.33.0 chooses skinny" in found["skinny", "linear fp8-block"][1]
    (text,) = content["upstream"]["contradictions"]
    assert f"--linear-backend cutlass, {deep_gemm} contradict each other" in text
    assert "number of tokens M" in text
    assert content["upstream"]["command"] == "vllm serve MODEL --attention-backend TRITON_ATTN"
    assert content["upstream"]["exclusions"] == []

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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_kernel_that_no_flag_chooses_is_said_with_what_upstream_does(engine):
    found = advice_for(engine, ask(linear(), "90", wishes="--linear-backend emulation"))
    (answer,) = found.answers
    text = f"no flag in {TABLE.engines[engine]} chooses emulation for linear fp8-block"
    assert answer.text == f"{text}: no emulation of FP8 blocks is listed"
    assert (answer.settings, found.settings) == ((), [])
    assert "Together" not in upstream_report.page(found, 100)


def test_a_kernel_of_another_package_has_no_entry():
    decision = ask(linear(), "90", wishes="--linear-backend cutlass")
    winner = replace(decision.winner, backend="example")
    other = replace(decision, chosen="example", candidates=(winner,))
    (answer,) = advice_for("vllm", other).answers
    assert answer.text.endswith("chooses example for linear fp8-block, as far as is documented")
    assert (answer.settings, answer.entry) == ((), None)


def test_a_kernel_that_is_emulated_is_chosen_by_no_flag():
    decision = replace(ask(linear(), "90", wishes="--linear-backend cutlass"), is_emulated=True)
    (answer,) = advice_for("vllm", decision).answers
    assert answer.text.endswith("chooses cutlass for linear fp8-block: it is emulated here")
    assert (answer.settings, answer.entry) == ((), None)


def test_layers_without_a_kernel_are_said_to_have_none():
    (answer,) = advice_for("vllm", ask(linear(), "90", wishes="--linear-backend cpu")).answers
    assert (answer.backend, answer.settings) == ("(none)", ())


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
    assert "--fp8-gemm-backend triton, SGLANG_FORCE_FP8_MARLIN=1 contradict" in text
    assert found.settings == []


def test_a_variable_that_goes_with_a_flag_contradicts_the_same_flag_without_it():
    int4 = replace(linear("int4-group[128]"), act=(ActScheme.DYNAMIC_TOKEN, ActScheme.NONE))
    by_fp8 = ask(int4, "120", wishes="--linear-backend marlin-w4a8")
    weight_only = ask(int4, "120", wishes="--linear-backend marlin")
    experts = ask(moe("int4-group[128]"), "120", wishes="--moe-backend marlin")
    alone = advice_for("vllm", by_fp8)
    assert alone.settings == ["--linear-backend marlin", "VLLM_MARLIN_INPUT_DTYPE=fp8"]
    assert alone.contradictions == []
    (text,) = advice_for("vllm", by_fp8, weight_only).contradictions
    assert "VLLM_MARLIN_INPUT_DTYPE=fp8, --linear-backend marlin contradict each other" in text
    found = advice_for("vllm", by_fp8, experts)
    (text,) = found.contradictions
    assert "VLLM_MARLIN_INPUT_DTYPE=fp8, --moe-backend marlin contradict each other" in text
    assert "these differ by kind of layer" in text and found.settings == []


def test_upstream_rounds_scales_on_hopper_where_we_do_not():
    for backend in ("--linear-backend", "--moe-backend"):
        problem = linear() if backend == "--linear-backend" else moe()
        flag = f"{backend} deep_gemm"
        as_stored = advice_for("vllm", ask(problem, "90", wishes=flag))
        assert as_stored.settings == [flag, "VLLM_USE_DEEP_GEMM_E8M0=0"]
        rounded = advice_for("vllm", ask(problem, "90", wishes=f"VLLM_USE_DEEP_GEMM_E8M0=1 {flag}"))
        assert rounded.settings == [flag]
        assert advice_for("vllm", ask(problem, "100", wishes=flag)).settings == [flag]


@pytest.mark.parametrize("engine", ENGINES)
def test_deep_gemm_that_some_layers_take_is_not_excluded_from_all(engine):
    decisions = (ask(linear(), **LISTED), ask(moe(), wishes="VLLM_USE_DEEP_GEMM=1"))
    found = advice_for(engine, *decisions)
    assert [one.exclusion.setting for one in found.excluded] == [EXCLUDING[engine]]
    assert EXCLUDING[engine] not in found.settings
    assert "excludes deep_gemm from all layers, and here it serves some" in found.contradictions[-1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("libs", ["all", "none"])
def test_the_model_rule_excludes_deep_gemm_whether_or_not_it_is_installed(engine, libs):
    found = advice_for(engine, ask(linear(), "100", libs, **LISTED))
    assert found.settings[0] == EXCLUDING[engine]


def test_deep_gemm_that_cannot_run_needs_no_exclusion():
    found = advice_for("vllm", ask(linear("bf16"), **LISTED), ask(linear(), "90", **LISTED))
    assert found.excluded == []


# ---------------------------------------------------------------- shown


def test_what_another_release_than_the_current_one_says_is_inferred():
    release = TABLE.engines["vllm"]
    grades = {
        version: upstream.Source("https://docs.vllm.ai", version).grade(release)
        for version in ("0.33.0", "0.32.0", "latest", "2025-10")
    }
    assert grades == {
        "0.33.0": "documented",
        "0.32.0": "of 0.32.0; inferred for 0.33.0",
        "latest": "undated; inferred for 0.33.0",
        "2025-10": "of 2025-10; inferred for 0.33.0",
    }


def test_the_page_names_each_source_once_and_marks_what_is_inferred():
    decisions = (ask(linear(), wishes="--linear-backend cutlass"), ask(linear("bf16")))
    page = " ".join(upstream_report.page(advice_for("vllm", *decisions), 100).split())
    assert "--linear-backend cutlass [1]" in page
    assert "(undated; inferred for 0.33.0)" in page
    assert page.count("https://") == 2


@pytest.mark.parametrize("width", [72, 100, 120])
def test_no_line_but_one_of_a_long_word_is_wider_than_the_terminal(width):
    page = upstream_report.page(
        advice_for("sglang", ask(linear(), **LISTED), ask(moe(), **LISTED)), width
    )
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
