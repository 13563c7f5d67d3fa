"""What lies damaged in Triton's cache is compiled again."""

import json
import os
import shutil
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.cache import FileCacheManager  # noqa: E402

import vllm.kernels.triton  # noqa: E402, F401
from vllm.kernels.triton.cache import DIGEST, VerifiedCache  # noqa: E402


@triton.jit
def twice_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiled() -> tuple[bytes, bool]:
    """The machine code, and whether it was compiled just now."""
    made = []

    def listener(*, cache_hit: bool, **more: object) -> None:
        made.append(not cache_hit)

    source = ASTSource(twice_kernel, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 64})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "listener", listener)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return kernel.asm["cubin"], made[0]


def of_kind(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def test_our_kernels_use_it():
    assert triton.knobs.cache.manager_class is VerifiedCache


def test_a_whole_entry_is_taken_wherever_it_was_moved(folder, monkeypatch):
    first, was_compiled = compiled()
    assert was_compiled and compiled() == (first, False)
    moved = folder.parent / "moved"
    shutil.move(folder, moved)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    assert compiled() == (first, False)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"child_paths": 3}', None])
def test_a_damaged_list_of_files_is_made_again(folder, damage):
    first, _ = compiled()
    group = of_kind(folder, "__grp__*")
    group.unlink() if damage is None else group.write_bytes(damage)
    assert compiled() == (first, True) and compiled() == (first, False)
    assert len(json.loads(group.read_bytes())["child_paths"]) > 3


@pytest.mark.parametrize("kind", ["*.cubin", "*kernel.json", f"*.cubin{DIGEST}"])
@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "gone"])
def test_a_damaged_file_is_made_again(folder, kind, damage):
    first, _ = compiled()
    file = next(path for path in folder.rglob(kind) if not path.name.startswith("__grp__"))
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        cut = {"empty": b"", "cut": content[:-1], "changed": content[:-1] + b"#"}
        file.write_bytes(cut[damage])
    assert compiled() == (first, True) and compiled() == (first, False)


def test_what_triton_wrote_without_us_is_compiled_once_more(folder, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "manager_class", FileCacheManager)
    first, _ = compiled()
    monkeypatch.setattr(triton.knobs.cache, "manager_class", VerifiedCache)
    assert compiled() == (first, True) and compiled() == (first, False)


def test_one_file_by_itself_is_verified_too(folder):
    cache = VerifiedCache("KEY")
    path = cache.put(b"a launcher", "launcher.so")
    assert cache.get_file("launcher.so") == path and cache.put("text", "t") != path
    Path(path).write_bytes(b"a launche")
    assert cache.get_file("launcher.so") is None and cache.get_file("t") is not None


def test_what_has_no_hash_is_taken_from_a_folder_that_takes_none(folder, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "manager_class", FileCacheManager)
    first, _ = compiled()
    monkeypatch.setattr(triton.knobs.cache, "manager_class", VerifiedCache)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert compiled() == (first, False)
    of_kind(folder, "*.cubin").write_bytes(b"")
    assert compiled()[1]  # which fails where it cannot be written


def test_files_that_are_to_override_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_OVERRIDE_DIR", str(tmp_path))
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "kernel.ptx").write_text("by hand")
    own = VerifiedCache("KEY", override=True)
    assert own.get_file("kernel.ptx") == str(tmp_path / "KEY" / "kernel.ptx")
    assert own.get_file("kernel.cubin") is None
