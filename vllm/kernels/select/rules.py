"""Exceptions to the default order for some models, each with its reason.

What was measured is data: see `tune_table.py`. Nothing here is a preference.
"""

from vllm.kernels.select.spec import Device

# Text models that lose 4 to 12 points of GSM8K when their FP8 weights are re-quantised to the
# UE8M0 scales that DeepGEMM needs on capability family 100 (0.74 against 0.78 to 0.79, B200, 1,319
# questions, 5-shot; published with the exclusion upstream).
DEEP_GEMM_BLACKWELL_EXCLUDED_MODEL_TYPES = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_E8M0_FAMILY = "sm_10x"


def deep_gemm_is_excluded(model_type: str, device: Device) -> bool:
    """Whether the model rule keeps DeepGEMM from this model on this chip.

    Family 100 alone: Hopper takes float32 scales and loses nothing; 12.x is another family.
    """
    listed = model_type in DEEP_GEMM_BLACKWELL_EXCLUDED_MODEL_TYPES
    return listed and device.family == _E8M0_FAMILY
