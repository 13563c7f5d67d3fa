"""Exceptions to the default order, each with its reason: about models, and what was measured.

A measured entry names the committed result that says so. Nothing here is a preference.
"""

from vllm.kernels.problem import LinearProblem, Problem
from vllm.kernels.spec import Device, Measured

# Text models that lose 4 to 12 points of GSM8K when their FP8 weights are re-quantised to the
# UE8M0 scales that DeepGEMM needs on capability family 100 (0.74 against 0.78 to 0.79, B200, 1,319
# questions, 5-shot; published with the exclusion upstream).
DEEP_GEMM_BLACKWELL_EXCLUDED_MODEL_TYPES = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_E8M0_FAMILY = "sm_10x"

# FP8 block GEMMs on the H100 for which the skinny kernel won at up to 16 tokens, by (N, K).
_SKINNY_EVIDENCE = "benchmarks/results/h100/fp8_block_gemm.json"
_SKINNY_SIZES = frozenset(
    {(4096, 4096), (6144, 4096), (7168, 4096), (24576, 4096), (4096, 12288), (7168, 16384)}
)
_SKINNY_SPLITS = tuple(
    Measured(((8, "skinny"), (None, other)), _SKINNY_EVIDENCE) for other in ("deep_gemm", "cutlass")
)


def deep_gemm_is_excluded(model_type: str, device: Device) -> bool:
    """Whether the model rule keeps DeepGEMM from this model on this chip.

    Family 100 alone: Hopper takes float32 scales and loses nothing; 12.x is another family.
    """
    listed = model_type in DEEP_GEMM_BLACKWELL_EXCLUDED_MODEL_TYPES
    return listed and device.family == _E8M0_FAMILY


def measured(device: Device, problem: Problem) -> tuple[Measured, ...]:
    """What measured fastest for `problem` on this chip, best first; () where nobody measured."""
    if device.arch != "sm_90" or not isinstance(problem, LinearProblem):
        return ()
    is_measured = problem.format == "fp8-block" and (problem.n, problem.k) in _SKINNY_SIZES
    return _SKINNY_SPLITS if is_measured else ()
