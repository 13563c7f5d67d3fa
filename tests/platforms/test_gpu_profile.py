"""Profiles of benchmarks/serving: what counts as a kernel's own time."""

import runpy
from pathlib import Path

SERVING = Path(__file__).resolve().parents[2] / "benchmarks" / "serving"
gpu_profile = runpy.run_path(str(SERVING / "gpu_profile.py"))
Span, own_nanoseconds = gpu_profile["Span"], gpu_profile["own_nanoseconds"]


def own(*spans) -> list[tuple[str, int]]:
    return list(own_nanoseconds(Span(*span) for span in spans))


def test_kernels_one_after_another_count_whole():
    assert own(("b", 7, 12, 30), ("a", 7, 0, 10)) == [("a", 10), ("b", 18)]


def test_one_that_starts_early_counts_from_the_end_of_the_one_before():
    spans = ("a", 7, 0, 100), ("b", 7, 20, 130), ("c", 7, 60, 140)
    assert own(*spans) == [("a", 100), ("b", 30), ("c", 10)]
    assert sum(time for _, time in own(*spans)) == 140


def test_one_that_ends_before_the_one_it_waits_for_counts_nothing():
    assert own(("a", 7, 0, 100), ("b", 7, 20, 90), ("c", 7, 95, 110)) == [
        ("a", 100), ("b", 0), ("c", 10)
    ]  # fmt: skip


def test_streams_do_not_wait_for_one_another():
    assert own(("a", 7, 0, 100), ("b", 20, 20, 130)) == [("a", 100), ("b", 110)]
