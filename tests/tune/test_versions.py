"""What a measurement or a failure holds for: versions of libraries, and builds of our kernels."""

import json

import pytest
from selection_cases import ask, linear, timed

from vllm.kernels import registry
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.quarantine import Failure, add_failure, with_quarantine
from vllm.kernels.evidence.tables import Chip, Entry, Table
from vllm.kernels.evidence.versions import is_same, stale_lines, version_of, versions_here
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.question import parse_lib
from vllm.kernels.report.report import Report
from vllm.kernels.report.text_report import page
from vllm.kernels.select.policy import Policy
from vllm.kernels.selection import Selection
from vllm.machine import NATIVE, Device, Lib, Libs
from vllm.platforms import native
from vllm.platforms.libraries import native_lib

H100, CPU = Device.parse("sm_90"), Device.parse("cpu")
KERNELS = {
    "sm90_fp8_block_gemm": ["90a"],
    "sm100_fp8_block_gemm": ["100f"],
    "skinny_fp8_block_gemm": ["90", "compute_90"],
    "cpu_linear": ["avx2"],
}


def native_with(**builds: str) -> Lib:
    archs = tuple(f"{name}/{arch}" for name, own in KERNELS.items() for arch in own)
    return Lib(NATIVE, "0.1.0", archs, builds=tuple(f"{k}:{v}" for k, v in builds.items()))


EVERY = native_with(**{name: f"{i}" * 8 for i, name in enumerate(KERNELS)})


def libs(lib: Lib = EVERY) -> Libs:
    return Libs.of([lib, Lib("deep_gemm", "0.1.3"), registry.built()])


def spec(backend: str):
    return next(
        s for s in registry.specs("linear") if s.backend == backend and "fp8-block" in s.formats
    )


@pytest.mark.parametrize(
    ("backend", "device", "version"),
    [
        ("cutlass", "sm_90", "native 0.1.0 (00000000)"),
        ("cutlass", "sm_100", "native 0.1.0 (11111111)"),
        ("skinny", "sm_90", "native 0.1.0 (22222222)"),
        ("cpu", "cpu", "native 0.1.0 (33333333)"),
        ("deep_gemm", "sm_90", "deep_gemm 0.1.3"),
    ],
)
def test_a_kernel_of_ours_is_known_by_the_build_of_what_runs_on_the_chip(backend, device, version):
    assert version_of(spec(backend), libs(), Device.parse(device)) == version


def test_a_library_without_build_ids_has_its_version_alone():
    assert version_of(spec("cutlass"), libs(native_with()), H100) == "native 0.1.0"


def test_build_ids_are_read_from_the_manifest_and_survive_as_text(tmp_path, monkeypatch):
    builds = dict.fromkeys(KERNELS, "abcdef01")
    content = {"version": "0.1.0", "compiler": "", "kernels": KERNELS, "builds": builds}
    (tmp_path / native.MANIFEST_NAME).write_text(json.dumps(content))
    (tmp_path / native.LIBRARY_NAME).touch()
    monkeypatch.setattr(native, "LIBRARY_DIR", tmp_path)
    native.manifest.cache_clear()
    try:
        found = native_lib()
    finally:
        native.manifest.cache_clear()
    assert found.builds == tuple(f"{name}:abcdef01" for name in KERNELS)
    assert parse_lib(str(found)) == found


@pytest.mark.parametrize(
    ("measured", "here", "same"),
    [
        ("native 0.1.0 (a)", "native 0.1.0 (a)", True),
        ("native 0.1.0 (a)", "native 0.1.0 (b)", False),
        ("native 0.1.0", "native 0.1.0 (b)", False),  # nobody knows of which build
        ("native 0.1.0 (a)", "native 0.1.0", True),
        ("native 0.1.0 (a)", "native", True),
        ("deep_gemm 0.1.3", "deep_gemm 0.1.30", False),
        ("deep_gemm 0.1.3, triton 3.6.0", "triton, deep_gemm 0.1.3", True),
        ("deep_gemm 0.1.3, triton 3.6.0", "deep_gemm 0.1.3, triton 3.7.0", False),
        ("GEMM alone", "deep_gemm 0.1.3", False),
    ],
)
def test_what_is_not_known_here_may_be_what_was_measured(measured, here, same):
    assert is_same(measured, here) == same


def test_libraries_that_are_absent_or_broken_have_no_version_here():
    broken = Libs.of([Lib(NATIVE, broken="no"), Lib("deep_gemm", "0.1.3")])
    assert set(versions_here("linear", "fp8-block", H100, broken)) == {
        "deep_gemm", "torch", "emulation", "emulation-ue8m0"
    }  # fmt: skip


def selection(version: str) -> Selection:
    """Of a machine with EVERY, by a table that measured cutlass as `version`."""
    times = timed(cutlass=(1, 8192), deep_gemm=(1, 0))
    entries = {
        name: Entry(v, "2026-11-22", tuple(zip(times.tokens, us)))
        for (name, us), v in zip(times.us, (version, "deep_gemm 0.1.3"))
    }
    table = Table(Chip(H100, 132), "an H100", {linear().size_key: entries}, "t.json")
    made = Selection(H100, libs(), Policy(), Known((table,)))
    made.decide("layer", linear())
    return made


def test_what_was_measured_of_another_build_is_told_in_the_choice_the_page_and_the_log(caplog):
    made = selection("native 0.1.0 (99999999)")
    decision = made.records[0][1]
    assert decision.chosen == "cutlass"
    assert decision.origin.text.endswith("; cutlass in another version)")
    (line,) = stale_lines(made.records)
    assert "native 0.1.0 (99999999)" in line and "native 0.1.0 (00000000)" in line
    values = Report(H100, made.libs, {}, made.records)
    assert " ".join(line.split()) in " ".join(page(values).split())
    assert report(*parse_report(report(*values))) == report(*values)
    made.log()
    (told,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert told.startswith("cutlass: measured in another version")


def test_what_was_measured_of_this_build_raises_no_doubt():
    made = selection("native 0.1.0 (00000000)")
    assert made.records[0][1].chosen == "cutlass" and not stale_lines(made.records)
    assert "version" not in made.records[0][1].origin.text


def test_a_kernel_that_failed_is_tried_again_once_it_is_built_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    version = version_of(spec("skinny"), libs(), H100)
    add_failure(
        Failure("skinny", version, str(H100), linear().size_key, "library", "hung", "2026-11-22")
    )
    few = linear(m_range=(1, 8))
    timings = timed(skinny=(1, 8), deep_gemm=(9, 8192))
    assert ask(few, "90", with_quarantine(libs(), H100), timings=timings).chosen == "deep_gemm"
    mended = libs(native_with(skinny_fp8_block_gemm="new"))
    assert ask(few, "90", with_quarantine(mended, H100), timings=timings).chosen == "skinny"
    other = libs(native_with(**dict(b.split(":") for b in EVERY.builds) | {"cpu_linear": "new"}))
    assert ask(few, "90", with_quarantine(other, H100), timings=timings).chosen == "deep_gemm"
