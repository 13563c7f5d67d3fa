"""Block-scaled FP8 (E4M3): quantisation, products, and the weight layouts of DeepGEMM."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vllm import envs
from vllm.config.policy import KernelPreferences, make_policy
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearKernel, LinearTensors
from vllm.kernels.make_kernel import make_linear
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.selection import Selection
from vllm.machine import Device, Libs
from vllm.ops.fp8 import (
    block_scaled_mm,
    check_product,
    deepgemm_post_process_fp8_weight_block,
    requant_weight_ue8m0_inplace,
)
from vllm.ops.fp8_quant import (
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
)
from vllm.ops.gemm_ops import cutlass_block_scaled_mm as cutlass_scaled_mm
from vllm.platforms.probe import probe_device, probe_libs
from vllm.utils.fp8 import GroupShape
from vllm.utils.torch_utils import SHORT_NAMES

__all__ = [
    "W8A8BlockFp8LinearOp",
    "cutlass_scaled_mm",
    "deepgemm_post_process_fp8_weight_block",
    "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed_for_deepgemm",
    "requant_weight_ue8m0_inplace",
    "w8a8_triton_block_scaled_mm",
]


def w8a8_triton_block_scaled_mm(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """A [M, K] @ B [N, K].T of FP8 values with block scales, by the kernel of the Triton backend.

    As: float32 [M, K blocks]; Bs: float32 [N blocks, K blocks]. On a GPU: As in groups of 128
    columns, output_dtype bfloat16 or float16. CPU tensors are multiplied by torch.
    """
    if not A.is_cuda:
        return block_scaled_mm(A, B, As, Bs, block_size).to(output_dtype)
    check_product(A, B, As, Bs, block_size)
    from vllm.kernels.triton.linear import fp8_block_gemm

    y = A.new_empty(A.shape[0], B.shape[0], dtype=output_dtype)
    fp8_block_gemm(A.contiguous(), As.contiguous(), B, Bs.contiguous(), None, block_size, y)
    return y


class W8A8BlockFp8LinearOp:
    """x @ W.T for a block-scaled FP8 weight, by the kernel that serves such a layer of a model.

    use_deep_gemm: as Fp8Config.use_deep_gemm. device, libs: what the kernel is chosen for; None for
    this machine's. A weight is laid out once, at its first call.
    """

    def __init__(
        self,
        weight_group_shape: GroupShape,
        act_quant_group_shape: GroupShape,
        use_deep_gemm: bool | None = None,
        device: Device | None = None,
        libs: Libs | None = None,
    ):
        self.format = WeightFormat("fp8", "block", (weight_group_shape[0], weight_group_shape[1]))
        if tuple(act_quant_group_shape) != (1, 128):
            raise ValueError(
                f"act_quant_group_shape: given {tuple(act_quant_group_shape)}; accepted: (1, 128)"
            )
        device = device or probe_device()
        policy = make_policy(
            KernelPreferences(use_deep_gemm=use_deep_gemm), envs.kernel_variables()
        )
        self.selection = Selection(device, probe_libs() if libs is None else libs, policy)
        self._kernels: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def problem(self, weight: Tensor, dtype: torch.dtype, has_bias: bool) -> LinearProblem:
        acts = (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
        return LinearProblem(*weight.shape, self.format, acts, SHORT_NAMES[dtype], bias=has_bias)

    def apply(
        self, input: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """input [..., K] @ weight [N, K].T (+ bias [N]) -> [..., N] of input's dtype.

        weight_scale: float32 [N blocks, K blocks], or as deepgemm_post_process_fp8_weight_block
        returns it. NoKernelError where nothing can multiply them here.
        """
        kernel = self._kernels.get(weight)
        if kernel is None:
            kernel = self._kernels[weight] = self._make(input, weight, weight_scale, bias)
        x = input.reshape(-1, input.shape[-1])
        y: Tensor = kernel(x)
        return y.view(*input.shape[:-1], -1)

    def _make(
        self, input: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> LinearKernel:
        problem = self.problem(weight, input.dtype, bias is not None)
        decision = self.selection.choose("W8A8BlockFp8LinearOp", problem)
        wide_bias = None if bias is None else bias.float()
        tensors = LinearTensors(
            self.format, weight, (weight.shape[0],), weight_scale, bias=wide_bias
        )
        return make_linear(decision, tensors)
