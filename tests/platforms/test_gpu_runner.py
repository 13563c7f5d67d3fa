"""The runner of GPU tests counts what happened, and misses nothing."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_tests import PARTS, ROOT, Job, gpu_files, in_turn, jobs_of

RUNNER = ROOT / "tests" / "gpu_tests.py"
TESTS = """
import pytest, sys, time
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("n", range(7))
def test_n(n):
    if n == 3:
        pytest.skip("three")
    if n == 4:
        print("INFO [llm] Ready after 1.5 s: other 1.5", file=sys.stderr)
    assert n != 5, "five is wrong"
"""


def run_all(file: Path, count: int, folder: Path):
    jobs = [Job(file, part, count) for part in range(count)]
    return [job.run(folder, time.monotonic() + 60) for job in jobs]


@pytest.mark.slow
def test_parts_of_a_file_are_all_of_it(tmp_path: Path):
    file = tmp_path / "test_sample.py"
    file.write_text(TESTS)
    outcomes = run_all(file, 2, tmp_path)
    assert [sum(o.counts.values()) for o in outcomes] == [3, 4]
    total = outcomes[0].counts + outcomes[1].counts
    assert total == {"passed": 5, "failed": 1, "skipped": 1}
    ((name, reason),) = [*outcomes[0].wrong.items(), *outcomes[1].wrong.items()]
    assert name.endswith("test_sample.py::test_n[5]") and "five is wrong" in reason
    starts = {n.partition("::")[2]: s for o in outcomes for n, (_, s) in o.times.items() if s}
    assert starts == {"test_n[4]": 1.5}


@pytest.mark.slow
def test_what_cannot_run_or_runs_out_of_time_is_told(tmp_path: Path):
    broken = tmp_path / "test_broken.py"
    broken.write_text("import nothing_of_this_name")
    (outcome,) = run_all(broken, 1, tmp_path)
    assert outcome.wrong and not outcome.counts["passed"]
    slow = tmp_path / "test_slow.py"
    slow.write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\ndef test_a(): pass\n"
        "def test_b(): time.sleep(60)\ndef test_c(): pass\n"
    )
    outcome = Job(slow, 0, 1).run(tmp_path, time.monotonic() + 4)
    assert outcome.counts == {"passed": 1, "not run": 2, "unfinished parts": 1}
    reasons = {name.rpartition(":")[2]: reason for name, reason in outcome.wrong.items()}
    assert reasons["test_b"] == "it ran when its process ended" and reasons["test_c"] == "not run"
    assert any("out of time" in reason for reason in reasons.values())


@pytest.mark.slow
def test_results_are_written_when_it_is_stopped_and_the_rest_is_run_with_them(tmp_path: Path):
    quick, slow = tmp_path / "test_quick.py", tmp_path / "test_slow.py"
    quick.write_text(TESTS)
    slow.write_text(TESTS.replace("n != 5", "time.sleep(60) is None"))
    out, again = tmp_path / "out" / "results.txt", tmp_path / "again.txt"
    words = [sys.executable, RUNNER, quick, slow, "--jobs", "2"]
    process = subprocess.Popen([*words, "--out", out], stdout=subprocess.DEVNULL)
    while process.poll() is None and not (out.exists() and "test_quick.py" in out.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    text = out.read_text()
    assert "test_quick.py: 1 failed, 5 passed, 1 skipped" in text
    assert "test_slow.py: 7 not run, 1 unfinished parts" in text
    for file in (quick, slow):
        file.write_text(TESTS.replace("n != 5", "True"))
    done = subprocess.run([*words, "--only-failed", out, "--out", again], capture_output=True)
    assert done.returncode == 0, again.read_text()
    assert "7 passed, 1 skipped" in again.read_text().splitlines()[2]


def test_it_finds_the_files_that_are_marked():
    names = {file.name for file in gpu_files()}
    assert {"test_block_gemm.py", "test_engine_on_gpu.py", "test_nccl_on_gpus.py"} <= names
    assert {"test_gates.py", "test_architectures_on_gpu.py"} <= names
    assert not {"test_tokens.py", "test_gpu_runner.py", "test_triton_interpreted.py"} & names


def test_files_for_a_gpu_need_no_library_for_tests_but_pytest():
    """A machine with a GPU may have no more, and cannot fetch it."""
    assert [file.name for file in gpu_files() if "import hypothesis" in file.read_text()] == []
    assert [file.name for file in gpu_files() if "from hypothesis" in file.read_text()] == []


def test_what_took_longest_begins_first():
    short, long = (ROOT / "tests" / f"test_{name}.py" for name in ("short", "long"))
    before = "tests/test_short.py: 3 passed, 5 s\ntests/test_long.py: 1 failed, 2 passed, 90 s\n"
    assert [job.file for job in jobs_of([short, long], before, None)] == [long, short]


def test_each_process_begins_with_another_gpu_and_sees_all(tmp_path: Path):
    names = ["4", "GPU-5b", "6"]
    assert [in_turn(names, turn) for turn in range(4)] == [
        "4,GPU-5b,6", "GPU-5b,6,4", "6,4,GPU-5b", "4,GPU-5b,6"
    ]  # fmt: skip
    assert in_turn(["0"], 1) == in_turn([], 1) == ""  # as it is
    file = tmp_path / "test_shown.py"
    file.write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_shown(): assert os.environ.get('CUDA_VISIBLE_DEVICES') == '1,0'\n"
    )
    outcome = Job(file, 0, 1).run(tmp_path, time.monotonic() + 60, in_turn(["0", "1"], 1))
    assert outcome.counts == {"passed": 1}


def test_files_that_are_cut_exist():
    assert PARTS.keys() <= {file.name for file in gpu_files()}
