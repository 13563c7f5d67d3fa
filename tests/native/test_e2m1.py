"""The software conversion to E2M1 against NVIDIA's own, on the CPU.

EXHAUSTIVE=1 compares all 2^32 floats (half a minute on two cores) instead of every 61st. The GPU's
run is `e2m1_exhaustive device`, under tests/kernels/gpu.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("e2m1_exhaustive.cu")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = tmp_path_factory.mktemp("e2m1") / "exhaustive"
    subprocess.run([nvcc, "-std=c++20", "-O3", "-arch=sm_90a", SOURCE, "-o", path], check=True)
    return path


def test_every_float_converts_as_nvidias_does(program):
    step = "1" if os.environ.get("EXHAUSTIVE") else "61"
    result = subprocess.run([program, "host", step], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert " 0 runs of eight wrong" in result.stdout
