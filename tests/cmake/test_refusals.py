"""What exported GPU functions refuse, on machines without a GPU: arguments are checked before
anything touches their memory, so it need not be a GPU's."""

from pathlib import Path

import nvfp4_experts
import pytest
import torch
import tvm_ffi
from build_tools import ROOT, output_of
from pretended_gpu import pretended

pytestmark = pytest.mark.build
SOURCES = (
    "csrc/bindings/cuda_cutlass.cu",
    "csrc/bindings/cuda_fp4.cu",
    "csrc/quantization/fp4/nvfp4_quant.cu",
)


@pytest.fixture(scope="module")
def library(nvcc, tmp_path_factory):
    """Without the GEMMs, which are absent from builds for other chips too."""
    path = tmp_path_factory.mktemp("refusals") / "library.so"
    include, ffi = tvm_ffi.libinfo.find_include_path(), Path(tvm_ffi.libinfo.find_libtvm_ffi())
    flags = ("-std=c++20", "-O1", "--expt-relaxed-constexpr", "-arch=sm_90a", "-shared")
    link = ("-Xcompiler=-fPIC", "-isystem", include, "-L", ffi.parent, "-ltvm_ffi", "-o", path)
    output_of(nvcc, *flags, *(ROOT / source for source in SOURCES), *link)
    return tvm_ffi.load_module(str(path))


@pytest.mark.parametrize(("name", "change", "message"), nvfp4_experts.REFUSALS)
def test_the_grouped_nvfp4_gemm_names_what_it_cannot_serve(library, name, change, message):
    given = nvfp4_experts.operands([3, 5], 40, 64, 2)
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        library.cutlass_nvfp4_gemm_grouped(*map(pretended, given.values()))


@pytest.mark.parametrize(
    ("pairs", "top_k", "message"),
    [
        (torch.zeros(10, dtype=torch.int64), 2, "pairs: given int64"),
        (torch.zeros(2, 5, dtype=torch.int32), 2, "pairs: given shape"),
        (torch.zeros(20, dtype=torch.int32)[::2], 2, "pairs: given a strided tensor"),
        (torch.zeros(9, dtype=torch.int32), 2, r"q: given shape \[10, 32\]; .* must be 9 \(pairs"),
        (torch.zeros(10, dtype=torch.int32), 0, "top_k: given 0; accepted: 1 to 1024"),
    ],
)
def test_the_quantiser_of_pairs_names_what_it_cannot_serve(library, pairs, top_k, message):
    x, divisors = torch.zeros(5, 64).bfloat16(), torch.ones(2)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    q, scales = torch.zeros(10, 32, dtype=torch.uint8), torch.zeros(256, 4, dtype=torch.uint8)
    before = (pretended(t) for t in (x, divisors, ends, pairs))
    with pytest.raises(ValueError, match=message):
        library.nvfp4_quant_grouped(*before, top_k, pretended(q), pretended(scales))
