"""The tests of Triton kernels, in Triton's interpreter: each file in a process of its own, since
Triton decides when a kernel is defined whether it is to be interpreted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "gpu"
FILES = sorted(f.name for f in FOLDER.glob("test_*.py") if "triton_device" in f.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_kernels_compute_in_the_interpreter_what_they_should(file: str):
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", FOLDER / file]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 5
