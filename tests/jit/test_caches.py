"""Where compiled kernels are kept, and bundles of them: only read, compared, copied whole."""

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import Compiler
from machines import write_package

from vllm.errors import ConfigError
from vllm.kernels.jit import caches
from vllm.kernels.jit.caches import fill, made_for, read_manifest, write_manifest
from vllm.kernels.jit.flashinfer import (
    build_module,
    check_large_module,
    copy_large_modules,
)
from vllm.kernels.report.question import parse_lib
from vllm.machine import Device, Libs
from vllm.platforms.libraries import prebuilt_modules
from vllm.utils.files import write_atomically

H100 = Device.parse("sm_90")
LIBS = Libs.of([parse_lib("deep_gemm=0.1.3"), parse_lib("triton=3.6.0"), parse_lib("native=0.1.0")])


@pytest.fixture
def bundle(tmp_path) -> Path:
    """With a kernel of each compiler, as they write them."""
    folder = tmp_path / "bundle"
    group = {"child_paths": {"k.cubin": "/elsewhere/triton/KEY/k.cubin"}}
    for name, content in {
        "triton/KEY/k.cubin": b"triton object",
        "triton/KEY/__grp__k.json": json.dumps(group).encode(),
        "nvcc/0123abcd": hashlib.sha256(b"object").digest() + b"object",
        "nvcc/0123abcd.lock": b"",
        "nvcc/nvcc-front-77": b"#!/bin/sh",
        "flashinfer/0.6.13/m/m.so": b"module",
        "deep_gemm/cache/kernel.cubin": b"of this machine",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert write_manifest(folder, made_for(H100, LIBS)) == 4
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_missing_is_copied_and_nothing_else(bundle, tmp_path):
    before, root = files_in(bundle), tmp_path / "root"
    (root / "nvcc").mkdir(parents=True)
    (root / "nvcc" / "0123abcd").write_bytes(b"what was here")
    assert fill(root, bundle, {}) == 3
    found = files_in(root)
    assert found["nvcc/0123abcd"] == b"what was here"
    assert found.keys() == {
        "nvcc/0123abcd", "triton/KEY/k.cubin", "triton/KEY/__grp__k.json",
        "flashinfer/0.6.13/m/m.so",
    }  # fmt: skip
    assert files_in(bundle) == before
    assert fill(root, bundle, {}) == 0


def test_tritons_files_may_have_a_place_of_their_own(bundle, tmp_path):
    place = tmp_path / "own"
    fill(tmp_path / "root", bundle, {"triton": place})
    assert files_in(place).keys() == {"KEY/k.cubin", "KEY/__grp__k.json"}
    assert not (tmp_path / "root" / "triton").exists()


@pytest.mark.parametrize("damage", [b"", b"triton objecx", None])
def test_a_file_that_is_not_what_was_written_is_not_used(bundle, tmp_path, caplog, damage):
    file = bundle / "triton/KEY/k.cubin"
    file.unlink() if damage is None else file.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "vllm"):
        assert fill(tmp_path / "root", bundle, {}) == 3
    assert "1 of 4 files are not what was written, such as triton/KEY/k.cubin" in caplog.text
    assert not (tmp_path / "root/triton/KEY/k.cubin").exists()


def test_a_bundle_that_cannot_be_copied_keeps_no_engine_from_starting(bundle, tmp_path, caplog):
    root = tmp_path / "root"
    root.mkdir()
    (root / "triton").write_text("in the way")
    with caplog.at_level(logging.WARNING, "vllm"):
        assert fill(root, bundle, {}) < 4
    assert "cannot be copied" in caplog.text and str(root / "triton") in caplog.text


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    def full(_descriptor: int, _mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "chmod", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "kernel", b"content")
    assert not list(tmp_path.iterdir())


def test_a_manifest_names_no_file_outside(bundle, tmp_path):
    manifest = json.loads((bundle / "manifest.json").read_text())
    (tmp_path / "secret").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    manifest["files"] = {"triton/../../secret": digest, "/etc/hostname": digest, "other/f": digest}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert fill(tmp_path / "root", bundle, {}) == 0 and not (tmp_path / "root").exists()


@pytest.mark.parametrize("text", [None, "{", '{"format": 99, "files": {}}', "[]", '{"files": {}}'])
def test_a_folder_that_is_no_bundle_is_an_error(tmp_path, text):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"VLLM_KERNEL_BUNDLE=.*vllm kernels precompile"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("device", "libs", "told"),
    [
        ("sm_90", "deep_gemm=0.1.3,triton=3.6.0,native=9", ""),
        ("sm_100", "deep_gemm=0.1.3,triton=3.6.0", "device cuda:sm_90 and not cuda:sm_100"),
        ("sm_90", "triton=3.7.0", "deep_gemm 0.1.3 and not None, triton 3.6.0 and not 3.7.0"),
    ],
)
def test_a_bundle_for_another_machine_is_told(bundle, monkeypatch, caplog, device, libs, told):
    monkeypatch.setenv("VLLM_KERNEL_BUNDLE", str(bundle))
    with caplog.at_level(logging.WARNING, "vllm"):
        caches.warn_of_another_machine(
            Device.parse(device), Libs.of(map(parse_lib, libs.split(",")))
        )
    assert bool(caplog.records) == bool(told) and told in caplog.text


# ---------------------------------------------------------------- of a process

_ASKS = """
import json, os
from vllm.kernels.jit.caches import cache_root, use_caches
memory = use_caches()
names = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TRTLLM_DG_CACHE_DIR")
print(json.dumps([str(cache_root()), memory.real, *map(os.environ.get, names)]))
"""


def caches_of_a_process(tmp_path, limit: str = ":", **variables) -> list[str]:
    """limit: a command of the shell that runs before."""
    compiler = Compiler(tmp_path / "cuda" / "bin")
    env = {**os.environ, "CUDA_HOME": str(tmp_path / "cuda"), "VLLM_CACHE_ROOT": str(tmp_path)}
    for name in (*caches.OWN_VARIABLES, "DG_JIT_NVCC_COMPILER", "VLLM_KERNEL_CACHE"):
        env.pop(name, None)
    done = subprocess.run(
        ["sh", "-c", f'{limit}; exec "$@"', "sh", sys.executable, "-c", _ASKS],
        env=env | variables, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    root, real, *places = json.loads(done.stdout.splitlines()[-1])
    assert real == str(compiler.path)
    return [root, *places]


def test_libraries_keep_kernels_in_one_folder(tmp_path):
    root, *places = caches_of_a_process(tmp_path)
    assert root == str(tmp_path / "compiled")
    names = ("triton", "deep_gemm", "flashinfer_workspace", "flashinfer_deep_gemm")
    assert places == [f"{root}/{name}" for name in names]


def test_a_place_that_was_named_is_kept_and_filled(bundle, tmp_path):
    own = str(tmp_path / "mine")
    root, triton, *_ = caches_of_a_process(
        tmp_path, TRITON_CACHE_DIR=own, VLLM_KERNEL_BUNDLE=str(bundle),
        VLLM_KERNEL_CACHE=str(tmp_path / "kept"),
    )  # fmt: skip
    assert triton == own and (Path(own) / "KEY/k.cubin").exists()
    assert root == str(tmp_path / "kept") and (Path(root) / "nvcc/0123abcd").exists()


def test_a_folder_that_cannot_be_written_is_replaced_for_the_process(tmp_path):
    (tmp_path / "file").write_text("")
    root, triton, *_ = caches_of_a_process(tmp_path, VLLM_KERNEL_CACHE=str(tmp_path / "file" / "x"))
    assert "vllm-compiled-" in root and triton == f"{root}/triton"


def test_a_disk_that_takes_no_kernel_is_one_that_cannot_be_written(tmp_path):
    root, *_ = caches_of_a_process(tmp_path, limit="ulimit -f 100")  # blocks of 512 bytes
    assert "vllm-compiled-" in root


# ---------------------------------------------------------------- FlashInfer

_JIT_ENV = """
from pathlib import Path
FLASHINFER_CACHE_DIR = Path({folder!r}) / "workspace"
FLASHINFER_JIT_DIR = FLASHINFER_CACHE_DIR / "0.6.13" / "90a" / "cached_ops"
FLASHINFER_AOT_DIR = Path({folder!r}) / "package" / "aot"
"""
_JIT_CORE = """
from flashinfer.jit import env

class JitSpec:
    def __init__(self, name):
        self.name = name
        self.jit_library_path = env.FLASHINFER_JIT_DIR / name / f"{name}.so"

    @property
    def aot_path(self):
        return env.FLASHINFER_AOT_DIR / self.name / f"{self.name}.so"

    def build(self, verbose, need_lock=True):
        if not self.jit_library_path.exists():
            self.jit_library_path.parent.mkdir(parents=True)
            self.jit_library_path.write_bytes(b"module")

    def build_and_load(self):
        if self.aot_path.exists():
            return self.aot_path
        self.build(False, need_lock=False)
        return self.jit_library_path
"""
_JIT_CPP = """
import os
import types

def get_cuda_version():
    return types.SimpleNamespace(major=int(os.environ["CUDA_MAJOR"]), minor=0)
"""
_BUILDS = """
from vllm.kernels.jit.flashinfer import watch_flashinfer
from vllm.kernels.jit.monitor import MONITOR
watch_flashinfer()
watch_flashinfer()
from flashinfer.jit.core import JitSpec
MONITOR.serve()
import os
assert os.environ["FLASHINFER_NO_DOWNLOAD"] == "1"  # a start fetches nothing
path = JitSpec("decode").build_and_load()
print(len(MONITOR.take()), path)
"""


@pytest.fixture
def ask_flashinfer(tmp_path):
    """Asks it for a module in a process of its own: how many were built, and which file serves."""
    write_package(tmp_path / "site", "flashinfer")
    write_package(tmp_path / "site", "flashinfer/jit")
    jit = tmp_path / "site" / "flashinfer" / "jit"
    (jit / "env.py").write_text(_JIT_ENV.format(folder=str(tmp_path)))
    (jit / "core.py").write_text(_JIT_CORE)
    (jit / "cpp_ext.py").write_text(_JIT_CPP)
    paths = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[2])])
    env = {**os.environ, "PYTHONPATH": paths, "VLLM_KERNEL_CACHE": str(tmp_path / "kept")}

    def ask(cuda: int = 13) -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", _BUILDS], env={**env, "CUDA_MAJOR": str(cuda)},
                              capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
        count, path = done.stdout.split()
        return count, os.path.relpath(path, tmp_path)

    return ask


_BUILT = "workspace/0.6.13/90a/cached_ops/decode/decode.so"
_KEPT = "kept/flashinfer/0.6.13/90a/cached_ops/cuda13/decode/decode.so"


def test_a_module_that_flashinfer_built_needs_no_build_tool_again(ask_flashinfer):
    assert ask_flashinfer() == ("1", _BUILT)
    assert ask_flashinfer() == ("0", _KEPT)


def test_a_module_linked_with_another_cuda_is_not_loaded(ask_flashinfer):
    ask_flashinfer(cuda=12)
    assert ask_flashinfer(cuda=13) == ("0", _BUILT)  # where the library itself looks at it


def test_a_module_that_cannot_be_copied_serves_where_it_was_built(ask_flashinfer, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "flashinfer").write_text("in the way")
    assert ask_flashinfer() == ("1", _BUILT) and ask_flashinfer() == ("0", _BUILT)


# ---------------------------------------------------------------- several machines


@pytest.mark.parametrize("name", ["VLLM_KERNEL_BUNDLE", "VLLM_KERNEL_CACHE"])
def test_machines_with_other_places_for_kernels_may_share_a_model(tmp_path, monkeypatch, name):
    from tiny_models import build_model

    from vllm.engine.arg_utils import EngineArgs
    from vllm.executor.facts import facts_of, probed_facts

    build_model("qwen3").save_pretrained(tmp_path)
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    here = facts_of(config, probed_facts())
    monkeypatch.setenv(name, "/local/disk")
    assert facts_of(config, probed_facts()) == here
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert facts_of(config, probed_facts()) != here


def write_modules(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{name}.so").write_text(f"code of {name}")


def test_large_modules_are_found_where_the_library_looks_for_them(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KERNEL_CACHE", str(tmp_path / "kept"))
    package, kept = tmp_path / "flashinfer", "kept/flashinfer/0.6.13/90a/cached_ops/cuda13"
    write_modules(tmp_path / kept, "fused_moe_90", "decode")
    (tmp_path / kept / "fused_moe_100").mkdir()
    (tmp_path / kept / "fused_moe_100" / "fused_moe_100.so").touch()  # a disk was full
    assert prebuilt_modules(package, "0.6.13") == ("fused_moe_90",)
    assert prebuilt_modules(package, "0.6.14") == ()
    write_modules(package / "data" / "aot", "fused_moe_120")
    assert prebuilt_modules(package, "0.6.13") == ("fused_moe_120",)
    write_package(tmp_path / "site", "flashinfer_jit_cache")
    write_modules(tmp_path / "site" / "flashinfer_jit_cache" / "aot", "fused_moe_103")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert prebuilt_modules(package, "0.6.13") == ("fused_moe_103",)


def test_a_bundle_is_made_with_the_large_modules_that_are_here(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KERNEL_CACHE", str(tmp_path / "kept"))
    below = "flashinfer/0.6.13/90a/cached_ops/cuda13"
    write_modules(tmp_path / "kept" / below, "fused_moe_90", "decode")
    copy_large_modules(tmp_path / "staging")
    copied = [path for path in (tmp_path / "staging").rglob("*") if path.is_file()]
    assert copied == [tmp_path / "staging" / below / "fused_moe_90" / "fused_moe_90.so"]
    assert copied[0].read_text() == "code of fused_moe_90"


def test_a_large_module_for_other_chips_is_refused_before_a_call_builds_it(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    pytest.importorskip("flashinfer", reason="asks the library where it looks")
    with pytest.raises(ConfigError, match=r"fused_moe_90 is here, but not as .*: python -m vllm"):
        check_large_module("fused_moe_90")


def test_a_module_that_is_none_of_the_large_ones_is_not_built():
    with pytest.raises(ConfigError, match="'decode': it takes fused_moe_90"):
        build_module("decode")


def test_locks_and_halves_are_not_bundled(tmp_path):
    for name in ("flashinfer/0.6/m/lock", "nvcc/a.lock", "nvcc/b.partial", "nvcc/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert write_manifest(tmp_path, {}) == 1
