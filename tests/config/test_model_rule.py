"""The configuration decides `use_deep_gemm` for models that lose accuracy by it, and says so."""

import logging
from types import SimpleNamespace

import pytest
from machines import STAND_INS, Cpu, Gpu, machine

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.layers.quantization.methods import QuantizationMethods

BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MESSAGE = "Auto-disabled DeepGemm for model_type=qwen3_5_moe_text on Blackwell."


def config(model_type="qwen3_5_moe_text", **quantization) -> VllmConfig:
    hf = SimpleNamespace(model_type=model_type, quantization_config=BLOCK | quantization)
    return VllmConfig(model_config=ModelConfig(model="m", hf_config=hf, hf_text_config=hf))


def decided(given: VllmConfig) -> tuple:
    return given.quant_config.use_deep_gemm, bool(given.quant_config.model_rule)


@pytest.mark.parametrize("capability", [100, 103])
def test_a_listed_model_is_decided_on_family_100(capability, caplog):
    with machine(Gpu(capability), STAND_INS), caplog.at_level(logging.INFO):
        assert decided(config()) == (False, True)
    assert [record.message for record in caplog.records if MESSAGE in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("platform", [Cpu(), Gpu(90), Gpu(120), Gpu(121)])
def test_elsewhere_nothing_is_decided_or_said(platform, caplog):
    with machine(platform, STAND_INS), caplog.at_level(logging.INFO):
        assert decided(config()) == (None, False)
    assert not caplog.records


def test_other_models_are_left_alone(caplog):
    with machine(Gpu(100), STAND_INS), caplog.at_level(logging.INFO):
        assert decided(config("qwen3_moe")) == (None, False)
    assert not caplog.records


@pytest.mark.parametrize("value", ["0", "1"])
def test_an_explicit_variable_leaves_the_decision_to_itself(value, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", value)
    with machine(Gpu(100), STAND_INS), caplog.at_level(logging.INFO):
        assert decided(config()) == (None, False)
    assert not caplog.records


@pytest.mark.parametrize("value", [True, False])
def test_what_the_checkpoint_decides_stays(value):
    with machine(Gpu(100), STAND_INS):
        assert decided(config(use_deep_gemm=value)) == (value, False)


def test_without_deep_gemm_the_rule_holds_in_silence(caplog, tmp_path):
    with machine(Gpu(100), tmp_path), caplog.at_level(logging.INFO):
        assert decided(config()) == (False, True)
    assert not caplog.records


def test_per_tensor_checkpoints_have_nothing_to_decide(caplog):
    static = {"weight_block_size": None, "activation_scheme": "static"}
    with machine(Gpu(100), STAND_INS), caplog.at_level(logging.INFO):
        assert decided(config(**static)) == (None, False)
    assert not caplog.records


def test_the_given_quantisation_config_is_not_changed():
    given = Fp8Config(True, weight_block_size=[128, 128])
    hf = SimpleNamespace(model_type="qwen3_5_text")
    model = ModelConfig(model="m", hf_config=hf, hf_text_config=hf)
    with machine(Gpu(100), STAND_INS):
        made = VllmConfig(model_config=model, quant_config=given)
    assert given.use_deep_gemm is None and made.quant_config.use_deep_gemm is False


def test_the_decision_reaches_the_linear_method():
    with machine(Gpu(100), STAND_INS):
        method = QuantizationMethods(config().quant_config).linear_method(
            ["model.layers.0.mlp.down_proj"]
        )
    assert isinstance(method, Fp8LinearMethod) and method.config.use_deep_gemm is False
