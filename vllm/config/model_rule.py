"""The model rule: DeepGEMM is auto-disabled for models that its UE8M0 scales cost accuracy."""

import copy

from vllm import envs
from vllm.formats.readers.base import QuantizationConfig
from vllm.logger import get_logger
from vllm.machine import Device
from vllm.utils.deep_gemm import (
    current_device,
    is_deep_gemm_supported,
    should_auto_disable_deep_gemm,
)

logger = get_logger(__name__)


def model_rule(model_type: str, device: Device) -> str:
    """Why this model is not served by DeepGEMM on this chip; "" where it may be."""
    if not should_auto_disable_deep_gemm(model_type, device):
        return ""
    return f"model rule: {model_type} loses accuracy with DeepGEMM's E8M0 scales on {device.family}"


def with_model_rule(quant: QuantizationConfig | None, model_type: str) -> QuantizationConfig | None:
    """An undecided `use_deep_gemm` becomes False on this chip for a model that loses accuracy.

    A variable that is set outranks the rule. The message is for those who would have run
    DeepGEMM; elsewhere nothing changes for anyone.
    """
    if quant is None or not quant.can_use_deep_gemm or quant.use_deep_gemm is not None:
        return quant
    if envs.is_set("VLLM_USE_DEEP_GEMM"):
        return quant
    if not (rule := model_rule(model_type, current_device())):
        return quant
    if is_deep_gemm_supported():
        logger.info(
            "Auto-disabled DeepGemm for model_type=%s on Blackwell. DeepGemm E8M0 scale format "
            "causes accuracy degradation for this architecture. Falling back to CUTLASS. "
            "To disable DeepGemm globally, set VLLM_USE_DEEP_GEMM=0.",
            model_type,
        )
    decided = copy.copy(quant)
    decided.use_deep_gemm, decided.model_rule = False, rule
    return decided
