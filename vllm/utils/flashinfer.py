"""FlashInfer's FP8 block GEMM for Hopper, which quantises bf16 activations itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.utils.import_utils import has_flashinfer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def has_flashinfer_fp8_blockscale_gemm() -> bool:
    """Whether this process has a 9.0 GPU and a FlashInfer that works and holds the kernel."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return False  # torch is absent or hidden
    return current_platform.is_device_capability(90) and has_flashinfer() and _gemm() is not None


def flashinfer_fp8_blockscale_gemm(
    input: "Tensor",
    weight: "Tensor",
    input_scale: "Tensor | None",
    weight_scale: "Tensor",
    out_dtype: "torch.dtype",
) -> "Tensor":
    """input [M, K] @ weight [N, K].T -> [M, N] in `out_dtype`.

    input: bf16, which the kernel quantises per token and 128 columns, and input_scale None; or
    float8_e4m3fn with its scales. weight: float8_e4m3fn; weight_scale: float32 of 128x128 blocks.
    RuntimeError without a FlashInfer that has it. The first call compiles.
    """
    gemm = _gemm()
    if gemm is None:
        raise RuntimeError(
            "FlashInfer's FP8 block GEMM needs a GPU of capability 9.0 and a working "
            "flashinfer-python >= 0.6: install it, or let the selector choose another kernel"
        )
    out: Tensor = gemm(input, weight, input_scale, weight_scale, out_dtype=out_dtype)
    return out


def _gemm() -> Any:
    """FlashInfer's function; None in a version without it."""
    try:
        return getattr(import_module("flashinfer.gemm"), "fp8_blockscale_gemm_sm90", None)
    except ImportError:
        return None
