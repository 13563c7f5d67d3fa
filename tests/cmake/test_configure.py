"""What configuring the real tree says, decides and records; nothing is compiled."""

import os
from pathlib import Path

import pytest
from build_tools import Configured


@pytest.fixture
def hide_nvcc() -> str:
    """An option under which CMake finds no nvcc."""
    folders = [path for path in os.get_exec_path() if Path(path, "nvcc").exists()]
    return f"-DCMAKE_IGNORE_PATH={';'.join([*folders, '/usr/local/cuda/bin'])}"


@pytest.fixture(scope="module")
def for_the_cpu(tmp_path_factory) -> Configured:
    folder = tmp_path_factory.mktemp("cpu")
    return Configured(folder, "-DVLLM_TARGET_DEVICE=cpu", TORCH_CUDA_ARCH_LIST="9.0a")


def test_suffixes_reach_nvcc_and_the_manifest(nvcc, tmp_path):
    configured = Configured(tmp_path, TORCH_CUDA_ARCH_LIST="9.0a 12.1a 12.0+PTX")
    assert configured.succeeded, configured.text
    assert configured.nvcc_flags("skinny_fp8_block.cu") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
        "-gencode=arch=compute_121a,code=sm_121a",
    ]
    built = configured.manifest["kernels"]["skinny_fp8_block_gemm"]
    assert built == ["90a", "120", "compute_120", "121a"]
    assert "skinny_fp8_block_gemm: 9.0a 12.0+PTX 12.1a" in configured.text
    assert "12.0 without a suffix: E2M1 in software there" in configured.text


@pytest.mark.slow
def test_what_cannot_be_built_is_listed_last_and_in_the_manifest(nvcc, tmp_path):
    configured = Configured(tmp_path, TORCH_CUDA_ARCH_LIST="Hopper 99.0 7.5")
    assert configured.succeeded, configured.text
    _, _, listed = configured.text.partition("Asked for and not built")
    skipped = {(skip["kernel"], skip["arch"]): skip for skip in configured.manifest["skipped"]}
    for arch, reason in {
        "99.0": "no architecture known to this build",
        "7.5": "no kernel has code for it",
    }.items():
        assert f"* {arch}: {reason}" in listed
        assert skipped["*", arch]["reason"].startswith(reason)


@pytest.mark.slow
def test_strict_makes_what_cannot_be_built_an_error_and_only_that(nvcc, tmp_path):
    strict = "-DVLLM_STRICT_ARCHS=ON"
    refused = Configured(tmp_path / "a", strict, "-DTORCH_CUDA_ARCH_LIST=9.0a;99.0")
    assert not refused.succeeded
    assert "* 99.0: no architecture known to this build" in refused.text
    cpu = Configured(tmp_path / "b", strict, "-DVLLM_TARGET_DEVICE=cpu", TORCH_CUDA_ARCH_LIST="99")
    assert cpu.succeeded, cpu.text


@pytest.mark.slow
def test_an_option_wins_over_a_variable_and_cmakes_spelling_is_taken(nvcc, tmp_path):
    option = "-DCMAKE_CUDA_ARCHITECTURES=90a-real;121f"
    configured = Configured(tmp_path, option, TORCH_CUDA_ARCH_LIST="8.0", CUDAARCHS="80")
    assert "architectures: 9.0a 12.1f (CMAKE_CUDA_ARCHITECTURES)" in configured.text
    assert configured.nvcc_flags("skinny_fp8_block.cu") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_121f,code=sm_121f",
    ]


@pytest.mark.slow
def test_native_means_the_chips_of_this_machine_with_the_suffix_that_loses_nothing(nvcc, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    nvidia_smi = folder / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\nprintf '8.9\\n9.0\\n12.1\\n9.0\\n'\n")
    nvidia_smi.chmod(0o755)
    path = os.pathsep.join([str(folder), *os.get_exec_path()])
    configured = Configured(tmp_path / "a", TORCH_CUDA_ARCH_LIST="native", PATH=path)
    assert "architectures: 8.9 9.0a 12.1a" in configured.text
    nvidia_smi.write_text("#!/bin/sh\necho no devices were found; exit 6\n")
    refused = Configured(tmp_path / "b", TORCH_CUDA_ARCH_LIST="native", PATH=path)
    assert not refused.succeeded
    assert "name the architecture instead" in " ".join(refused.text.split())


def test_a_machine_without_nvcc_builds_for_the_cpu_and_says_so(hide_nvcc, tmp_path):
    configured = Configured(tmp_path, hide_nvcc)
    assert configured.succeeded, configured.text
    assert "nvcc not found: building the CPU kernels only" in configured.text
    assert configured.manifest["cuda"] is None
    assert all(name.startswith("cpu_") for name in configured.manifest["kernels"])


def test_architectures_without_nvcc_are_an_error(hide_nvcc, tmp_path):
    configured = Configured(tmp_path, hide_nvcc, TORCH_CUDA_ARCH_LIST="9.0a 12.1a")
    assert not configured.succeeded
    assert (
        "TORCH_CUDA_ARCH_LIST (environment): given '9.0a 12.1a', but nvcc was not found: set "
        "CUDACXX to it, or VLLM_TARGET_DEVICE=cpu" in " ".join(configured.text.split())
    )


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ("7.5 99.0", "No GPU kernel can be built with CUDA"),
        pytest.param(
            "9.0a Hoper",
            "(environment): 'Hoper' is not an architecture: write 9.0a, 90a, sm_121a",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_build_with_nvcc_has_gpu_kernels_and_all_words_are_understood(
    request_, text, nvcc, tmp_path
):
    configured = Configured(tmp_path, TORCH_CUDA_ARCH_LIST=request_)
    assert not configured.succeeded
    assert text in " ".join(configured.text.split())


@pytest.mark.slow
def test_names_of_generations_and_lists_with_semicolons_are_understood(nvcc, tmp_path):
    configured = Configured(tmp_path, TORCH_CUDA_ARCH_LIST="Hopper;12.0+PTX")
    assert configured.succeeded, configured.text
    assert "architectures: 9.0a 12.0+PTX (TORCH_CUDA_ARCH_LIST (environment))" in configured.text
    # The CUTLASS kernels would not do here: their headers need not be installed.
    built = configured.manifest["kernels"]["skinny_fp8_block_gemm"]
    assert built == ["90a", "120", "compute_120"]


def test_asking_for_cuda_without_nvcc_is_an_error(hide_nvcc, tmp_path):
    configured = Configured(tmp_path, hide_nvcc, "-DVLLM_TARGET_DEVICE=cuda")
    assert not configured.succeeded
    assert "set CUDACXX" in configured.text


def test_a_build_for_the_cpu_does_not_look_for_nvcc(for_the_cpu):
    assert for_the_cpu.succeeded, for_the_cpu.text
    assert "CUDA compiler" not in for_the_cpu.text
    assert for_the_cpu.manifest["cuda"] is None and not for_the_cpu.manifest["skipped"]


def test_the_library_is_linked_without_a_runpath(for_the_cpu):
    linked = (for_the_cpu.folder / "build.ninja").read_text()
    assert "-ltvm_ffi" in linked or "libtvm_ffi" in linked
    assert "-rpath" not in linked


def test_an_unknown_device_is_refused_with_the_accepted_ones(tmp_path):
    configured = Configured(tmp_path, "-DVLLM_TARGET_DEVICE=gpu")
    assert not configured.succeeded
    assert "given 'gpu'; accepted: auto, cpu, cuda" in " ".join(configured.text.split())


def test_the_manifest_comes_with_the_library_and_not_before(for_the_cpu):
    assert for_the_cpu.manifest["kernels"]
    assert not (for_the_cpu.folder / "lib" / "arch_manifest.json").exists()
