"""Device code for each kind of target: the FP4 instruction where it exists, software where not.

Nothing runs: PTX and machine code are read.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from build_tools import output_of

pytestmark = pytest.mark.slow

CSRC = Path(__file__).resolve().parents[2] / "csrc"
DRIVER = Path(__file__).with_name("e2m1_driver.cu")
FP4 = sorted((CSRC / "quantization/fp4").glob("*.cu"))
FP8 = sorted((CSRC / "quantization/w8a8").glob("*.cu"))

NATIVE = ("100a", "100f", "103a", "120a", "120f", "121a")
SOFTWARE = ("90a", "120", "121")
INSTRUCTION = "cvt.rn.satfinite.e2m1x2.f32"
# The selector with which the software alone moves signs (nvfp4_utils.cuh).
SOFTWARE_SELECTOR = "0xFDB9"
# What a conversion in software consists of, and packing bytes around the instruction does not.
ARITHMETIC = {"abs", "add", "and", "fma", "max", "min", "selp", "setp", "shr", "sub", "xor"}


def compile_for(nvcc: str, arch: str, source: Path, folder: Path, kind: str = "ptx") -> Path:
    """Compiles with the build's flags and the CUDA headers alone."""
    out = folder / f"{source.stem}.{arch}.{kind}"
    flags = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-{kind}", "-o", out)
    output_of(nvcc, f"-gencode=arch=compute_{arch},code=sm_{arch}", *flags, source)
    return out


@pytest.fixture(scope="module")
def ptx(nvcc, tmp_path_factory) -> Callable[[str], dict[Path, str]]:
    """ptx(arch): PTX by source, compiled two at a time: each may take 1 GiB."""
    folder = tmp_path_factory.mktemp("ptx")
    quantisers = [file for file in FP4 if "cutlass/" not in file.read_text()]
    sources = (DRIVER, *quantisers, *FP8)

    @cache
    def compiled(arch: str) -> dict[Path, str]:
        with ThreadPoolExecutor(2) as pool:
            done = pool.map(lambda file: compile_for(nvcc, arch, file, folder), sources)
            return {file: out.read_text() for file, out in zip(sources, done)}

    return compiled


def opcodes(text: str) -> dict[str, list[str]]:
    """Instructions by kernel, without their types, the FP4 conversion as it is."""
    found = {}
    for kernel in re.sub(r"//.*", "", text).split(".entry ")[1:]:
        name, _, rest = kernel.partition("(")
        code = (line for line in rest.partition(")")[2].split(";") if ".reg" not in line)
        words = (re.search(r"(?<![%.$@\w])[a-z][\w.]*(?!:)", line) for line in code)
        names = [word[0] for word in words if word]
        found[name] = [n if n == INSTRUCTION else n.partition(".")[0] for n in names]
    return found


@pytest.mark.parametrize("arch", NATIVE)
def test_a_target_with_the_instruction_uses_it_and_no_arithmetic(ptx, arch):
    kernels = opcodes(ptx(arch)[DRIVER])
    assert "SOFTWARE_E2M1_CONVERT" not in ptx(arch)[DRIVER]
    for name, num_values in {"vec8": 8, "vec8_pairs": 8, "vec16_pairs": 16}.items():
        assert kernels[name].count(INSTRUCTION) == num_values // 2
        assert not ARITHMETIC & set(kernels[name])


@pytest.mark.parametrize("arch", SOFTWARE)
def test_a_target_without_the_instruction_compiles_to_software(ptx, arch):
    kernels = opcodes(ptx(arch)[DRIVER])
    assert "e2m1x2" not in ptx(arch)[DRIVER]
    assert "SOFTWARE_E2M1_CONVERT" in ptx(arch)[DRIVER]
    for name in ("vec8", "vec8_pairs", "vec16_pairs"):
        assert ARITHMETIC & set(kernels[name])


@pytest.mark.parametrize("arch", NATIVE + SOFTWARE)
def test_the_fp4_quantisers_convert_as_their_target_can(ptx, arch):
    assert FP4, "csrc/quantization/fp4 holds no kernels"
    converting = [text for file, text in ptx(arch).items() if file in FP4]
    assert any("e2m1x2" in text for text in converting) == (arch in NATIVE)
    assert any(SOFTWARE_SELECTOR in text for text in converting) == (arch in SOFTWARE)


@pytest.mark.parametrize("arch", NATIVE + SOFTWARE)
def test_machine_code_keeps_what_the_ptx_says(nvcc, nvdisasm, tmp_path, arch):
    sass = output_of(nvdisasm, compile_for(nvcc, arch, DRIVER, tmp_path, "cubin"))
    conversions = re.findall(r"\bF2FP\.\S*E2M1\S*", sass)
    roundings = re.findall(r"\bHMNMX2\b", sass)  # one for each pair of values, in software
    assert (len(conversions), len(roundings)) == ((16, 0) if arch in NATIVE else (0, 16))


@pytest.mark.parametrize("arch", NATIVE + SOFTWARE)
def test_the_fp8_quantisers_compile_for_every_kind_of_target(ptx, arch):
    assert FP8, "csrc/quantization/w8a8 holds no kernels"
    for file in FP8:
        assert f".target sm_{arch}\n" in ptx(arch)[file] and ".entry" in ptx(arch)[file]
