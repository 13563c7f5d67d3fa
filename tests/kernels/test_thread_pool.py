"""The thread pool alone, called faster than Python can."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
POOL = HERE.parents[1] / "csrc" / "cpu" / "thread_pool.cpp"


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("pool") / "stress"
    sources = [str(HERE / "thread_pool_stress.cpp"), str(POOL)]
    subprocess.run(
        [compiler, "-std=c++20", "-O2", *sources, "-o", str(program), "-pthread"], check=True
    )
    return program


@pytest.mark.parametrize("threads", (2, 4, 16))
def test_every_item_is_done_once_by_its_own_call(stress, threads):
    result = subprocess.run(
        [str(stress), str(threads), "200000"], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
