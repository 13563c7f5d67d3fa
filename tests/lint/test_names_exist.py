"""What benchmarks and GPU tests import of ours exists, also inside functions."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for pattern in ("benchmarks/**/*.py", "tests/**/gpu/*.py", "tests/**/*_on_gpus.py")
    for file in sorted(ROOT.glob(pattern))
]


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.util.find_spec(f"{module}.{name}")
        )
    except ModuleNotFoundError as error:
        return not str(error.name).startswith("vllm")  # a library that is not here


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_what_is_imported_of_vllm_exists(file: Path):
    imports = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    ]
    assert [f"{module}.{name}" for module, name in imports if not exists(module, name)] == []
