"""What the grouped GEMMs of Blackwell tell CUTLASS about experts, computed on the host."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from build_tools import ROOT, output_of

pytestmark = pytest.mark.build


@pytest.mark.parametrize("source", ["grouped_addresses.cu", "grouped_nvfp4_addresses.cu"])
def test_every_element_of_every_expert_is_where_the_operands_hold_it(nvcc, tmp_path, source):
    cutlass = find_spec("cutlass_library")
    if cutlass is None:
        pytest.skip("needs the headers of the wheel nvidia-cutlass")
    include = Path(cutlass.submodule_search_locations[0], "source", "include")
    flags = ("-std=c++20", "-O1", "--expt-relaxed-constexpr", "-isystem", include)
    program = tmp_path / "grouped_addresses"
    output_of(nvcc, *flags, ROOT / "tests/native" / source, "-o", program)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 addresses wrong\n")
