"""Every GPU kernel for every kind of target, into one library. `make test-build` runs it."""

import re

import pytest
import tvm_ffi
from build_tools import Configured, find_tool, output_of

pytestmark = pytest.mark.build
# The instruction of tensor cores that each GEMM is made of, as machine code names it.
TENSOR_CORES = {
    "sm90_fp8_block_gemm": "QGMMA",
    "sm100_fp8_block_gemm": "UTCQMMA",
    "sm100_fp8_grouped_gemm": "UTCQMMA",
    "sm100_nvfp4_gemm": "UTCOMMA",
    "sm100_nvfp4_grouped_gemm": "UTCOMMA",
    "sm120_fp8_block_gemm": "QMMA",
    "sm120_fp8_grouped_gemm": "QMMA",
    "sm120_nvfp4_gemm": "OMMA",
    "sm120_nvfp4_grouped_gemm": "OMMA",
}
# With which a conversion to E2M1 in software, and it alone, moves signs (nvfp4_utils.cuh).
SOFTWARE_SELECTOR = "0xfdb9"
# nvcc refuses a plain target beside its own family, so the plain ones are a library of their own.
KINDS = ("8.0 8.9 9.0a 10.0a 10.0f 10.3a 12.0a 12.0f 12.1a", "9.0 10.0 12.0 12.1")


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


def machine_code(cuobjdump: str, library: Configured, kernel: str) -> dict[str, str]:
    """Disassembly of a kernel's objects by architecture, as the objects name it: `121a`."""
    found: dict[str, str] = {}
    for path in (library.folder / "CMakeFiles" / f"{kernel}.dir").rglob("*.o"):
        sections = output_of(cuobjdump, "-sass", path).split("Fatbin elf code:")[1:]
        for section in sections:
            arch = re.search(r"arch = sm_(\w+)", section)[1]
            found[arch] = found.get(arch, "") + section
    return found


def test_the_library_holds_machine_code_for_every_chip_of_the_manifest(cuobjdump, library):
    listed = output_of(cuobjdump, "-lelf", library.folder / "lib" / "libvllm_kernels.so")
    built = {arch for archs in library.manifest["kernels"].values() for arch in archs}
    chips = {re.match(r"\d+", arch)[0] for arch in built if arch[0].isdigit()}
    assert chips == set(re.findall(r"\.sm_(\d+)[af]?\.cubin", listed))


@pytest.mark.parametrize("kernel", TENSOR_CORES)
def test_a_gemm_runs_on_the_tensor_cores_of_its_generation(cuobjdump, library, kernel):
    code = machine_code(cuobjdump, library, kernel)
    built = library.manifest["kernels"].get(kernel, [])
    assert set(code) == {arch for arch in built if arch[0].isdigit()}
    for arch, text in code.items():
        assert re.search(rf"\b{TENSOR_CORES[kernel]}\b", text), arch


def test_every_gemm_of_tensor_cores_is_looked_into(library):
    gemms = {name for name in library.manifest["kernels"] if re.match(r"sm\d+_.*gemm", name)}
    assert gemms == set(TENSOR_CORES)


def test_int4_is_multiplied_by_fp8_on_the_tensor_cores_that_take_it(cuobjdump, library):
    for arch, text in machine_code(cuobjdump, library, "marlin_w4a8_gemm").items():
        # 9.0 has no such instruction for operands in registers: it is there for tests.
        wanted = "HMMA" if arch.startswith("90") else "QMMA"
        assert re.search(rf"\b{wanted}\b", text), arch


def test_the_fp4_quantisers_convert_as_their_target_can(cuobjdump, library):
    code = machine_code(cuobjdump, library, "nvfp4_quant")
    for arch, text in code.items():
        is_native = arch[-1] in "af" and int(arch[:-1]) >= 100
        assert ("E2M1" in text, SOFTWARE_SELECTOR in text) == (is_native, not is_native), arch
