"""`vllm kernels`: what is listed, explained, compared and refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from slow import quick

from vllm import envs
from vllm.architectures.registry import builtin_config, builtin_names
from vllm.entrypoints.cli.main import main
from vllm.kernels import registry
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.question import dtype_of
from vllm.machine import Device

from .serving import REPOSITORY

LISTED, FREE = "qwen3.5-35b-a3b-fp8", "qwen3-8b-fp8"
BLOCK = ["--layer", "fp8-block:4096x7168"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Variables that --env sets end with the test."""
    for name in envs.VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def run(capsys):
    """run(*words) -> (exit code, stdout, stderr) of `vllm kernels`."""

    def run_command(*words: str) -> tuple[int, str, str]:
        code = main(["kernels", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run_command


@pytest.fixture
def explain(run):
    """explain(*words) -> the JSON, where it succeeds."""

    def explained(*words: str) -> dict:
        code, out, err = run("explain", *words, "--json")
        assert code == 0, err
        return json.loads(out)

    return explained


def chosen(content: dict, layer: str) -> str | None:
    return next(d["chosen"] for d in content["decisions"] if layer in d["layers"])


def test_a_chip_that_is_emulated_is_explained_as_the_engine_would_choose(explain, run):
    words = (LISTED, "--device", "cpu", "--linear-backend")
    content = explain(*words, "emulate:sm_100")
    layer = "model.layers.0.mlp.shared_expert.down_proj"
    decision = next(d for d in content["decisions"] if layer in d["layers"])
    assert (decision["chosen"], decision["emulated"]) == ("cutlass", "cuda:sm_100")
    assert chosen(content, "model.layers.0.mlp.experts") == "cpu"
    content = explain(*words, "emulate:deep_gemm@sm_100")
    assert chosen(content, layer) == "deep_gemm"
    assert (
        "deep_gemm of cuda:sm_100, emulated"
        in run("explain", *words, "emulate:deep_gemm@sm_100")[1]
    )
    code, _, err = run("explain", *words, "emulate:sm_9000")
    assert code == 2 and "did you mean sm_90?" in err


def test_gpus_of_one_architecture_are_told_apart_by_what_was_measured_on_them(run):
    layer = ("--layer", "fp8-block:4096x12288", "--libs", "all", "--device")
    outs = {name: run("explain", *layer, name) for name in ("sm_90", "h100", "h200")}
    assert outs["sm_90"][1] == outs["h100"][1] and "measured:" in outs["h100"][1]
    assert "another chip" not in outs["h100"][1] and not outs["h100"][2]
    assert ("another chip" in outs["h200"][1]) == ("nothing was measured" in outs["h200"][2])


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [
        ("b200", "sm_100"),
        ("GB300", "sm_103"),
        ("RTX PRO 6000", "sm_120"),
        ("NVIDIA GeForce RTX 5090", "sm_120"),
        ("DGX Spark", "sm_121"),
        ("gb10", "sm_121"),
        ("NVIDIA H200", "sm_90"),
        ("4090", "sm_89"),
    ],
)
def test_a_chip_can_be_asked_about_by_the_name_on_the_box(run, gpu, arch):
    layer = ("explain", "--layer", "fp8-block:4096x4096", "--libs", "all", "--device")
    code, out, _ = run(*layer, gpu)
    assert code == 0 and out.splitlines()[0].split() == ["device", f"cuda:{arch}"]


def test_what_was_measured_on_an_h100_is_not_said_of_an_h20(run):
    layer = ("explain", "--layer", "fp8-block:4096x12288", "--libs", "all", "--device")
    _, out, err = run(*layer, "h20")
    assert "measured:" not in out and "nothing was measured on this chip" in err


def test_the_beginning_of_a_built_in_name_is_completed_in_the_error(run):
    code, _, err = run("explain", "devstral", "--device", "b200")
    assert code == 2 and "did you mean devstral-small-2-24b?" in err
    code, _, err = run("explain", "Devstral-Small-2-24B", "--device", "rtx9")
    assert code == 2 and "RTX PRO 6000" in err


def reasons(content: dict, backend: str) -> list[tuple[str, str]]:
    found = next(c for c in content["decisions"][0]["candidates"] if c["backend"] == backend)
    return [(reason["why"], reason["text"]) for reason in found["reasons"]]


def unwrapped(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------- list


def test_list_shows_every_backend_and_whether_its_code_is_here(run):
    _, out, _ = run("list", "--json")
    entries = json.loads(out)
    assert {(e["family"], e["backend"]) for e in entries} == {
        (family, name) for family in registry.FAMILIES for name in registry.backend_names(family)
    }
    built = [e for e in entries if e["is_built"]]
    assert set(registry.built().archs) == {
        f"{e['family']}/{e['backend']}/{weight}" for e in built for weight in e["formats"]
    }
    _, text, _ = run("list")
    for family in registry.FAMILIES:
        assert all(name in text for name in registry.backend_names(family))


def test_list_can_be_narrowed_to_a_family_and_a_chip(run):
    _, out, _ = run("list", "--family", "linear", "--device", "sm_90", "--json")
    names = {e["backend"] for e in json.loads(out)}
    assert "flashinfer-deepgemm" in names and not names & {"flashinfer-trtllm", "cpu"}


def test_list_says_what_a_kernel_needs(run):
    _, out, _ = run("list", "--family", "linear", "--json")
    (entry,) = [e for e in json.loads(out) if e["backend"] == "deep_gemm"]
    assert entry["needs"] == ["deep_gemm (with sm120 code on sm_12x)"]
    assert "ue8m0 on sm_10x" in entry["scales"]


# ---------------------------------------------------------------- explain


@pytest.mark.parametrize("model", builtin_names())
@pytest.mark.parametrize("device", quick(["sm_90", "sm_100", "sm_121", "cpu:avx512"], ["sm_100"]))
def test_every_built_in_model_is_explained_on_every_kind_of_chip(run, model, device):
    code, out, _ = run("explain", model.upper(), "--device", device, "--libs", "all", "--json")
    content = json.loads(out)
    assert report(*parse_report(content)) == content
    has_every_kernel = all(d["chosen"] for d in content["decisions"])
    assert code == (0 if has_every_kernel else 1)
    code_of_text, text, _ = run("explain", model, "--device", device, "--libs", "all")
    assert code_of_text == code and ("NO KERNEL" in text) is not has_every_kernel


def test_the_model_rule_decides_on_blackwell_and_nowhere_else(run, explain):
    where = ["--libs", "all"]
    layer = "model.layers.0.linear_attn.in_proj_qkvz"
    assert chosen(explain(LISTED, "--device", "sm_100", *where), layer) == "cutlass"
    assert "deep_gemm" in chosen(explain(LISTED, "--device", "sm_90", *where), layer)
    assert chosen(explain(LISTED, "--device", "sm_121", *where), layer) == "cutlass"
    _, text, _ = run("explain", LISTED, "--device", "sm_100", *where)
    assert "lifts the model rule" in unwrapped(text)
    _, text, _ = run("explain", LISTED, "--device", "sm_90", *where)
    assert "lifts the model rule" not in unwrapped(text)


def fp8_blocks(content: dict) -> set[str]:
    """The backends of all layers of FP8 blocks."""
    problems = [d for d in content["decisions"] if "fp8-block" in str(d["problem"].get("weight"))]
    assert len(problems) > 3
    return {decision["chosen"] for decision in problems}


def test_scales_that_are_powers_of_two_keep_deep_gemm_and_need_no_word(run, explain, tmp_path):
    where = ["--device", "sm_100", "--libs", "deep_gemm"]
    _, text, error = run("explain", "DeepSeek-V3.1", *where)
    assert "rounded a second time" not in text + error
    _, content, _ = run("explain", "DeepSeek-V3.1", *where, "--json")  # MLA has no kernel
    assert fp8_blocks(json.loads(content)) == {"deep_gemm"}
    config = builtin_config(LISTED)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert fp8_blocks(explain(str(tmp_path), *where)) == {"cutlass"}
    name = "model.language_model.layers.0.mlp.shared_expert.down_proj.weight_scale_inv"
    for scale, expected in ((2.0**-9, "deep_gemm"), (2.1, "cutlass")):
        save_file({name: torch.full((16, 4), scale)}, tmp_path / "model.safetensors")
        assert fp8_blocks(explain(str(tmp_path), *where)) == {expected}


def test_a_second_rounding_that_no_rule_forbids_is_told_with_its_estimate(run):
    _, text, _ = run("explain", FREE, "--device", "sm_100", "--libs", "all")
    assert "rounded a second time, a relative error of about 2.66%" in unwrapped(text)
    _, text, _ = run("explain", FREE, "--device", "sm_100", "--libs", "all", "--requant", "allow")
    assert "rounded a second time" in unwrapped(text)
    for more in (["--requant", "exact-only"], ["--env", "VLLM_USE_DEEP_GEMM=0"]):
        _, text, _ = run("explain", FREE, "--device", "sm_100", "--libs", "all", *more)
        assert "rounded a second time, a relative" not in unwrapped(text)


def test_a_permission_that_changes_nothing_warns_and_goes_on(run, caplog):
    where = ["--device", "sm_89", "--libs", "all", "--env", "VLLM_USE_DEEP_GEMM=1"]
    code, _, _ = run("explain", FREE, *where)
    assert code == 0
    (message,) = {r.message for r in caplog.records if "VLLM_USE_DEEP_GEMM" in r.message}
    assert "sm_89" in message


def test_a_variable_outranks_the_model_rule(explain):
    content = explain(
        LISTED, "--device", "sm_100", "--libs", "all", "--env", "VLLM_USE_DEEP_GEMM=1"
    )
    assert content["env"] == {"VLLM_USE_DEEP_GEMM": "1"}
    assert chosen(content, "model.layers.0.linear_attn.in_proj_qkvz") == "deep_gemm"


def test_the_rule_of_another_model_type_can_be_asked_for(explain):
    where = ["--device", "sm_100", "--libs", "deep_gemm"]
    assert explain(*BLOCK, *where)["decisions"][0]["chosen"] == "deep_gemm"
    ruled = explain(*BLOCK, *where, "--model-type", "qwen3_5_text")["decisions"][0]
    assert ruled["chosen"] == "cutlass" and ruled["origin"]["rank"] == 5


def test_a_model_is_a_folder_or_a_config_file_too(tmp_path, explain, checkpoint):
    folder = checkpoint("llama")
    by_folder = explain(str(folder), "--device", "cpu")
    assert by_folder == explain(str(folder / "config.json"), "--device", "cpu")
    problems = [d["problem"] for d in by_folder["decisions"]]
    assert {p["dtype"] for p in problems} == {"fp32"}  # on the CPU
    assert {p["family"] for p in problems} == {"linear", "attention", "kv_quant"}


def test_ranks_cut_a_model_and_the_cache_has_its_own_type(explain):
    words = ["qwen3-8b-fp8", "--device", "sm_90", "--libs", "all", "--kv-cache-dtype", "fp8"]
    problems = [d["problem"] for d in explain(*words, "--tp", "8")["decisions"]]
    assert any(p.get("cut_n") == 8 for p in problems)
    assert {p["format"] for p in problems if p["family"] == "attention"} == {"fp8"}
    assert {p["dtype"] for p in problems} == {"bf16"}  # the model's


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp8-block:4096x7168", {"n": 4096, "k": 7168, "m_range": [1, 8192], "parts": []}),
        ("fp8-block:576+192+192x576", {"n": 960, "parts": [576, 192, 192], "cut_n": 1}),
        ("fp8-block:18432/32x7168", {"n": 576, "k": 7168, "cut_n": 32, "cut_k": 1}),
        ("fp8-block:7168x18432/32", {"n": 7168, "k": 576, "cut_n": 1, "cut_k": 32}),
        ("fp8-block[64x64]:64x64", {"weight": "fp8-block[64x64]"}),
        ("nvfp4:4096x7168:64,1,8", {"weight": "nvfp4", "m_range": [1, 64]}),
        ("bf16:64x64:16", {"act": ["none"], "m_range": [16, 16]}),
    ],
)
def test_a_layer_is_written_in_one_word(explain, text, expected):
    (decision,) = explain("--layer", text, "--device", "sm_100", "--libs", "all")["decisions"]
    assert expected.items() <= decision["problem"].items()
    assert decision["layers"] == [text]


def test_libraries_are_those_listed_all_or_none(explain):
    none = explain(*BLOCK, "--device", "sm_121", "--libs", "none")
    assert ("library", "deep_gemm is not installed") in reasons(none, "deep_gemm")
    assert reasons(none, "cutlass") == []  # our native kernels are assumed, for every chip
    some = explain(*BLOCK, "--device", "sm_121", "--libs", "deep_gemm==2.6,flashinfer==0.5")
    assert ("device", "deep_gemm 2.6 carries no sm120 kernels") in reasons(some, "deep_gemm")
    assert any("older than" in text for _, text in reasons(some, "flashinfer-cutlass"))
    every = explain(*BLOCK, "--device", "sm_121", "--libs", "all")
    assert reasons(every, "deep_gemm") == []
    broken = explain(*BLOCK, "--device", "sm_90", "--libs", "deep_gemm=broken: no nvcc")
    assert ("library", "deep_gemm is broken: no nvcc") in reasons(broken, "deep_gemm")


def test_without_a_list_libraries_are_what_is_installed_and_built_here(run, explain):
    content = explain(*BLOCK, "--device", "sm_100")
    assert str(registry.built()) in content["libs"]
    _, _, err = run("explain", *BLOCK, "--device", "sm_100")
    assert "--libs all" in err


def test_a_wish_that_cannot_be_followed_explains_itself_and_exits_with_1(run):
    code, out, err = run(
        "explain", "--layer", "nvfp4:4096x7168", "--device", "sm_90", "--libs", "none",
        "--linear-backend", "cutlass",
    )  # fmt: skip
    assert code == 1
    assert "NO KERNEL for 1 linear layer" in out
    assert "--linear-backend cutlass" in out and "not on cuda:sm_90" in out
    assert "without a kernel" in err


def test_wishes_reach_the_policy(explain):
    where = [*BLOCK, "--device", "sm_100", "--libs", "all"]
    assert explain(*where, "--kernel", "fp8*=triton")["decisions"][0]["chosen"] == "triton"
    assert explain(*where, "--linear-backend", "DEEPGEMM")["decisions"][0]["chosen"] == "deep_gemm"
    native = explain(*where, "--require-native")
    assert [why for why, _ in reasons(native, "marlin")] == ["policy"]
    fallback = ["--linear-backend", "flashinfer-deepgemm", "--on-unmet", "fallback"]
    assert explain(*where, *fallback)["decisions"][0]["chosen"] == "deep_gemm"


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("asked", [[LISTED], BLOCK])
def test_brief_is_the_beginning_of_the_whole_on_one_screen(run, asked):
    words = ["explain", *asked, "--device", "sm_100", "--libs", "all"]
    code, brief, _ = run(*words, "--brief")
    assert code == 0 and len(brief.splitlines()) <= 30
    assert "serves" in brief and "chosen" not in brief
    whole = run(*words)[1]
    assert len(whole) > 2 * len(brief) and (asked == BLOCK or whole.startswith(brief.rstrip()))


def test_a_page_for_the_browser_is_written_beside_the_text(run, tmp_path):
    page = tmp_path / "kernels.html"
    code, out, err = run(
        "explain", LISTED, "--device", "sm_100", "--libs", "all", "--html", str(page)
    )
    assert code == 0 and "cutlass for" in out and str(page) in err
    assert page.read_text().startswith("<!doctype html>")


def write(path: Path, content: dict) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_two_reports_are_compared_as_diff_does(run, explain, tmp_path):
    words = [LISTED, "--device", "sm_100", "--libs", "all"]
    rule = write(tmp_path / "rule.json", explain(*words))
    obeyed = write(tmp_path / "obeyed.json", explain(*words, "--env", "VLLM_USE_DEEP_GEMM=1"))
    assert run("explain", "--diff", rule, rule) == (0, "", "")
    code, out, _ = run("explain", "--diff", rule, obeyed)
    assert code == 1
    assert "cutlass -> deep_gemm" in out and "model.layers.{0-39}" in out
    code, out, _ = run("explain", "--diff", rule, obeyed, "--json")
    assert code == 1
    assert "cutlass -> deep_gemm" in {change["title"] for change in json.loads(out)}


def test_the_committed_documentation_is_what_the_registries_declare(run, tmp_path):
    pages = {"--output": "kernels.md", "--models": "models.md"}
    committed = {name: (REPOSITORY / "docs" / name).read_text() for name in pages.values()}
    (tmp_path / "models.md").write_text(committed["models.md"])
    words = [word for flag, name in pages.items() for word in (flag, str(tmp_path / name))]
    assert run("docs", *words)[0] == 0
    for name, text in committed.items():
        assert (tmp_path / name).read_text() == text, (
            f"docs/{name} is out of date: run `vllm kernels docs`"
        )


def test_a_page_of_models_without_its_markers_is_refused_and_nothing_is_written(run, tmp_path):
    page = tmp_path / "models.md"
    page.write_text("# Models\n")
    code, _, err = run("docs", "--output", str(tmp_path / "kernels.md"), "--models", str(page))
    assert code == 2 and "architectures: written by `vllm kernels docs`" in err
    assert [*tmp_path.iterdir()] == [page] and page.read_text() == "# Models\n"


def test_the_documentation_names_every_variable_and_marks_chips_that_nothing_ran_on():
    text = (REPOSITORY / "docs" / "kernels.md").read_text()
    assert all(f"`{name}`" in text for name in envs.KERNEL_VARIABLES)
    assert "| sm_100 † |" in text and "| sm_121 † |" in text and "| sm_90 |" in text
    assert "not run on hardware" in text


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain"], "give one of MODEL, --layer and --diff"),
        (["explain", LISTED, *BLOCK], "give one of MODEL, --layer and --diff"),
        (["explain", "qwen3.5-35b-a3b-fp9"], "did you mean qwen3.5-35b-a3b-fp8?"),
        (["explain", *BLOCK, "--device", "sm_1000"], "did you mean sm_100?"),
        (["explain", *BLOCK, "--device", "sm_91"], "unknown chip"),
        (["explain", *BLOCK, "--device", "cpu:avx3"], "did you mean cpu:avx2?"),
        (["explain", *BLOCK, "--libs", "deepgemm"], "did you mean deep_gemm?"),
        (["explain", *BLOCK, "--linear-backend", "cutlas"], "did you mean cutlass?"),
        (["explain", *BLOCK, "--kernel", "cutlass"], "it takes PATTERN=BACKEND"),
        (["explain", *BLOCK, "--kernel", "*=cutlas"], "did you mean cutlass?"),
        (["explain", *BLOCK, "--moe-backend", "triton"], "means no layer of this model"),
        (["explain", *BLOCK, "--env", "VLLM_USE_DEEPGEMM=1"], "did you mean VLLM_USE_DEEP_GEMM?"),
        (["explain", *BLOCK, "--env", "VLLM_USE_DEEP_GEMM"], "it takes NAME=VALUE"),
        (["explain", *BLOCK, "--env", "VLLM_USE_DEEP_GEMM=yes"], "it takes 0 or 1"),
        (["explain", *BLOCK, "--dtype", "bf17"], "did you mean bf16?"),
        (["explain", *BLOCK, "--max-requant-error", "-1"], "it takes a relative error"),
        (["explain", *BLOCK, "--model-type", "qwen3_5_txt"], "did you mean qwen3_5_text?"),
        (["explain", *BLOCK, "--tp", "2"], "write a cut layer as"),
        (["explain", LISTED, "--tp", "7", "--device", "sm_90"], "is not a multiple of tp = 7"),
        (["explain", LISTED, "--kv-cache-dtype", "fp9", "--device", "cpu"], "did you mean fp8?"),
        (["explain", "--layer", "fp8-block:4096"], "it takes FORMAT:NxK"),
        (["explain", "--layer", "fp9:64x64"], "unknown weight format 'fp9'"),
        (["explain", "--layer", "fp8-block:100/3x64"], "100 cannot be cut into 3 equal shards"),
        (["explain", "--layer", "fp8-block:64/0x64"], "64 cannot be cut into 0 equal shards"),
        (["explain", "--layer", "bf16:0x64"], "sizes and token counts are 1 or more"),
        (["explain", "--layer", "bf16:64x64:0"], "sizes and token counts are 1 or more"),
        (["explain", "--diff", "no.json", "no.json"], "no.json is not readable JSON"),
        (["list", "--family", "liner"], "did you mean linear?"),
        (["list", "--device", "sm_1"], "unknown chip"),
        (["docs", "--output", "/no/such/folder/x.md"], "cannot be written"),
    ],
)
def test_a_wrong_word_is_refused_with_a_hint(run, words, message):
    code, out, err = run(*words)
    assert code == 2 and message in err and out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not readable JSON"), ("[]", "holds list"), ('{"model_type": "lama"}', "mean llama")],
)
def test_a_config_that_is_none_is_refused(run, tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    code, _, err = run("explain", str(tmp_path), "--device", "cpu")
    assert code == 2 and message in err


def test_a_folder_without_a_config_is_refused(run, tmp_path):
    code, _, err = run("explain", str(tmp_path))
    assert code == 2 and "has no config.json" in err


@pytest.mark.parametrize("words", [["--flag"], ["explain", "--libz", "all"], ["expain"]])
def test_an_unknown_flag_or_kind_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["kernels", *words])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16"}, "fp16"),
        ({"dtype": "float16"}, "fp16"),
        ({"torch_dtype": "torch.float16"}, "fp16"),
        ({}, "bf16"),
    ],
)
def test_auto_is_what_a_checkpoint_is_stored_in(config, dtype):
    assert dtype_of("auto", config, Device.parse("sm_90")) == dtype
