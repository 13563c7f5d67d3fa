"""The library of a wheel instead of a compilation: which wheels are taken, and what is said of the
others."""

import http.server
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = b"a library"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prebuilt, build_ids = (
    loaded(ROOT / "tools" / "prebuilt.py"),
    loaded(ROOT / "cmake" / "build_ids.py"),
)


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A source tree, small enough to be changed."""
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.delenv(prebuilt.VARIABLE, raising=False)
    root = tmp_path / "a tree"
    (root / "csrc" / "cpu").mkdir(parents=True)
    (root / "csrc" / "cpu" / "k.cpp").write_text("int k;\n")
    (root / "CMakeLists.txt").write_text("project(k)\n")
    shutil.copytree(ROOT / "cmake", root / "cmake", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def manifest(root: Path, **changes: object) -> str:
    found = {"processor": platform.machine(), "sources": build_ids.sources_id(root), **changes}
    return json.dumps(found)


def wheel_of(root: Path, text: str | None = None, name: str = "vllm-1.whl") -> Path:
    path = root / "dist" / "cpu" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("vllm/lib/libvllm_kernels.so", LIBRARY)
        packed.writestr("vllm/lib/arch_manifest.json", manifest(root) if text is None else text)
    return path


def taken(root: Path, tmp_path: Path) -> tuple[str | None, list[str]]:
    told: list[str] = []
    folder = tmp_path / "taken"
    folder.mkdir(exist_ok=True)
    return prebuilt.take(root, folder, told.append), told


def test_the_newest_wheel_of_these_sources_is_taken(tree, tmp_path):
    os.utime(wheel_of(tree, "{}", "vllm-2.whl"), (1, 1))
    wheel_of(tree)
    assert taken(tree, tmp_path) == ("vllm-1.whl", [])
    assert (tmp_path / "taken" / "libvllm_kernels.so").read_bytes() == LIBRARY


def test_without_a_wheel_or_with_options_for_cmake_nothing_is_said(tree, tmp_path, monkeypatch):
    assert taken(tree, tmp_path) == (None, [])
    wheel_of(tree)
    monkeypatch.setenv("CMAKE_ARGS", "-DVLLM_STRICT_ARCHS=ON")
    assert taken(tree, tmp_path) == (None, [])


@pytest.mark.parametrize("name", ["csrc/cpu/k.cpp", "CMakeLists.txt", "cmake/kernels.cmake"])
def test_a_wheel_of_other_sources_is_not_taken(name, tree, tmp_path):
    wheel_of(tree)
    with (tree / name).open("a") as file:
        file.write("\n")
    name, told = taken(tree, tmp_path)
    assert name is None
    assert told == ["Wheel vllm-1.whl: it was built from other sources; the kernels are compiled "
                    "instead"]  # fmt: skip


def test_a_file_that_is_new_or_renamed_counts_and_what_python_writes_does_not(tree):
    before = build_ids.sources_id(tree)
    (tree / "cmake" / "__pycache__").mkdir()
    (tree / "cmake" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert build_ids.sources_id(tree) == before
    (tree / "csrc" / "cpu" / "k.cpp").rename(tree / "csrc" / "cpu" / "l.cpp")
    assert build_ids.sources_id(tree) != before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is damaged (its manifest cannot be read)"),
        ("[]", "it is damaged (its manifest cannot be read)"),
        ("{}", "it is damaged (its manifest cannot be read)"),
        (json.dumps({"processor": platform.machine()}), "it was built from other sources"),
        (json.dumps({"processor": "z80"}), f"it is for z80, and this is {platform.machine()}"),
    ],
)
def test_a_manifest_that_does_not_fit_is_told(text, why, tree, tmp_path):
    wheel_of(tree, text)
    name, (line,) = taken(tree, tmp_path)
    assert name is None and line.startswith(f"Wheel vllm-1.whl: {why}; ")


def test_a_damaged_or_foreign_wheel_is_told_in_a_line(tree, tmp_path, monkeypatch):
    whole = wheel_of(tree).read_bytes()
    path = tmp_path / "given.whl"
    monkeypatch.setenv(prebuilt.VARIABLE, str(path))
    cases = {
        "it cannot be read (No such file or directory)": None,
        "it is damaged (": whole[:100],
        "it is damaged (Bad CRC-32": whole.replace(LIBRARY, b"a l1brary", 1),
    }
    for text, content in cases.items():
        if content is not None:
            path.write_bytes(content)
        name, (line,) = taken(tree, tmp_path)
        assert name is None and line.startswith(f"Wheel given.whl: {text}"), line
        assert "\n" not in line
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("other/__init__.py", "")
    assert "another package's" in taken(tree, tmp_path)[1][0]


def test_a_wheel_is_downloaded_from_a_url(tree, tmp_path, monkeypatch):
    wheel_of(tree)
    (tree / "dist" / "cpu").rename(tmp_path / "served")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *words, **options):
            super().__init__(*words, directory=str(tmp_path / "served"), **options)

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv(prebuilt.VARIABLE, f"{url}/vllm-1.whl")
        assert taken(tree, tmp_path) == ("vllm-1.whl", [])
        monkeypatch.setenv(prebuilt.VARIABLE, f"{url}/none.whl")
        assert "it cannot be downloaded (HTTP Error 404" in taken(tree, tmp_path)[1][0]
        server.shutdown()
    assert "it cannot be downloaded (" in taken(tree, tmp_path)[1][0]


def test_the_build_takes_a_library_that_is_there(tmp_path):
    """setup.py itself, in a folder without sources: there is nothing that it could compile."""
    given, root = tmp_path / "given", tmp_path / "root"
    given.mkdir()
    (root / "vllm").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, root)
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "vllm" / name, root / "vllm")
    for name in prebuilt.FILES:
        (given / name).write_text(name)
    env = {**os.environ, "VLLM_PREBUILT_LIBRARY": str(given), "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (root / "vllm" / "lib").iterdir()} == set(prebuilt.FILES)
