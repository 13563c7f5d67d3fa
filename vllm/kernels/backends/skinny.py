"""Our GEMMs for few tokens, limited by memory: of FP8 with block scales, whose activations it
quantises itself, or a scale for each row; and, in Triton, of half precision up to some size.
`skinny-w4a16`: of NVFP4 by activations as they are, in Triton; compared on an H100, not run on the
chips that it is for.

They serve at most 16 tokens, so they run as the first part of a split.
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, Problem
from vllm.kernels.select.reason import Reason
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from vllm.kernels.interface import LinearKernel, LinearTensors

# Tokens that it serves. Columns of a weight in half precision, of which a program keeps four rows
# in registers. Numbers of such a weight: where it has more, reading it takes cuBLAS so long that
# its last wave does not matter (estimated). As a part of a split measurements choose it; where only
# few tokens are asked for it comes first without any, and takes what was measured to be faster.
MAX_TOKENS, MAX_COLUMNS = 16, 1 << 13
MAX_SIZE, MAX_SIZE_UNMEASURED = 1 << 25, 1 << 19


def _is_not_large(problem: Problem) -> list[Reason]:
    assert isinstance(problem, LinearProblem)
    most = MAX_SIZE if problem.m_range[1] > MAX_TOKENS else MAX_SIZE_UNMEASURED
    is_fitting = problem.k <= MAX_COLUMNS and problem.n * problem.k <= most
    # Without the sizes of the problem: layers that are refused alike are shown together.
    return shared.shape_reasons(
        (not is_fitting, f"takes K up to {MAX_COLUMNS} and N * K up to {most}")
    )


_Spec = partial(
    KernelSpec,
    backend="skinny",
    family="linear",
    dtypes=shared.HALF,
    k_align=16,
    max_tokens=MAX_TOKENS,
)
_Native = partial(
    _Spec,
    devices=frozenset({"sm_90"}),
    libs=((NATIVE, ""),),
    native=("skinny_fp8_block_gemm",),
    native_archs=frozenset({"90", "90a"}),
)
SPECS = (
    _Native(**shared.FP8_BLOCKS),
    _Native(**shared.FP8_ROWS),
    _Spec(
        formats=shared.HALF,
        devices=shared.FROM_SM80,
        libs=(("triton", "3.2"),),
        compiles="triton",
        check=_is_not_large,
    ),
    # Where kernels that quantise activations take the weight as it is stored too: few tokens are
    # multiplied exactly, many by those.
    _Spec(
        backend="skinny-w4a16",
        formats=frozenset({"nvfp4"}),
        devices=frozenset({"sm_10x", "sm_12x"}),
        libs=(("triton", "3.2"),),
        compiles="triton",
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored. For one in FP8, x [M, K] that comes as floats is quantised
    inside the kernel, or before it where each row of the weight has its scale."""
    if problem.format in shared.HALF:
        from vllm.kernels.triton.skinny import product
        from vllm.utils.torch_utils import dtype_of

        weight, bias = tensors.weight.to(dtype_of(problem.dtype)), tensors.bias
        return lambda x: product(x, weight, bias)
    if problem.format == "nvfp4":
        return _nvfp4(tensors)
    from vllm.ops.fp8_quant import ScaleLayout
    from vllm.platforms import native

    library = native.load()
    if problem.format != "fp8-block":
        return shared.channel_kernel(tensors, winner, library.skinny_fp8_channel_gemm)
    gemm = library.skinny_fp8_block_gemm
    return shared.block_kernel(
        tensors,
        winner,
        ScaleLayout.ROW_MAJOR,
        lambda *operands: gemm(*operands, 0, 0),
        takes_floats=True,
    )


def _nvfp4(tensors: "LinearTensors") -> "LinearKernel":
    """Keeps one float32 for each row besides."""
    import torch

    from vllm.kernels.triton.nvfp4_skinny import nvfp4_product

    weight, scales, bias = tensors.weight, tensors.scales, tensors.bias
    assert scales is not None and tensors.global_scales is not None
    rows = torch.tensor(tensors.shard_rows, device=weight.device)
    factors = tensors.global_scales.float().repeat_interleave(rows)
    return lambda x: nvfp4_product(x, weight, scales, factors, bias)
