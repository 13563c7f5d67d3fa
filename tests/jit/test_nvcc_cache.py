"""What nvcc made is made once, found again, and known without being made."""

import fcntl
import json
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest
from compilers import Compiler, Library

from vllm.kernels.jit import nvcc
from vllm.kernels.jit.compiled_call import CompiledCall
from vllm.kernels.jit.nvcc_cache import make_nvcc_cache
from vllm.platforms.libraries import find_nvcc

ARGUMENTS = ["kernel.cu", "-cubin", "-o", "kernel.cubin", "-std=c++20", "-I/a/include", "-O3"]


@pytest.fixture
def compiler(tmp_path) -> Compiler:
    return Compiler(tmp_path / "cuda")


@pytest.fixture
def cache(compiler, tmp_path, monkeypatch):
    return compiler.nvcc_cache(tmp_path / "store", monkeypatch)


def library(tmp_path: Path, name: str = "", **options) -> Library:
    folder = tmp_path / f"library-{name}{len(os.listdir(tmp_path))}"
    folder.mkdir()
    return Library(folder, name=name or "gemm", **options)


def test_a_kernel_that_was_compiled_is_not_compiled_again(compiler, cache, tmp_path):
    first, second = library(tmp_path), library(tmp_path)
    first.run(8)
    second.run(8)
    assert first.loaded == second.loaded and b"object of" in first.loaded[16]
    assert compiler.num_runs == 1


def test_a_plan_tells_kernels_apart_without_compiling_any(compiler, cache, tmp_path, capfd):
    planned = cache.plan(library(tmp_path).call(), "1.0 on chip")
    assert planned[64] == planned[128] == planned[192] != planned[32] != planned[16]
    assert compiler.num_runs == 0 and not any(cache.has(key) for key in planned.values())
    assert "NVCC_PLAN" not in os.environ
    print("seen again")
    assert capfd.readouterr().out == "seen again\n"


def test_what_was_planned_and_compiled_is_what_the_library_then_gets(compiler, cache, tmp_path):
    planned = cache.plan(library(tmp_path).call(), "1.0 on chip")
    for key in set(planned.values()):
        assert cache.compile(key) > 0 and cache.has(key)
        assert cache.compile(key) == 0
    assert compiler.num_runs == 3
    later = library(tmp_path)
    for size in planned:
        later.run(size)
    assert compiler.num_runs == 3 and later.loaded[64].endswith(b"(&gemm_impl<64, 128>);\n")
    assert cache.name(planned[64]) == "gemm_impl<64, 128>"


def test_a_plan_is_remembered_for_the_same_library_and_compiler(
    compiler, cache, tmp_path, monkeypatch
):
    planned = cache.plan(library(tmp_path).call(), "1.0 on chip")
    again = library(tmp_path)
    assert cache.plan(again.call(), "1.0 on chip") == planned and again.num_calls == 0
    assert cache.plan(again.call(), "1.1 on chip") == planned and again.num_calls == 5
    newer = Compiler(tmp_path / "newer", version="V13.1").nvcc_cache(
        tmp_path / "store", monkeypatch
    )
    other = newer.plan(again.call(), "1.0 on chip")
    assert other.keys() == planned.keys() and not set(other.values()) & set(planned.values())


def test_a_kernel_that_is_loaded_needs_none_and_is_not_remembered(cache, tmp_path):
    own = library(tmp_path)
    own.run(16)
    planned = cache.plan(own.call(), "1.0")
    assert planned[16] == "" and planned[32]
    fresh = library(tmp_path)
    assert all(cache.plan(fresh.call(), "1.0").values()) and fresh.num_calls


def test_a_call_that_fails_for_another_reason_says_so(cache, tmp_path):
    def run(size: int) -> None:
        raise MemoryError("no room")

    call = library(tmp_path).call()
    with pytest.raises(MemoryError, match="no room"):
        cache.plan(type(call)(call.name, call.sizes, run), "1.0")


def test_a_compiler_that_fails_is_quoted(cache, tmp_path):
    (key,) = set(cache.plan(library(tmp_path, broken=(16,)).call((16,)), "1.0").values())
    with pytest.raises(nvcc.CompileError, match="error: it is broken"):
        cache.compile(key)
    assert not cache.has(key)


def test_a_damaged_entry_is_made_again(compiler, cache, tmp_path):
    planned = cache.plan(library(tmp_path).call((16,)), "1.0")
    cache.compile(planned[16])
    entry = cache.folder / planned[16]
    entry.write_bytes(entry.read_bytes()[:-2] + b"xx")
    assert not cache.has(planned[16])
    own = library(tmp_path)
    own.run(16)
    assert compiler.num_runs == 2 and not own.loaded[16].endswith(b"xx") and cache.has(planned[16])


def test_processes_that_want_one_kernel_at_once_compile_it_once(tmp_path, monkeypatch):
    compiler = Compiler(tmp_path / "cuda", seconds=0.3)
    cache = compiler.nvcc_cache(tmp_path / "store", monkeypatch)
    planned = cache.plan(library(tmp_path).call((16,)), "1.0")
    with multiprocessing.get_context("fork").Pool(3) as pool:
        seconds = pool.map(cache.compile, [planned[16]] * 3)
    assert compiler.num_runs == 1 and sum(s > 0 for s in seconds) == 1


def test_what_had_to_be_compiled_at_a_call_is_written_down(cache, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("NVCC_LOG", str(log))
    own = library(tmp_path)
    own.run(64)
    library(tmp_path).run(64)
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["kernel"] == "gemm_impl<64, 128>"


def test_a_log_that_was_tidied_up_keeps_no_kernel_from_being_compiled(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC_LOG", str(tmp_path / "gone" / "log"))
    own = library(tmp_path)
    own.run(16)
    assert 16 in own.loaded


def test_a_file_system_without_locks_is_enough(compiler, cache, tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    planned = cache.plan(library(tmp_path).call((16,)), "1.0")
    monkeypatch.setattr(fcntl, "flock", flock)
    assert cache.compile(planned[16]) > 0 and cache.has(planned[16])


def test_a_store_that_cannot_be_written_keeps_no_library_from_compiling(compiler, cache, tmp_path):
    planned = cache.plan(library(tmp_path).call((16,)), "1.0")
    (cache.folder / f"{planned[16]}.lock").mkdir()  # in the way
    own = library(tmp_path)
    own.run(16)
    assert b"object of" in own.loaded[16] and compiler.num_runs == 1


def test_a_front_that_was_cut_off_is_written_again(compiler, cache, tmp_path, monkeypatch):
    Path(os.environ["DG_JIT_NVCC_COMPILER"]).write_text("")
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(compiler.path))
    assert make_nvcc_cache(tmp_path / "store") == cache
    library(tmp_path).run(16)
    assert compiler.num_runs == 1


def test_a_plan_of_which_a_part_was_cut_off_is_made_again(cache, tmp_path):
    (key,) = set(cache.plan(library(tmp_path).call((16,)), "1.0").values())
    recipe = cache.folder / "recipes" / f"{key}.json"
    recipe.write_text("")
    with pytest.raises(ValueError, match="Expecting value"):
        cache.compile(key)
    assert cache.plan(library(tmp_path).call((16,)), "1.0") == {16: key}
    assert cache.compile(key) > 0


def test_a_folder_of_any_name_will_do(tmp_path, monkeypatch):
    folder = tmp_path / "o'brien"
    cache = Compiler(tmp_path / "cuda").nvcc_cache(folder, monkeypatch)
    front = os.environ["DG_JIT_NVCC_COMPILER"]
    done = subprocess.run([front, "--version"], capture_output=True, text=True)
    assert done.stdout == "release 13.0 V13.0.1\n" and cache.folder == folder


def test_a_process_that_is_started_uses_the_same_compiler(compiler, cache, tmp_path):
    inherited = make_nvcc_cache(tmp_path / "store")  # the variable names the front by now
    assert inherited == cache and inherited.real == str(compiler.path)


def test_other_uses_of_nvcc_go_to_nvcc(compiler, cache):
    front = os.environ["DG_JIT_NVCC_COMPILER"]
    assert os.popen(f"{front} --version").read() == "release 13.0 V13.0.1\n"


def test_without_nvcc_there_is_nothing_to_remember(tmp_path, monkeypatch):
    for name in ("DG_JIT_NVCC_COMPILER", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # of /usr/local/cuda
    assert make_nvcc_cache(tmp_path / "store") is None


# ---------------------------------------------------------------- what a kernel is kept by


def key_of(arguments=ARGUMENTS, source=b"kernel", compiler="13.0") -> str:
    return nvcc.parse(arguments, source, compiler).key


@pytest.mark.parametrize(
    "other",
    [
        {"source": b"another"},
        {"compiler": "13.1"},
        {"arguments": [*ARGUMENTS, "--gpu-architecture=sm_100a"]},
    ],
)
def test_another_source_compiler_or_option_is_another_kernel(other):
    assert key_of(**other) != key_of()


def test_where_a_kernel_is_compiled_does_not_matter():
    moved = ["/t/kernel.cu", "-cubin", "-o", "/t/x.cubin", "-std=c++20", "-I/b/include", "-O3"]
    assert key_of(arguments=moved) == key_of()


def test_a_plan_is_of_its_call_and_its_sizes(cache, tmp_path):
    own, other = library(tmp_path), library(tmp_path, "other")
    few = cache.plan(own.call((16,)), "1.0")
    more = cache.plan(own.call((16, 64)), "1.0")
    assert more.keys() == {16, 64} and more[16] == few[16] != more[64]
    assert not set(cache.plan(other.call((16, 64)), "1.0").values()) & set(more.values())


def test_a_call_that_fails_after_others_were_planned_says_so(cache, tmp_path):
    own = library(tmp_path)

    def run(size: int) -> None:
        if size > 16:
            raise MemoryError("no room")
        own.run(size)

    with pytest.raises(MemoryError, match="no room"):
        cache.plan(CompiledCall("gemm", (16, 32), run), "1.0")


def test_cuda_home_comes_before_cuda_path(tmp_path, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        Compiler(tmp_path / name / "bin")
        monkeypatch.setenv(name, str(tmp_path / name))
    assert find_nvcc() == str(tmp_path / "CUDA_HOME" / "bin" / "nvcc")
