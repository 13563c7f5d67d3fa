"""FlashInfer's dense products on Blackwell: FP8 with block scales and NVFP4, by its kernels in
CUTLASS and by TensorRT-LLM's binaries.

Written for the public functions of version 0.6.13; not run on hardware. What they are called with
is made by functions of its own, which are read back on the CPU (tests/kernels/
test_flashinfer_calls.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.kernels.activations import InputQuant, QuantizedInput, QuantizingKernel
from vllm.kernels.interface import LinearKernel, LinearTensors
from vllm.ops.fp8_quant import ScaleLayout
from vllm.ops.nvfp4 import swizzle_scales
from vllm.utils.flashinfer import flashinfer_fp8_blockscale_gemm

# `gemm_fp8_nt_groupwise` asks for whole multiples of so many rows.
_ROWS = 4
# Rows whose order TensorRT-LLM's NVFP4 kernels change, to suit how they write tiles out.
_SHUFFLED_TILE = 128


# ---------------------------------------------------------------- FP8 with block scales


def block_kernel(tensors: LinearTensors, path: str) -> LinearKernel:
    """path: deepgemm, which quantises x itself, cutlass or trtllm.

    On 12.x, 0.6.13 raises nothing where its kernel refuses a size, and leaves the output as it was.
    N and K are whole blocks here, and M is whole fours: what it documents that it takes.
    """
    gemm: Any = getattr(import_module("flashinfer.gemm"), "gemm_fp8_nt_groupwise", None)
    layout = ScaleLayout.ROW_MAJOR if path == "cutlass" else ScaleLayout.COLUMN_MAJOR
    weight, scales, bias = tensors.weight, tensors.scales, tensors.bias
    assert scales is not None

    def apply(x: Tensor) -> Tensor:
        out = flashinfer_fp8_blockscale_gemm(x, weight, None, scales, x.dtype)
        return out if bias is None else out.add_(bias)

    def multiply(x: QuantizedInput) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return x.q.new_empty(0, weight.shape[0], dtype=x.dtype)
        out: Tensor = gemm(**block_arguments(x, tensors, path))[:num_tokens]
        return out if bias is None else out.add_(bias)

    return apply if path == "deepgemm" else QuantizingKernel(InputQuant(layout), multiply)


def block_arguments(x: QuantizedInput, tensors: LinearTensors, path: str) -> dict[str, Any]:
    """cutlass: scales by rows (`K`), of tokens float32 [M, K / 128] and of the weight [N / 128,
    K / 128], as they are stored. trtllm: of tokens [M, K / 128] with stride 1 along M; those of the
    weight as [K / 128, N / 128] with stride 1 along K, which is how they are stored.

    M is filled up with rows of zeros.
    """
    q, scales, grid = x.q, x.scales, tensors.scales
    assert grid is not None
    if missing := -x.shape[0] % _ROWS:
        q = pad(q.view(torch.uint8), (0, 0, 0, missing)).view(q.dtype)
        scales = pad(scales, (0, 0, 0, missing))
    is_by_rows = path == "cutlass"
    return {
        "a": q,
        "b": tensors.weight,
        "a_scale": scales.contiguous() if is_by_rows else scales.T.contiguous().T,
        "b_scale": grid if is_by_rows else grid.T,
        "scale_major_mode": "K" if is_by_rows else None,
        "scale_granularity_mnk": (1, 128, 128),
        "out_dtype": x.dtype,
        "backend": path,
    }


# ---------------------------------------------------------------- NVFP4


@dataclass(frozen=True, slots=True)
class Nvfp4Part:
    """Rows of a weight that share a global scale. weight: codes uint8 [N, K / 2]; scales: uint8
    [N up to 128s, K / 16 up to 4s], swizzled; both in the order of rows that the path wants.
    alpha: float32 [1], the global scale times that of the input."""

    weight: Tensor
    scales: Tensor
    alpha: Tensor
    path: str

    def arguments(self, q: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """q: codes uint8 [M, K / 2]; scales: swizzled as those of the weight."""
        return {
            "a": q,
            "b": self.weight.T,
            "a_descale": scales,
            "b_descale": self.scales.T,
            "alpha": self.alpha,
            "out_dtype": dtype,
            "block_size": 16,
            "use_8x4_sf_layout": False,
            "backend": self.path,
            "use_nvfp4": True,
        }


def nvfp4_kernel(tensors: LinearTensors, path: str) -> LinearKernel:
    """One product for each run of merged parts that share a global scale."""
    library: Any = import_module("flashinfer")
    parts = nvfp4_parts(tensors, path, library.shuffle_matrix_a if path == "trtllm" else None)
    num_columns, bias = tensors.weight.shape[0], tensors.bias
    assert tensors.input_scale is not None
    inverse = tensors.input_scale.float().reciprocal().reshape(1)

    def apply(x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, num_columns)
        q, scales = library.fp4_quantize(**quantise_arguments(x, inverse))
        outs = [library.mm_fp4(**part.arguments(q, scales, x.dtype)) for part in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        return out if bias is None else out.add_(bias)

    return apply


def quantise_arguments(x: Tensor, inverse: Tensor) -> dict[str, Any]:
    """inverse: float32 [1], what x is multiplied by before its groups are scaled."""
    return {
        "input": x.contiguous(),
        "global_scale": inverse,
        "sf_vec_size": 16,
        "sf_use_ue8m0": False,
        "is_sf_swizzled_layout": True,
    }


def nvfp4_parts(
    tensors: LinearTensors, path: str, shuffle: "Callable[[Tensor, int], Tensor] | None"
) -> list[Nvfp4Part]:
    """shuffle: of a matrix and the rows of a tile, its rows in another order; None to leave them.
    Scales belong to rows, and go with them."""
    assert tensors.scales is not None
    parts = []
    for rows, alpha in tensors.products():
        weight, scales = tensors.weight[rows], tensors.scales[rows].view(torch.uint8)
        if shuffle is not None:
            weight, scales = shuffle(weight, _SHUFFLED_TILE), shuffle(scales, _SHUFFLED_TILE)
        parts.append(Nvfp4Part(weight, swizzle_scales(scales), alpha, path))
    return parts
