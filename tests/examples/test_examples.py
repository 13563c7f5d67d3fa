"""Every program in `examples/` runs, with a tiny model and offline, and is listed."""

import ast
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from entrypoints.serving import RunningServer, started_server
from entrypoints.test_tools import TEMPLATE
from entrypoints.tiny_model import write_tiny_llama

from vllm.kernels import own_backend, registry

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(folder / "template.jinja"), "--tool-call-parser", "hermes")
    with started_server(model, folder / "log", *flags) as running:
        yield running


@pytest.fixture
def run(monkeypatch, capsys, tmp_path) -> Callable[..., str]:
    """Runs an example as `python examples/NAME WORDS` does, and returns what it prints."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(name: str, *words: object) -> str:
        file = ROOT / "examples" / name
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, words)])
        runpy.run_path(str(file), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_offline_batch(run, model) -> None:
    assert len(re.findall(r"^.+ \.\.\.'.+'$", run("offline_batch.py", model), re.MULTILINE)) == 4


def test_chat(run, model) -> None:
    out = run("chat.py", model)
    assert out.count("assistant: ") == 2
    cached = [int(n) for n in re.findall(r"\((\d+) of \d+ prompt tokens cached\)", out)]
    assert cached[0] == 0 < cached[1]


def test_streaming_client(run, server) -> None:
    out = run("streaming_client.py", server.url, "ban", "fick")
    assert re.search(r"\n\(\d+ tokens, the first after [\d.]+ s, then [\d.]+ s\)\n$", out)


def test_tools(run, server) -> None:
    out = run("tools.py", server.url)
    assert re.search(r"^call: weather\({'city': '(Paris|Rome|Oslo)'}\) -> ", out)
    assert "\nanswer: " in out


def test_structured_output(run, model) -> None:
    person, date, mood = run("structured_output.py", model).splitlines()
    assert re.fullmatch(r"name '.{0,20}', age \d+", person)
    assert re.fullmatch(r"(19|20)\d\d-[01]\d-[0-3]\d", date)
    assert mood in ("positive", "negative")


def test_quantize_and_compare(run, model) -> None:
    _, stored, *rows = [line.split() for line in run("quantize_and_compare.py", model).splitlines()]
    assert stored[:2] == ["as", "stored"]
    assert [row[0] for row in rows] == ["fp8-block", "nvfp4"]
    fp8, nvfp4 = (float(row[2]) for row in rows)
    assert 0 < fp8 < nvfp4


def test_which_kernel(run) -> None:
    out = run("which_kernel.py")
    assert re.search(r"^fp8-block:4096x7168 on cuda:sm_90: deep_gemm, by \w+", out)
    assert "  not cutlass: runs on " in out


@pytest.mark.slow
def test_tune_on_cpu(run) -> None:
    before, after = re.findall(r"decided by.*?\n(.*?)\n\n", run("tune_on_cpu.py"), re.DOTALL)
    assert before != after


def test_plugin_backend(run, model) -> None:
    try:
        assert "example serves 2 layers: " in run("plugin_backend.py", model)
    finally:
        registry._own.clear()
        own_backend._loaded.clear()
        for cached in (registry.backend_names, registry.specs, registry.built):
            cached.cache_clear()


@pytest.mark.slow
def test_two_node_ray(run, model) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'vllm[ray]'")
    assert run("two_node_ray.py", "--simulate", model).strip()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_example_is_listed_and_says_how_to_run_it(page: str) -> None:
    text = (ROOT / page).read_text()
    for file in EXAMPLES:
        assert f"examples/{file.name}" in text
        doc = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert f"    python examples/{file.name}" in doc
        assert f"def test_{file.stem}(" in Path(__file__).read_text()
