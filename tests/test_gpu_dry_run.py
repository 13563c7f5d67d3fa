"""Tests that need a GPU find their fixtures and come to their first use of one, without one."""

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_dry_run import FIRST_USE, NUM_GPUS
from gpu_tests import ROOT

HEAD = "import subprocess, sys, pytest, torch\npytestmark = pytest.mark.gpu\n"
NEEDS_A_GPU = "@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')\n"
SOUND = f"""{HEAD}
@pytest.fixture(scope="module")
def weight():
    assert torch.cuda.device_count() == {NUM_GPUS}
    return torch.ones(2, device="cuda")

@pytest.mark.parametrize("n", [1, 2])
def test_of_a_fixture(weight, n):
    assert False, "never reached"

def test_in_a_child():
    done = subprocess.run([sys.executable, "-c", "import torch; torch.ones(2).cuda()"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_without_a_gpu(tmp_path):
    assert tmp_path.exists()
"""
BROKEN = {
    "import nothing_of_this_name": "No module named 'nothing_of_this_name'",
    f"{NEEDS_A_GPU}def test_a(checkpiont): pass": "fixture not found: checkpiont",
    # A set of parameters that is not run, in a test that is skipped.
    """
@pytest.fixture
def folder(nothing): pass
@pytest.mark.skip("not now")
@pytest.mark.parametrize("n", [1, 2])
def test_a(folder, n): pass""": "fixture not found: nothing",
    f"{NEEDS_A_GPU}def test_a(): pytest.raises_nothing()": "no attribute 'raises_nothing'",
    "def test_a(): assert len([1, 2]) == 3; torch.ones(2).cuda()": "assert 2 == 3",
    """
def test_a():
    done = subprocess.run([sys.executable, "-c", "import nothing"])
    assert done.returncode == 0""": "assert 1 == 0",
    "x = 1": "exit code 5",
}


def dry_run(*files: Path) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, ROOT / "tests" / "gpu_dry_run.py", *files]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.slow
def test_every_gpu_test_finds_its_fixtures_and_comes_to_its_first_use_of_a_gpu():
    done = dry_run()
    told = [line for line in done.stdout.splitlines() if "\t" in line]
    assert done.returncode == 0, "\n".join(told) or done.stderr


@pytest.mark.slow
def test_the_first_use_ends_a_test_wherever_it_is(tmp_path: Path):
    file = tmp_path / "test_sound.py"
    file.write_text(SOUND)
    done = dry_run(file)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped" in done.stdout and f"2 skipped: {FIRST_USE}" in done.stdout


@pytest.fixture(scope="module")
def broken_runs(tmp_path_factory) -> "subprocess.CompletedProcess[str]":
    folder = tmp_path_factory.mktemp("broken")
    files = [folder / f"test_broken_{i}.py" for i in range(len(BROKEN))]
    for file, body in zip(files, BROKEN):
        file.write_text(f"{HEAD}\n{body}\n")
    done = dry_run(*files)
    assert done.returncode == 1
    return done


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(BROKEN)))
def test_what_is_broken_before_the_first_use_fails(broken_runs, index: int):
    told = [line for line in broken_runs.stdout.splitlines() if f"_{index}.py" in line]
    reasons = [line.partition("\t")[2] for line in told if "\t" in line]
    assert reasons and all([*BROKEN.values()][index] in reason for reason in reasons)
