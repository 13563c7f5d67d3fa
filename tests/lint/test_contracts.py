"""The contracts of pyproject.toml refuse an import against the table, wherever it stands."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
BROKEN = {
    "upwards": ({"formats": "import vllm.engine\n"}, "vllm.formats -> vllm.engine"),
    "upwards in a function": (
        {"formats": "def read():\n    from vllm.config import x\n"},
        "vllm.formats -> vllm.config",
    ),
    "upwards through a third": (
        {"errors": "import vllm.other\n", "other": "import vllm.worker\n"},
        "vllm.errors -> vllm.other",
    ),
    "in a circle": (
        {"core/a": "import vllm.core.b\n", "core/b": "def f():\n    import vllm.core.a\n"},
        "No cycles are allowed in vllm.core",
    ),
}


def lint(folder: Path, modules: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Lints a package in `folder` that has all layers and besides them these modules."""
    shutil.copy(PYPROJECT, folder)
    (layers, _) = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
    names = [name.strip() for layer in layers["layers"] for name in layer.split(":")]
    for name in [*names, *modules]:
        module = folder / "vllm" / name.replace(".", "/")
        if "/" not in name:
            module = module / "__init__"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.with_suffix(".py").write_text(modules.get(name, ""))
    for parent in (folder / "vllm").rglob("*"):
        if parent.is_dir():
            (parent / "__init__.py").touch()
    (folder / "vllm" / "__init__.py").touch()
    return subprocess.run([LINT_IMPORTS], cwd=folder, capture_output=True, text=True)


def test_imports_that_follow_the_table_pass(tmp_path: Path):
    done = lint(tmp_path, {"engine": "import vllm.config\ndef f():\n    import vllm.formats\n"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 2 kept, 0 broken" in done.stdout


@pytest.mark.parametrize("kind", BROKEN)
def test_an_import_against_the_table_fails(tmp_path: Path, kind: str):
    modules, told = BROKEN[kind]
    done = lint(tmp_path, modules)
    assert done.returncode == 1, done.stdout + done.stderr
    assert told in done.stdout and "Contracts: 1 kept, 1 broken" in done.stdout
