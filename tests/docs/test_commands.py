"""Every command and script on the pages works.

What needs neither a GPU nor a download is run, page by page, with a tiny model as `./model` and one
server for all. Everything else is parsed by the parser of the program itself, which then does not
start. A command that is neither run nor parsed fails.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checking import check
from doc_pages import (
    PAGES,
    REPOSITORY,
    SHELL,
    Block,
    blocks,
    command,
    commands,
    inline_codes,
    sections,
)
from entrypoints.serving import RunningServer, started_server
from entrypoints.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with started_server(model, log, "--max-num-seqs", "16") as running:
        yield running


@pytest.fixture
def workplace(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the commands of a page run."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "serve.yaml").write_text("model: ./model\nmax-model-len: 512\n")
    for name in ("benchmarks", "tests", "vllm", "docs", "csrc", "cmake", "pyproject.toml"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path


def own_blocks(page: str) -> list[Block]:
    """Those of CONTRIBUTING.md that need a package or a file of it are test_contributing.py's."""
    examples = [section for section in sections(page) if section.title.startswith("Add a")]
    return [b for b in blocks(page) if not any(b.line in section.lines for section in examples)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_blocks_work(page, workplace, monkeypatch, request, capsys):
    for block in own_blocks(page):
        if block.language in SHELL:
            for one in commands(block):
                check(one, monkeypatch, lambda: request.getfixturevalue("server"))
        elif block.language == "python":
            exec(compile(block.text, f"{page}:{block.line}", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_are_accepted(page, workplace, monkeypatch):
    programs = re.compile(r"([A-Z_]+=\S+ )*(vllm (?!\.\.\.)|make |python |pytest |pip )")
    for code in inline_codes(page):
        if programs.match(code):
            check(command(page, code), monkeypatch, None)


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve ./model --max-model-length 8",
        "vllm serve ./model --seed x",
        "vllm kernels explian MODEL --json",
        "make no-such-target",
        "pip install --no-dependencys x",
        "pip install '.[unstructured]'",
        "python benchmarks/on_gpu.py --lists",
        "python benchmarks/no_such_file.py",
        "python benchmarks/accuracy/plots.py --figures FILE",
        "cmake -S . -DVLLM_STRIKT_ARCHS=ON",
        "docker build --target gpu .",
        "docker run -v vllm-cache:/cache vllm:cpu ./model --max-model-length 8",
        "kubectl apply -f deploy/kubernetes/absent.yaml",
        "kubectl create secret generic vllm --from-literal=key=KEY",
        "rm -r build",
    ],
)
def test_a_wrong_command_is_noticed(text, workplace, monkeypatch, capsys):
    with pytest.raises(AssertionError, match="here: "):
        check(command("here", text), monkeypatch, None)
