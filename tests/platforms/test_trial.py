"""A library that faults or hangs when it is tried is broken, with that reason; nothing else is."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from machines import Cpu, machine, write_distribution, write_package
from selection_cases import LIBS, ask, linear

from vllm.machine import Lib, Libs
from vllm.platforms import libraries
from vllm.platforms.libraries import (
    library_state,
    passed_trials,
    remember_trial,
    working_libs,
)

FAULTS = "import ctypes; ctypes.string_at(0)"
ABORTS = "import os; print('noise'); os.write(2, b'what():  no driver\\n'); os.abort()"
HANGS = "import time; time.sleep(1000)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    with machine(Cpu(), tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (FAULTS, "its trial was killed by SIGSEGV"),
        (ABORTS, "its trial was killed by SIGABRT: what(): no driver"),
        ("raise SystemExit(3)", "its trial ended with exit code 3"),
        ("import os; os._exit(0)", "its trial ended with exit code 0"),
    ],
)
def test_a_library_that_ends_its_process_is_broken_and_ours_goes_on(folder, code, reason):
    write_package(folder, "lib_ends", code)
    assert " ".join(library_state("lib_ends", ()).broken.split()) == reason


def test_a_library_that_hangs_is_broken_after_the_time_limit(folder, monkeypatch):
    monkeypatch.setattr(libraries, "TRIAL_SECONDS", 2.0)
    write_package(folder, "lib_hangs", HANGS)
    start = time.monotonic()
    assert library_state("lib_hangs", ()).broken == "its trial did not end within 2 s"
    assert time.monotonic() - start < 10


def test_what_a_library_starts_and_leaves_behind_does_not_hold_the_trial_up(folder):
    code = "import subprocess; subprocess.Popen(['sleep', '1000']); print('noise')"
    write_package(folder, "lib_starts", code)
    start = time.monotonic()
    assert not library_state("lib_starts", ()).broken
    assert time.monotonic() - start < 20


def test_what_python_prints_at_its_start_is_no_answer(folder, monkeypatch):
    (folder / "start").mkdir()
    (folder / "start" / "sitecustomize.py").write_text("print('noise')")
    monkeypatch.setenv("PYTHONPATH", str(folder / "start"))
    write_package(folder, "lib_works", "__version__ = '1.2'")
    write_package(folder, "lib_faults", FAULTS)
    assert library_state("lib_works", ()).version == "1.2"
    assert "SIGSEGV" in library_state("lib_faults", ()).broken


@pytest.mark.parametrize(("code", "reason"), [(FAULTS, "SIGSEGV"), (HANGS, "did not end")])
def test_the_selector_goes_to_the_next_kernel_and_tells_what_happened(
    folder, monkeypatch, code, reason
):
    monkeypatch.setattr(libraries, "TRIAL_SECONDS", 2.0)
    write_package(folder, "deep_gemm", code)
    write_distribution(folder, "sgl-deep-gemm", "0.1.3")
    found = working_libs({"deep_gemm"}).get("deep_gemm")
    others = [lib for lib in LIBS["all"].libs if lib.name != "deep_gemm"]
    decision = ask(linear(), "90", Libs.of([*others, found]))
    assert decision.chosen == "cutlass"
    told = next(c.reasons for c in decision.candidates if c.backend == "deep_gemm")
    assert [r.why for r in told] == ["library"]
    assert reason in told[0].text and "version 0.1.3" in told[0].text


def test_a_trial_that_passed_is_not_repeated_until_the_library_changes(folder):
    counter = folder / "imports"
    code = f"open({str(counter)!r}, 'a').write('x')"
    write_package(folder, "lib_counts", code)
    write_distribution(folder, "lib-counts", "1.0")
    for _ in range(2):
        assert library_state("lib_counts", ("lib-counts",)).version == "1.0"
        library_state.cache_clear()
    assert counter.read_text() == "x"
    (folder / "lib_counts" / "__init__.py").write_text(code + "; x = 1")
    library_state("lib_counts", ("lib-counts",))
    assert counter.read_text() == "xx"


def test_a_library_that_is_one_file_is_tried_once_until_it_changes(folder):
    counter, module = folder / "imports", folder / "lib_one_file.py"
    code = f"open({str(counter)!r}, 'a').write('x')"
    write_distribution(folder, "lib-one-file", "1.0")
    for written, runs in ((code, "x"), (code + "; x = 1", "xx")):
        module.write_text(written)
        for _ in range(2):
            assert library_state("lib_one_file", ("lib-one-file",)) == Lib("lib_one_file", "1.0")
            library_state.cache_clear()
        assert counter.read_text() == runs


def test_a_trial_is_repeated_after_the_compiler_that_libraries_use_has_changed(folder, monkeypatch):
    counter, nvcc = folder / "imports", folder / "nvcc"
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    write_package(folder, "lib_compiles", f"open({str(counter)!r}, 'a').write('x')")
    write_distribution(folder, "lib-compiles", "1.0")
    for age, runs in ((1, "x"), (1, "x"), (2, "xx")):
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
        os.utime(nvcc, (age, age))
        library_state("lib_compiles", ("lib-compiles",))
        library_state.cache_clear()
        assert counter.read_text() == runs


def test_a_trial_that_failed_is_repeated_at_the_next_start(folder):
    write_package(folder, "lib_mended", "raise OSError('no driver')")
    write_distribution(folder, "lib-mended", "1.0")
    assert library_state("lib_mended", ("lib-mended",)).broken
    library_state.cache_clear()
    (folder / "lib_mended" / "__init__.py").write_text("")
    assert not library_state("lib_mended", ("lib-mended",)).broken


def test_trials_that_pass_side_by_side_are_all_remembered(folder):
    keys = [f"library {number}" for number in range(32)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(remember_trial, keys))
    assert set(passed_trials()) == set(keys)


def test_a_memory_that_cannot_be_written_is_no_error(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "file"))
    write_package(folder, "lib_fine")
    write_distribution(folder, "lib-fine", "1.0")
    assert library_state("lib_fine", ("lib-fine",)).version == "1.0"
