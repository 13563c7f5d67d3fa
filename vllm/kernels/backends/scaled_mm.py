"""torch's FP8 GEMM (`torch._scaled_mm`) for scales per tensor and channel: cuBLASLt where one scale
serves each side, else a CUTLASS kernel, so that none of our own is needed."""

from typing import TYPE_CHECKING

from vllm.kernels.backends import channel_scales
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors

SPECS = (
    KernelSpec(
        backend="scaled_mm",
        family="linear",
        devices=frozenset({"sm_89", "sm_9x", "sm_10x", "sm_12x"}),
        formats=channel_scales.FORMATS,
        # Scales per row give bfloat16 only.
        dtypes=frozenset({"bf16"}),
        act=channel_scales.ACTS,
        n_align=16,
        k_align=16,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] and multiplies.

    One scale for all of the weight and one for all of x stay scalars; else both are spread, over
    the rows of the weight and the tokens. Sums are kept in float32, not in the fewer bits that the
    tensor cores of the H100 have (`use_fast_accum` is off).
    """
    from vllm._custom_ops import cutlass_scaled_mm

    weight, bias = tensors.weight, tensors.bias
    quantise = channel_scales.input_quantiser(tensors, winner)
    scales = tensors.row_scales()
    assert scales is not None
    scales = scales.reshape(1, -1)
    if bool((scales == scales[0, 0]).all()):
        scales = scales[:, :1]

    def apply(x: "Tensor") -> "Tensor":
        q, x_scale = quantise(x)
        return cutlass_scaled_mm(q, weight.t(), x_scale, scales, x.dtype, bias)

    return apply
