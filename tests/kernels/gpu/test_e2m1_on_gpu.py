"""The conversion to E2M1 on the GPU: all 2^32 floats, and 10^9 random pairs for their order.

E2M1_EXHAUSTIVE names the compiled program; without it nvcc compiles it for this GPU.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "native" / "e2m1_exhaustive.cu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("E2M1_EXHAUSTIVE"):
        return Path(given)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    torch.cuda.init()  # before minutes of compiling for a GPU that does not work
    path = tmp_path_factory.mktemp("e2m1") / "exhaustive"
    subprocess.run([nvcc, "-std=c++20", "-O3", "-arch=native", SOURCE, "-o", path], check=True)
    return path


def test_every_float_and_every_place_in_a_word(program):
    result = subprocess.run([program, "device"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" 0 comparisons of eight wrong") == 2
