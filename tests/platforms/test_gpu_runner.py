"""The runner of GPU tests counts what happened, and misses nothing."""

import time
from pathlib import Path

from gpu_tests import Job, gpu_files

TESTS = """
import pytest, time
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("n", range(7))
def test_n(n):
    if n == 3:
        pytest.skip("three")
    assert n != 5, "five is wrong"
"""


def test_parts_of_a_file_are_all_of_it(tmp_path: Path):
    file = tmp_path / "test_sample.py"
    file.write_text(TESTS)
    outcomes = [Job(file, part, 2).run(tmp_path, time.monotonic() + 60) for part in range(2)]
    assert [sum(o.counts.values()) for o in outcomes] == [4, 3]
    total = outcomes[0].counts + outcomes[1].counts
    assert total == {"passed": 5, "failure": 1, "skipped": 1}
    (wrong,) = outcomes[0].wrong + outcomes[1].wrong
    assert "test_n[5]" in wrong and "five is wrong" in wrong


def test_what_cannot_run_or_runs_out_of_time_is_told(tmp_path: Path):
    broken = tmp_path / "test_broken.py"
    broken.write_text("import nothing_of_this_name")
    outcome = Job(broken, 0, 1).run(tmp_path, time.monotonic() + 60)
    assert outcome.wrong and not outcome.counts["passed"]
    slow = tmp_path / "test_slow.py"
    slow.write_text("import pytest, time\n@pytest.mark.gpu\ndef test_a(): time.sleep(60)\n")
    outcome = Job(slow, 0, 1).run(tmp_path, time.monotonic() + 3)
    assert outcome.counts["unfinished parts"] == 1 and "out of time" in outcome.wrong[0]


def test_it_finds_the_files_that_are_marked():
    names = {file.name for file in gpu_files()}
    assert {"test_block_gemm.py", "test_engine_on_gpu.py", "test_nccl_on_gpus.py"} <= names
    assert "test_tokens.py" not in names
