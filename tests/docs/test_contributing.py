"""The worked examples of CONTRIBUTING.md, built from its blocks and used."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from entrypoints.tiny_model import write_tiny_llama
from following import calls, run_followed, walk
from markdown import REPOSITORY, SHELL, Block, blocks, commands, sections

PAGE = "CONTRIBUTING.md"


def blocks_of(title: str) -> list[Block]:
    (lines,) = (section.lines for section in sections(PAGE) if section.title == title)
    return [block for block in blocks(PAGE) if block.line in lines]


def install(section: str, folder: Path) -> tuple[Path, str]:
    """Writes the files of the section, installs its package apart, and returns where to, with the
    script that uses it."""
    script = ""
    for block in blocks_of(section):
        if file := re.fullmatch(r"`(\S+)`:", block.title):
            target = folder / file[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
        elif block.language == "python":
            script += block.text
    (package,) = folder.iterdir()
    installed = folder / "installed"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps",
         "--no-index", "--disable-pip-version-check", "--target", str(installed), str(package)],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return installed, script


def check_commands(title: str, installed: Path, cwd: Path) -> None:
    """The commands of a section, in a process in which its package is installed."""
    texts = [one.text for b in blocks_of(title) if b.language in SHELL for one in commands(b)]
    assert texts
    script = f"""
import sys
sys.path[:0] = {[str(REPOSITORY / "tests" / "docs"), str(REPOSITORY / "tests")]}
import pytest
from checking import check
from markdown import command
for text in {texts}:
    check(command("{PAGE}", text), pytest.MonkeyPatch(), lambda: None)
"""
    run_followed(script, cwd / "unused", (), installed, cwd=cwd)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_a_backend_of_another_package_serves_the_layers_that_ask_for_it(model, tmp_path):
    installed, script = install("Add a kernel backend", tmp_path / "package")
    (tmp_path / "model").symlink_to(model)
    names, folder = walk("A new backend"), tmp_path / "calls"
    check_commands("Add a kernel backend", installed, tmp_path)
    with_example = run_followed(script, folder, names, installed, cwd=tmp_path)
    assert calls(folder) == names

    decided = json.loads((tmp_path / "kernels.json").read_text())
    chosen = {layer: d["chosen"] for d in decided["decisions"] for layer in d["layers"]}
    down = {layer: backend for layer, backend in chosen.items() if "down_proj" in layer}
    assert down and set(down.values()) == {"example"}
    assert "example" not in {chosen[layer] for layer in chosen if layer not in down}

    usual = re.sub(r"kernel=\[.*?\], ", "", script)
    assert usual != script
    assert run_followed(usual, tmp_path / "usual", names, installed, cwd=tmp_path) == with_example
