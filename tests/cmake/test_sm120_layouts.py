"""What CuTe and CUTLASS say, on the host, of sizes of the block-scaled GEMM of SM120 that fill no
tile: tests/kernels/test_sm120_block_gemm_indices.py emulates its kernel by these layouts."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from build_tools import ROOT, output_of

pytestmark = pytest.mark.build
SIZES = [(1, 16, 16), (3, 48, 144), (5, 144, 128), (129, 272, 400), (128, 256, 256)]


def test_layouts_hold_partial_blocks_and_only_rounded_sizes_are_taken(nvcc, tmp_path):
    cutlass = find_spec("cutlass_library")
    if cutlass is None:
        pytest.skip("needs the headers of the wheel nvidia-cutlass")
    include = Path(cutlass.submodule_search_locations[0], "source", "include")
    flags = ("-std=c++20", "-arch=sm_120a", "--expt-relaxed-constexpr", "-isystem", include)
    program = tmp_path / "layouts"
    source = ROOT / "tests/native/sm120_block_gemm_layouts.cu"
    output_of(nvcc, *flags, f"-I{ROOT / 'csrc'}", source, "-o", program)
    strides = [-(-m // 4) * 4 for m, _, _ in SIZES]
    lines = [f"{m} {n} {k} {stride}" for (m, n, k), stride in zip(SIZES, strides)]
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0
    for (m, n, k), stride, line in zip(SIZES, strides, done.stdout.splitlines(), strict=True):
        num_groups, num_blocks = -(-k // 128), -(-n // 128)
        last_a, last_b, takes_real, takes_whole = map(int, line.split())
        assert last_a == m - 1 + (num_groups - 1) * stride
        assert last_b == num_blocks * num_groups - 1
        assert takes_real == (n % 128 == 0 and k % 128 == 0)
        assert takes_whole == 1
