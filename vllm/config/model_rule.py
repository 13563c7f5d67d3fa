"""The model rule: DeepGEMM is auto-disabled for models that its UE8M0 scales cost accuracy."""

import copy

from vllm import envs
from vllm.formats.readers.base import QuantizationConfig
from vllm.machine import Device
from vllm.utils.deep_gemm import current_device, should_auto_disable_deep_gemm

REQUANT = ("model-rule", "exact-only", "allow")
"""When weights may be re-quantised to UE8M0 scales: not those of models that are known to lose
accuracy, only those that it does not round, or always."""

FALLBACK_MESSAGE = (
    "Auto-disabled DeepGemm for model_type=%s on Blackwell. DeepGemm E8M0 scale format causes "
    "accuracy degradation for this architecture. Falling back to %s. To disable DeepGemm globally, "
    "set VLLM_USE_DEEP_GEMM=0."
)
"""Of the model's type and what serves instead (`config/selection.py` finds that out)."""


def model_rule(model_type: str, device: Device) -> str:
    """Why this model is not served by DeepGEMM on this chip; "" where it may be."""
    if not should_auto_disable_deep_gemm(model_type, device):
        return ""
    return f"model rule: {model_type} loses accuracy with DeepGEMM's E8M0 scales on {device.family}"


def with_model_rule(
    quant: QuantizationConfig | None, model_type: str, requant: str = REQUANT[0]
) -> QuantizationConfig | None:
    """An undecided `use_deep_gemm` becomes False on this chip for a model that loses accuracy.

    A variable that is set outranks the rule, and scales that are powers of two already lose
    nothing.
    """
    if quant is None or not quant.can_use_deep_gemm or quant.use_deep_gemm is not None:
        return quant
    if requant != REQUANT[0] or quant.exact_scales or envs.is_set("VLLM_USE_DEEP_GEMM"):
        return quant
    if not (rule := model_rule(model_type, current_device())):
        return quant
    decided = copy.copy(quant)
    decided.use_deep_gemm, decided.model_rule = False, rule
    return decided
