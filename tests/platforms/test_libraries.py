"""A library is absent, broken with its own error, or a version with the architectures it carries.

The packages are small real ones, written to a folder that is put on the path.
"""

import sys
from importlib import metadata

import pytest
from machines import Cpu, machine, write_distribution, write_package

from vllm.kernels.backends import humming
from vllm.kernels.report.question import parse_lib
from vllm.machine import Lib
from vllm.platforms.libraries import (
    DISTRIBUTIONS,
    _torch_archs,
    installed_libs,
    is_usable,
    library_state,
)
from vllm.utils.distributions import installed_version

KERNEL = "include/deep_gemm/impls/sm{}_fp8_gemm_1d1d.cuh"
CUTLASS_HEADER = "include/cute/arch/mma_sm120.hpp"


@pytest.fixture
def folder(tmp_path):
    with machine(Cpu(), tmp_path):
        yield tmp_path


def test_a_library_that_imports_has_its_distributions_version(folder):
    write_package(folder, "lib_fine")
    write_distribution(folder, "sgl-lib-fine", "0.1.3")
    found = library_state("lib_fine", ("lib-fine", "sgl-lib-fine"))
    assert found == Lib("lib_fine", "0.1.3")


def test_a_library_without_a_distribution_tells_its_version_itself(folder):
    write_package(folder, "lib_source", "__version__ = '2.1.0+cu130'")
    assert library_state("lib_source", ()) == Lib("lib_source", "2.1.0")


def test_what_is_nowhere_is_absent(folder):
    assert library_state("lib_absent", ("lib-absent",)) is None


def test_a_bare_folder_of_the_name_is_no_library(folder):
    (folder / "lib_folder").mkdir()
    assert library_state("lib_folder", ()) is None


def test_an_error_at_import_is_kept_with_the_version(folder):
    write_package(folder, "lib_raises", "assert False, 'dim == 2 or\\n  dim == 3'")
    write_distribution(folder, "lib-raises", "0.1.7")
    found = library_state("lib_raises", ("lib-raises",))
    assert found.broken == "version 0.1.7, AssertionError: dim == 2 or dim == 3"
    assert parse_lib(str(found)) == found


def test_the_cause_of_an_error_is_kept_with_it(folder):
    code = "raise ImportError('no lib') from OSError('undefined symbol: _ZTI')"
    write_package(folder, "lib_caused", code)
    found = library_state("lib_caused", ())
    assert found.broken == "ImportError: no lib <- OSError: undefined symbol: _ZTI"


def test_a_missing_dependency_is_broken_not_absent(folder):
    write_package(folder, "lib_needs", "import lib_that_nobody_has")
    found = library_state("lib_needs", ())
    assert found.broken == "ModuleNotFoundError: No module named 'lib_that_nobody_has'"


def test_a_distribution_without_its_module_is_broken(folder):
    write_distribution(folder, "lib-empty", "1.0")
    found = library_state("lib_empty", ("lib-empty",))
    assert found.broken == "version 1.0, ModuleNotFoundError: No module named 'lib_empty'"


def test_a_broken_library_is_imported_once(folder):
    counter = folder / "imports"
    code = f"open({str(counter)!r}, 'a').write('x')\nraise OSError('no driver')"
    write_package(folder, "lib_once", code)
    for _ in range(3):
        assert library_state("lib_once", ()).broken == "OSError: no driver"
    assert counter.read_text() == "x"


@pytest.mark.parametrize(
    ("files", "archs"),
    [
        ((), ()),
        ((KERNEL.format(90), KERNEL.format(100)), ("sm90", "sm100")),
        ((KERNEL.format(90), KERNEL.format(120)), ("sm90", "sm120")),
        ((KERNEL.format(90), CUTLASS_HEADER), ("sm90",)),
        (("include/deep_gemm/impls/sm120_split_k_reduce.cuh",), ()),
    ],
)
def test_deep_gemm_carries_the_architectures_of_its_own_fp8_kernels(folder, files, archs):
    write_package(folder, "deep_gemm", files=files)
    write_distribution(folder, "sgl-deep-gemm", "0.2.1.post1")
    expected = Lib("deep_gemm", "0.2.1.post1", archs)
    assert library_state("deep_gemm") == expected
    assert installed_libs().get("deep_gemm") == expected


@pytest.mark.parametrize(
    ("cuda", "archs"),
    [
        ("cuda: Optional[str] = '13.0'", ("scaled-blocks",)),
        ("cuda = '12.9'", ("scaled-blocks",)),
        ('cuda = "12.8"', ()),
        ("cuda: Optional[str] = None\ngit_version = '13.0'", ()),
        (None, ()),
    ],
)
def test_torch_carries_products_with_scales_of_blocks_from_cuda_12_9_on(tmp_path, cuda, archs):
    if cuda is not None:
        (tmp_path / "version.py").write_text(f"debug = False\n{cuda}\nhip = None\n")
    assert _torch_archs(tmp_path, "2.11.0") == archs


def test_versions_are_those_that_the_standard_library_reads(folder):
    found = {one.name: one.version for one in metadata.distributions()}
    assert "torch" in found
    assert {name: installed_version(name) for name in found} == {
        name: metadata.version(name) for name in found
    }
    assert installed_version("sgl-deep-gemm") == ""
    write_distribution(folder, "sgl-deep-gemm", "0.2.1")  # while this process runs
    assert installed_version("sgl-deep-gemm") == installed_version("SGL_deep.gemm") == "0.2.1"


def test_the_revision_of_a_build_from_source_is_told(folder):
    write_package(folder, "deep_gemm", files=(KERNEL.format(90),))
    write_distribution(folder, "deep-gemm", "2.5.0+8b1392b")
    assert library_state("deep_gemm") == Lib("deep_gemm", "2.5.0", ("sm90", "8b1392b"))


def test_metadata_is_read_without_importing_anything(folder):
    for module, (distribution, *_) in DISTRIBUTIONS.items():
        if module != "torch":
            write_package(folder, module, "raise OSError('imported')")
            write_distribution(folder, distribution, "9.9")
    before = set(sys.modules)
    libs = installed_libs()
    assert not (set(sys.modules) - before) & DISTRIBUTIONS.keys()
    for module in DISTRIBUTIONS.keys() - {"torch"}:
        assert libs.get(module).version == "9.9"
    assert not is_usable("humming")  # importing it does raise


def test_binaries_of_another_version_break_the_library_that_they_are_for(folder):
    for module, version in (("flashinfer", "0.6.13"), ("flashinfer_cubin", "0.6.14")):
        write_package(folder, module)
        write_distribution(folder, DISTRIBUTIONS[module][0], version)
    for name in ("flashinfer", "flashinfer_cubin"):
        broken = installed_libs().get(name).broken
        assert "flashinfer-python 0.6.13 refuses flashinfer-cubin 0.6.14 beside it" in broken


def test_the_torch_that_runs_is_listed(folder):
    import torch

    assert installed_libs().get("torch") == Lib("torch", torch.__version__.partition("+")[0])


def test_humming_without_a_compiler_is_broken_and_says_what_it_needs(folder, monkeypatch):
    monkeypatch.setattr(humming, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="it compiles with nvcc, which is not here"):
        humming.TRIALS["humming"].run(sys, ())
