"""The configuration decides `use_deep_gemm` for models that lose accuracy by it, and says so."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machines import STAND_INS, Cpu, Gpu, machine, write_distribution, write_package
from safetensors.torch import save_file

from vllm.architectures.registry import builtin_config
from vllm.config import KernelConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.layers.quantization.methods import QuantizationMethods

MESSAGE = "Auto-disabled DeepGemm for model_type=qwen3_5_moe_text on Blackwell."
SM120 = tuple(f"include/deep_gemm/impls/sm{n}_fp8_gemm_1d1d.cuh" for n in (90, 100, 120))
TRTLLM = (("flashinfer", "flashinfer-python"), ("flashinfer_cubin", "flashinfer-cubin"))
LISTED, FREE = "Qwen3.5-35B-A3B-FP8", "Qwen3-30B-A3B-FP8"


@pytest.fixture
def config(tmp_path):
    """The configuration of an engine for a built-in model; keywords: of its quantization_config."""

    def make(model: str = LISTED, kernels: KernelConfig | None = None, **quantization):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        fields = dict(builtin_config(model))
        fields["quantization_config"] = fields["quantization_config"] | quantization
        (folder / "config.json").write_text(json.dumps(fields))
        loaded = ModelConfig.load(
            str(folder), load_format="auto", skip_tokenizer_init=True, dtype="bfloat16"
        )
        return VllmConfig(model_config=loaded, kernel_config=kernels or KernelConfig())

    return make


def write_scales(folder: Path, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    (folder / "model").mkdir(exist_ok=True)
    names = [f"model.layers.{i}.mlp.down_proj.weight_scale_inv" for i in range(2)]
    save_file(
        {name: scales.to(dtype).clone() for name in names}, folder / "model" / "m.safetensors"
    )


def decided(given: VllmConfig) -> tuple:
    return given.quant_config.use_deep_gemm, bool(given.quant_config.model_rule)


@pytest.mark.parametrize("capability", [100, 103])
def test_a_listed_model_is_decided_on_family_100(config, capability, caplog):
    with machine(Gpu(capability), STAND_INS):
        assert decided(config()) == (False, True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.message.startswith(MESSAGE)
    (instead,) = re.findall(r"Falling back to (.*?)\. To disable", record.message)
    assert instead and {"DEEP_GEMM", "NONE"}.isdisjoint(instead.split(", "))


@pytest.mark.parametrize("capability", [120, 121])
def test_on_family_120_it_is_decided_and_said_where_deep_gemm_carries_the_chip(
    config, capability, caplog, tmp_path
):
    with machine(Gpu(capability), STAND_INS):
        assert decided(config()) == (False, True)
    assert not caplog.records
    write_package(tmp_path / "packages", "deep_gemm", files=SM120)
    with machine(Gpu(capability), tmp_path / "packages"):
        assert decided(config()) == (False, True)
    (record,) = caplog.records
    assert record.message.startswith(MESSAGE)


@pytest.mark.parametrize("platform", [Cpu(), Gpu(90)])
def test_elsewhere_nothing_is_decided_or_said(config, platform, caplog):
    with machine(platform, STAND_INS):
        assert decided(config()) == (None, False)
    assert not caplog.records


@pytest.mark.parametrize("why", ["VLLM_USE_DEEP_GEMM_E8M0", "fp16", "--linear-backend triton"])
def test_what_deep_gemm_would_not_have_served_is_decided_in_silence(
    config, why, caplog, monkeypatch
):
    kernels = KernelConfig(linear_backend="triton", moe_backend="triton")
    with machine(Gpu(100), STAND_INS):
        if why == "fp16":
            made = config()
            made = replace(made.model_config, dtype="float16")
            caplog.clear()
            assert decided(VllmConfig(model_config=made)) == (False, True)
        elif why.startswith("VLLM"):
            monkeypatch.setenv(why, "0")
            assert decided(config()) == (False, True)
        else:
            assert decided(config(kernels=kernels)) == (False, True)
    assert not caplog.records


@pytest.mark.parametrize("has_trtllm", [False, True])
def test_experts_that_deep_gemm_would_not_have_served_are_no_reason_to_speak(
    config, has_trtllm, caplog, tmp_path
):
    packages = tmp_path / "packages"
    write_package(packages, "deep_gemm", files=SM120)
    for name, package in TRTLLM if has_trtllm else ():
        write_package(packages, name)
        write_distribution(packages, package, "0.6.13")
    with machine(Gpu(100), packages):
        # Without a wish DeepGEMM would serve the experts of many tokens.
        experts = "flashinfer-trtllm" if has_trtllm else None
        wishes = KernelConfig(linear_backend="triton", moe_backend=experts)
        assert decided(config(kernels=wishes)) == (False, True)
    assert len(caplog.records) == (not has_trtllm)


@pytest.mark.parametrize("model", [LISTED, FREE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_are_powers_of_two_leave_nothing_to_decide(
    config, model, dtype, tmp_path, caplog
):
    write_scales(tmp_path, 2.0 ** torch.arange(-120, 120).reshape(12, 20), dtype)
    with machine(Gpu(100), STAND_INS):
        made = config(model)
        assert decided(made) == (None, False) and made.quant_config.exact_scales
        assert decided(config(model, scale_fmt="ue8m0")) == (None, False)
    assert not caplog.records


@pytest.mark.parametrize("wrong", [3.0, 1.5 * 2**-10, -2.0, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_other_scale_makes_the_rule_hold_whatever_the_config_says(
    config, wrong, dtype, tmp_path
):
    scales = torch.full((12, 20), 0.25)
    scales[7, 11] = wrong
    write_scales(tmp_path, scales, dtype)
    with machine(Gpu(100), STAND_INS):
        assert decided(config(scale_fmt="ue8m0")) == (False, True)


def test_scale_fmt_counts_where_no_scales_are_at_hand(config, caplog):
    with machine(Gpu(100), STAND_INS):
        assert decided(config(scale_fmt="ue8m0")) == (None, False)
        assert decided(config(scale_fmt="float32")) == (False, True)


@pytest.mark.parametrize(("requant", "expected"), [("allow", None), ("exact-only", None)])
def test_another_requant_is_not_the_models_rule(config, requant, expected, caplog):
    with machine(Gpu(100), STAND_INS):
        assert decided(config(kernels=KernelConfig(requant=requant))) == (expected, False)
    assert not caplog.records


def test_other_models_are_left_alone(config, caplog):
    with machine(Gpu(100), STAND_INS):
        assert decided(config(FREE)) == (None, False)
    assert not caplog.records


@pytest.mark.parametrize("value", ["0", "1"])
def test_an_explicit_variable_leaves_the_decision_to_itself(config, value, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", value)
    with machine(Gpu(100), STAND_INS):
        assert decided(config()) == (None, False)
    assert not caplog.records


@pytest.mark.parametrize("value", [True, False])
def test_what_the_checkpoint_decides_stays(config, value):
    with machine(Gpu(100), STAND_INS):
        assert decided(config(use_deep_gemm=value)) == (value, False)


def test_without_deep_gemm_the_rule_holds_in_silence(config, caplog, tmp_path):
    with machine(Gpu(100), tmp_path):
        assert decided(config()) == (False, True)
    assert not caplog.records


def test_per_tensor_checkpoints_have_nothing_to_decide(config, caplog):
    static = {"weight_block_size": None, "activation_scheme": "static"}
    with machine(Gpu(100), STAND_INS):
        assert decided(config(**static)) == (None, False)
    assert not caplog.records


def test_the_given_quantisation_config_is_not_changed(config):
    given = Fp8Config(True, weight_block_size=[128, 128])
    with machine(Gpu(100), STAND_INS):
        made = VllmConfig(model_config=config().model_config, quant_config=given)
    assert given.use_deep_gemm is None and made.quant_config.use_deep_gemm is False


def test_the_decision_reaches_the_linear_method(config):
    with machine(Gpu(100), STAND_INS):
        method = QuantizationMethods(config().quant_config).linear_method(
            ["model.layers.0.mlp.down_proj"]
        )
    assert isinstance(method, Fp8LinearMethod) and method.config.use_deep_gemm is False
