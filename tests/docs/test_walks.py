"""docs/architecture.md is true: its layers are those in force, and its walks are what happens."""

import re
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from doc_pages import text_of
from entrypoints.serving import started_server
from entrypoints.tiny_model import write_tiny_llama
from following import calls, environment, has_function, run_followed, walk

from vllm.model_executor.quantize import quantize_checkpoint

REQUEST, CHOICE, BACKEND = map(walk, ("A request", "A choice", "A new backend"))


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("walks")
    (folder / "source").mkdir()
    write_tiny_llama(folder / "source")
    quantize_checkpoint(folder / "source", folder / "model", "fp8-block")
    return folder / "model"


def test_the_table_of_layers_is_the_list_in_force():
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    section = text_of("docs/architecture.md").split("\n## Layers\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert [row.replace("`", "").split(", ") for row in rows] == [
        re.split(r" [:|] ", layer) for layer in layers
    ]


@pytest.mark.parametrize("name", dict.fromkeys([*REQUEST, *CHOICE, *BACKEND]))
def test_functions_of_the_walks_exist(name):
    module, _, path = name.partition(":")
    if module != "example_kernels":  # of CONTRIBUTING.md: test_contributing.py
        assert has_function(import_module(module), path)


@pytest.mark.slow
def test_a_request_takes_the_way_that_is_written(fp8_model, tmp_path):
    folder = tmp_path / "calls"
    variables = environment(folder, REQUEST)
    path = variables.pop("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with started_server(fp8_model, tmp_path / "log", **variables) as server:
            start = time.monotonic()
            server.chat(max_tokens=2, ignore_eos=True)
    assert calls(folder, after=start) == REQUEST


def test_a_choice_takes_the_way_that_is_written(fp8_model, tmp_path):
    script = f"from vllm import LLM; LLM({str(fp8_model)!r})"
    run_followed(script, tmp_path / "calls", CHOICE, cwd=tmp_path)
    assert calls(tmp_path / "calls") == CHOICE


def test_explain_takes_the_same_way_and_stops_before_a_kernel_is_made(fp8_model, tmp_path):
    words = ["kernels", "explain", str(fp8_model), "--device", "cpu", "--brief"]
    script = f"from vllm.entrypoints.cli.main import main; main({words!r})"
    run_followed(script, tmp_path / "calls", CHOICE, cwd=tmp_path)
    explained = calls(tmp_path / "calls")
    shared = ("vllm.kernels.problems", "vllm.kernels.evidence", "vllm.kernels.select")
    expected = [name for name in CHOICE if name.startswith(shared) and "Selection" not in name]
    assert [name for name in explained if name in expected] == expected
    assert "vllm.config.model_rule:model_rule" in explained
    made = ("vllm.kernels.make_kernel", "vllm.kernels.backends", "vllm.worker")
    assert not [name for name in explained if name.startswith(made)]
