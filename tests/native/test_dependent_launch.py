"""Kernels that csrc/launch.cuh starts before those before them end, as nvcc compiles them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from slow import quick

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = sorted(
    path.relative_to(CSRC).as_posix()
    for path in CSRC.rglob("*.cu")
    if "wait_for_inputs();" in path.read_text()
)
QUICK = ("layers/norm.cu", "quantization/w8a8/group_quant.cu")
# Of memory that other kernels share; parameters and shared memory are a kernel's own.
ACCESS = re.compile(r"\s(ld|ldu|st|atom|red|cp)\.(?!param|shared|local|const)[\w.:]+ ")
WAIT, LET_NEXT_START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def kernels(source: Path, folder: Path) -> dict[str, str]:
    """PTX for 9.0 of each kernel of a file but the one that launches ask about."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = folder / "kernels.ptx"
    words = [nvcc, "-std=c++20", "-arch=compute_90", "-ptx", source, "-o", path]
    subprocess.run(words, check=True)
    _, *bodies = path.read_text().split(".entry ")
    by_name = {body.split("(")[0].strip(): body for body in bodies}
    return {name: body for name, body in by_name.items() if "probe_kernel" not in name}


def test_files_of_such_kernels_are_known():
    assert {"layers/norm.cu", "layers/sampling.cu", "quantization/w8a8/row_quant.cu"} <= {*SOURCES}


@pytest.mark.slow
@pytest.mark.parametrize("source", quick(SOURCES, QUICK))
def test_a_kernel_waits_before_it_touches_memory_and_before_it_lets_the_next_one_start(
    source, tmp_path
):
    bodies = kernels(CSRC / source, tmp_path)
    assert bodies
    for name, body in bodies.items():
        first = ACCESS.search(body)
        assert first is not None, name
        assert 0 < body.find(WAIT) < min(first.start(), body.find(LET_NEXT_START)), name
