"""Every GPU kernel for every kind of target, into one library. `make test-build` runs it."""

import re

import pytest
import tvm_ffi
from build_tools import Configured, find_tool, output_of

pytestmark = pytest.mark.build
# nvcc refuses a plain target beside its own family, so the plain ones are a library of their own.
KINDS = ("8.0 8.9 9.0a 10.0a 10.0f 10.3a 12.0a 12.0f 12.1a", "9.0 10.0 12.0 12.1+PTX")


@pytest.fixture(scope="module", params=KINDS)
def library(nvcc, tmp_path_factory, request) -> Configured:
    folder = tmp_path_factory.mktemp("build")
    configured = Configured(folder, "-DVLLM_STRICT_ARCHS=ON", TORCH_CUDA_ARCH_LIST=request.param)
    assert configured.succeeded, configured.text
    output_of(find_tool("cmake"), "--build", folder)
    return configured


def test_the_library_loads_and_runs_on_the_cpu(library):
    loaded = tvm_ffi.load_module(str(library.folder / "lib" / "libvllm_kernels.so"))
    assert loaded.cpu_num_threads() >= 1


def test_the_library_holds_machine_code_for_every_chip_of_the_manifest(library):
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump is neither on PATH nor in an nvidia-cuda-cuobjdump wheel")
    listed = output_of(cuobjdump, "-lelf", library.folder / "lib" / "libvllm_kernels.so")
    built = {arch for archs in library.manifest["kernels"].values() for arch in archs}
    chips = {re.match(r"\d+", arch)[0] for arch in built if arch[0].isdigit()}
    assert chips == set(re.findall(r"\.sm_(\d+)[af]?\.cubin", listed))
