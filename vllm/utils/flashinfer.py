"""FlashInfer's FP8 block GEMM for Hopper, which quantises bf16 activations itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.kernels.jit.flashinfer import watch_flashinfer
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
    if not current_platform.is_device_capability(90) or not has_flashinfer():
        return False
    return _gemm_module() is not None


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
    RuntimeError where `has_flashinfer_fp8_blockscale_gemm` is false. The first call compiles.
    """
    if not has_flashinfer_fp8_blockscale_gemm():
        raise RuntimeError(
            "FlashInfer's FP8 block GEMM needs a GPU of capability 9.0 and a working "
            "flashinfer-python >= 0.6: install it, or let the selector choose another kernel"
        )
    watch_flashinfer()
    kernel = _gemm_module().fp8_blockscale_gemm_sm90
    result: Tensor = kernel(input, weight, input_scale, weight_scale, out_dtype=out_dtype)
    return result


def _gemm_module() -> Any:
    """flashinfer.gemm; None in a version without this kernel."""
    try:
        module = import_module("flashinfer.gemm")
    except ImportError:
        return None
    return module if hasattr(module, "fp8_blockscale_gemm_sm90") else None
