"""Where DeepGEMM serves, in which scale format, and which models the rule keeps from it."""

import subprocess
import sys

import pytest
import torch
from machines import STAND_INS, Cpu, Gpu, machine, write_package

from vllm.errors import ConfigError
from vllm.utils import deep_gemm, fp8
from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT
from vllm.utils.import_utils import has_deep_gemm

FLOAT32 = DeepGemmQuantScaleFMT.FLOAT32
CEIL = DeepGemmQuantScaleFMT.FLOAT32_CEIL_UE8M0
UE8M0 = DeepGemmQuantScaleFMT.UE8M0
SM120_KERNELS = tuple(f"include/deep_gemm/impls/sm{n}_fp8_gemm_1d1d.cuh" for n in (90, 100, 120))


# ---------------------------------------------------------------- the model rule


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize(
    ("capability", "expected"),
    [(80, False), (90, False), (100, True), (103, True), (110, False), (120, True), (121, True)],
)
def test_a_listed_model_is_disabled_where_deep_gemm_takes_ue8m0_scales(
    model_type, capability, expected
):
    with machine(Gpu(capability)):
        assert deep_gemm.should_auto_disable_deep_gemm(model_type) is expected


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "qwen3_moe", "llama", "", None])
def test_other_models_are_never_disabled(model_type):
    with machine(Gpu(100)):
        assert deep_gemm.should_auto_disable_deep_gemm(model_type) is False


def test_no_model_is_disabled_on_a_cpu():
    with machine(Cpu()):
        assert deep_gemm.should_auto_disable_deep_gemm("qwen3_5_text") is False


def test_the_excluded_models():
    excluded = deep_gemm._DEEPGEMM_BLACKWELL_EXCLUDED_MODEL_TYPES
    assert excluded == {"qwen3_5_text", "qwen3_5_moe_text"}


def test_a_process_without_torch_gets_answers():
    code = (
        "import sys\n"
        "from vllm.utils.import_utils import has_deep_gemm, hide_torch\n"
        "hide_torch()\n"
        "from vllm.utils import deep_gemm, flashinfer\n"
        "assert deep_gemm.should_auto_disable_deep_gemm('qwen3_5_text') is False\n"
        "assert deep_gemm.is_deep_gemm_supported() is False\n"
        "assert deep_gemm.is_deep_gemm_e8m0_used() is False\n"
        "assert flashinfer.has_flashinfer_fp8_blockscale_gemm() is False\n"
        "assert has_deep_gemm() is False\n"
        "assert sys.modules['torch'] is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- where it serves


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(80, False), (89, False), (90, True), (100, True), (103, True), (110, False), (120, False)],
)
def test_support_follows_the_chip(capability, expected):
    with machine(Gpu(capability), STAND_INS):
        assert deep_gemm.is_deep_gemm_supported() is expected


@pytest.mark.parametrize("capability", [120, 121])
def test_family_120_is_served_by_a_package_that_carries_its_kernels(capability, tmp_path):
    write_package(tmp_path, "deep_gemm", files=SM120_KERNELS)
    with machine(Gpu(capability), tmp_path):
        assert deep_gemm.is_deep_gemm_supported()
    with machine(Gpu(capability), STAND_INS):
        assert not deep_gemm.is_deep_gemm_supported()


def test_a_missing_or_broken_library_is_no_support(tmp_path):
    write_package(tmp_path, "deep_gemm", "raise OSError('libcudart.so.13: not found')")
    with machine(Gpu(90)):
        assert not has_deep_gemm() and not deep_gemm.is_deep_gemm_supported()
    with machine(Gpu(90), tmp_path):
        assert not has_deep_gemm() and not deep_gemm.is_deep_gemm_supported()
    with machine(Gpu(90), STAND_INS):
        assert has_deep_gemm() and deep_gemm.is_deep_gemm_supported()


def test_a_cpu_is_no_support():
    with machine(Cpu(), STAND_INS):
        assert not deep_gemm.is_deep_gemm_supported()


def test_the_variable_switches_support_off_and_is_read_anew():
    with machine(Gpu(90), STAND_INS) as patch:
        for value, expected in (("0", False), ("1", True)):
            patch.setenv("VLLM_USE_DEEP_GEMM", value)
            assert deep_gemm.is_deep_gemm_supported() is expected


def test_an_invalid_variable_is_an_error():
    with machine(Gpu(90), STAND_INS) as patch:
        patch.setenv("VLLM_USE_DEEP_GEMM", "yes")
        with pytest.raises(ConfigError, match="VLLM_USE_DEEP_GEMM"):
            deep_gemm.is_deep_gemm_supported()


# ---------------------------------------------------------------- which scales it gets


@pytest.mark.parametrize(
    ("capability", "variable", "expected"),
    [
        (90, None, FLOAT32),
        (90, "0", FLOAT32),
        (90, "1", CEIL),
        (100, None, UE8M0),
        (103, "1", UE8M0),
        # Family 100 takes nothing else, so DeepGEMM serves nothing there.
        (100, "0", FLOAT32),
        (89, "1", FLOAT32),
    ],
)
def test_scale_format_by_chip_and_variable(capability, variable, expected):
    with machine(Gpu(capability), STAND_INS) as patch:
        if variable is not None:
            patch.setenv("VLLM_USE_DEEP_GEMM_E8M0", variable)
        assert DeepGemmQuantScaleFMT.from_oracle() is expected
        assert deep_gemm.is_deep_gemm_e8m0_used() is (expected is not FLOAT32)


def test_family_120_gets_packed_exponents(tmp_path):
    write_package(tmp_path, "deep_gemm", files=SM120_KERNELS)
    with machine(Gpu(121), tmp_path):
        assert DeepGemmQuantScaleFMT.from_oracle() is UE8M0


def test_no_scale_format_without_deep_gemm():
    with machine(Gpu(100)):
        assert not deep_gemm.is_deep_gemm_e8m0_used()
    with machine(Gpu(100), STAND_INS) as patch:
        patch.setenv("VLLM_USE_DEEP_GEMM", "0")
        assert not deep_gemm.is_deep_gemm_e8m0_used()


# ---------------------------------------------------------------- which weights it takes


@pytest.mark.parametrize(
    ("output_dtype", "weight_dtype", "shape", "expected"),
    [
        (torch.bfloat16, torch.float8_e4m3fn, (64, 128), True),
        (torch.bfloat16, torch.float8_e4m3fn, (4096, 7168), True),
        (torch.float16, torch.float8_e4m3fn, (64, 128), False),
        (torch.bfloat16, torch.float8_e5m2, (64, 128), False),
        (torch.bfloat16, torch.bfloat16, (64, 128), False),
        (torch.bfloat16, torch.float8_e4m3fn, (96, 128), False),
        (torch.bfloat16, torch.float8_e4m3fn, (64, 192), False),
    ],
)
def test_weights_that_the_dense_gemm_takes(output_dtype, weight_dtype, shape, expected):
    weight = torch.empty(shape, dtype=weight_dtype)
    takes = deep_gemm.should_use_deepgemm_for_fp8_linear
    assert takes(output_dtype, weight, supports_deep_gemm=True) is expected
    assert takes(output_dtype, weight, supports_deep_gemm=False) is False


def test_support_is_asked_for_where_it_is_not_given():
    weight = torch.empty(64, 128, dtype=torch.float8_e4m3fn)
    for capability, expected in ((90, True), (89, False)):
        with machine(Gpu(capability), STAND_INS):
            takes = deep_gemm.should_use_deepgemm_for_fp8_linear(torch.bfloat16, weight)
            assert takes is expected


# ---------------------------------------------------------------- calls into the library


def test_calls_without_the_library_say_how_to_get_it():
    with machine(Gpu(90)), pytest.raises(RuntimeError, match="pip install sgl-deep-gemm"):
        deep_gemm.fp8_gemm_nt(None, None, None)


def test_calls_into_a_broken_library_carry_its_own_error(tmp_path):
    write_package(tmp_path, "deep_gemm", "assert False, 'dim == 2 or dim == 3'")
    with machine(Gpu(90), tmp_path), pytest.raises(RuntimeError, match="dim == 2 or dim == 3"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(None, None, None, None)


def test_calls_that_the_library_lacks_name_them(tmp_path):
    write_package(tmp_path, "deep_gemm")
    with machine(Gpu(90), tmp_path), pytest.raises(RuntimeError, match="gemm_nt_masked"):
        deep_gemm.fp8_m_grouped_gemm_nt_masked(None, None, None, None, 1)


@pytest.mark.parametrize("name", ["fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"])
def test_the_masked_gemm_is_found_under_either_of_its_names(name, tmp_path):
    code = f"calls = []\ndef {name}(*args, **kwargs): calls.append((args, kwargs))"
    write_package(tmp_path, "deep_gemm", code)
    with machine(Gpu(90), tmp_path):
        deep_gemm.fp8_m_grouped_gemm_nt_masked("a", "b", "out", "masked_m", 4)
        calls = sys.modules["deep_gemm"].calls
    assert calls == [(("a", "b", "out", "masked_m", 4), {"disable_ue8m0_cast": True})]


def test_the_alignment_of_grouped_layouts_is_the_librarys():
    with machine(Gpu(90), STAND_INS):
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == [128, 128]


def test_there_is_one_per_block_cast():
    assert deep_gemm.per_block_cast_to_fp8 is fp8.per_block_cast_to_fp8
