"""What several backends declare, and FP8 products with scales per block and per row."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.architectures.decoder import CHUNKED as _CHUNKED
from vllm.architectures.decoder import GELU_TANH, RELU2, SWIGLUOAI
from vllm.architectures.decoder import SINKS as _SINKS
from vllm.architectures.decoder import SOFTCAP as _SOFTCAP
from vllm.formats.act_scheme import ActScheme
from vllm.formats.partial_blocks import Axis
from vllm.formats.scales import Scales
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import (
    DeltaRuleProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
    WeightProblem,
)
from vllm.kernels.select.reason import Reason, Why
from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors
    from vllm.ops.fp8_quant import ScaleLayout

BLOCK = 128

# ---------------------------------------------------------------- fields of `KernelSpec`

FLOATS = frozenset({"fp32", "bf16", "fp16"})
WEIGHTS = FLOATS | {
    *("fp8-block", "fp8-tensor", "fp8-channel", "mxfp8", "mxfp4", "nvfp4"),
    *("int4-group", "int4-channel", "int8-group", "int8-channel"),
}
CACHES = FLOATS | {"fp8"}
CHUNKED = frozenset({_CHUNKED})  # of attention
SINKS = frozenset({_SINKS})  # of attention
SOFTCAP = frozenset({_SOFTCAP})  # of attention
# Of kernels that compute the experts of gpt-oss too.
EXPERTS: dict[str, Any] = {
    "activation_functions": frozenset({"silu", SWIGLUOAI}),
    "takes_expert_bias": True,
}
# And those without a gate.
ALL_EXPERTS = EXPERTS | {"activation_functions": EXPERTS["activation_functions"] | {RELU2}}
# And those of Gemma, by operations that are not of one kernel.
ANY_EXPERTS = ALL_EXPERTS | {
    "activation_functions": ALL_EXPERTS["activation_functions"] | {GELU_TANH}
}
STATES = frozenset({"fp32"})  # of recurrences
HALF = frozenset({"bf16", "fp16"})
FROM_SM80 = frozenset({"sm_8x", "sm_9x", "sm_10x", "sm_11x", "sm_12x"})
# Code for 8.0 runs on every later chip of its major version; the others need their own.
NATIVE_FROM_SM80 = frozenset(
    {"80", "86", "87", "89", "90", "90a", "100", "100a", "100f", "103a", "110", "110a", "110f"}
    | {"120", "120a", "120f", "121a"}
)
FP8_BLOCKS: dict[str, Any] = {
    "formats": frozenset({"fp8-block"}),
    "act": frozenset({ActScheme.DYNAMIC_GROUP128}),
    "blocks": frozenset({(BLOCK, BLOCK)}),
    "scales": (("*", Scales.FLOAT32),),
}
FP8_ROWS: dict[str, Any] = {
    "formats": frozenset({"fp8-tensor", "fp8-channel"}),
    "act": frozenset({ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.STATIC_TENSOR}),
}
NVFP4: dict[str, Any] = {
    "formats": frozenset({"nvfp4"}),
    "act": frozenset({ActScheme.NVFP4_GROUP16}),
}


def shape_reasons(*checks: tuple[bool, str]) -> list[Reason]:
    """Of checks (is it refused, why) those that refuse."""
    return [Reason(Why.SHAPE, text) for is_refused, text in checks if is_refused]


def expert_activation(problem: MoEProblem, ops: Any) -> "Callable[[Tensor], Tensor]":
    """[T, 2 * intermediate] -> [T, intermediate], gate before up, or of experts without a gate
    [T, intermediate] -> the same; by an ops module (vllm.ops)."""
    if problem.activation == RELU2:
        squared: Callable[[Tensor], Tensor] = ops.relu2
        return squared
    if problem.activation == GELU_TANH:
        return partial(ops.gelu_and_mul, approximate="tanh")
    if problem.activation == SWIGLUOAI:
        return partial(ops.swigluoai_and_mul, limit=problem.swiglu_limit)
    activate: Callable[[Tensor], Tensor] = ops.silu_and_mul
    return activate


def state_heads(problem: Problem) -> list[Reason]:
    if isinstance(problem, Mamba2Problem):
        most = max(problem.state_size, problem.head_dim)
    else:
        assert isinstance(problem, DeltaRuleProblem)
        most = max(problem.key_dim, problem.value_dim)
    return shape_reasons((most > 256, f"heads of {most} are larger than 256"))


def nvfp4_parts(align: int, problem: Problem) -> list[Reason]:
    """Merged parts have global scales of their own, and so may become products of their own."""
    assert isinstance(problem, LinearProblem)
    cut = next((size for size in problem.parts if size % align), 0)
    return shape_reasons((cut > 0, f"part of {cut} rows is not a multiple of {align}"))


def cut_columns(problem: Problem) -> Axis:
    """The columns of a weight that ranks share: those of experts' down."""
    assert isinstance(problem, WeightProblem)
    if isinstance(problem, LinearProblem):
        return Axis((problem.k,), problem.cut_k)
    return Axis((problem.intermediate,), problem.cut)


# ---------------------------------------------------------------- FP8


def block_kernel(
    tensors: "LinearTensors",
    winner: Candidate,
    layout: "ScaleLayout",
    gemm: Callable[..., object],
    takes_floats: bool = False,
) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] and multiplies.

    gemm: of x in E4M3, its scales in `layout`, weight, scales, bias, out [M, N]. takes_floats: also
    of x as floats, with None for its scales.
    """
    from vllm.kernels.activations import InputQuant, QuantizedInput, QuantizingKernel
    from vllm.ops.block_fit import fitted_kernel

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, scales, bias = tensors.weight, tensors.scales, tensors.bias

        def multiply(x: QuantizedInput) -> "Tensor":
            out = x.q.new_empty(x.shape[0], weight.shape[0], dtype=x.dtype)
            gemm(x.q, x.scales, weight, scales, bias, out)
            return out

        def of_floats(x: "Tensor") -> "Tensor":
            out = x.new_empty(x.shape[0], weight.shape[0])
            gemm(x, None, weight, scales, bias, out)
            return out

        return QuantizingKernel(InputQuant(layout), multiply, of_floats if takes_floats else None)

    return fitted_kernel(tensors, winner.fit, make)


def input_quantiser(
    tensors: "LinearTensors", winner: Candidate
) -> "Callable[[Tensor], tuple[Tensor, Tensor]]":
    """x [M, K] -> float8_e4m3fn [M, K] and its scales: one, or [M, 1]."""
    from vllm.ops.quant_fp8 import QuantFP8
    from vllm.utils.fp8 import GroupShape

    if winner.act is ActScheme.STATIC_TENSOR:
        return partial(QuantFP8(True, GroupShape.PER_TENSOR), scale=tensors.input_scale)
    is_per_token = winner.act is ActScheme.DYNAMIC_TOKEN
    return QuantFP8(False, GroupShape.PER_TOKEN if is_per_token else GroupShape.PER_TENSOR)


def channel_kernel(
    tensors: "LinearTensors", winner: Candidate, gemm: Callable[..., object]
) -> "LinearKernel":
    """A scale for each row, by a GEMM of blocks: the scale of every block is one, and columns of
    the product are multiplied by those of the rows at the end.

    gemm: of x in E4M3, scales [M, ceil(K / 128)] of any strides, weight [N, K], scales
    [ceil(N / 128), ceil(K / 128)], column scales [N], bias, out [M, N].
    """
    import torch

    weight, bias, row_scales = tensors.weight, tensors.bias, tensors.row_scales()
    assert row_scales is not None
    column_scales = row_scales.reshape(-1).contiguous()
    quantise = input_quantiser(tensors, winner)
    num_rows, num_blocks = weight.shape[0], cdiv(weight.shape[1], BLOCK)
    ones = torch.ones(cdiv(num_rows, BLOCK), num_blocks, device=weight.device)

    def apply(x: "Tensor") -> "Tensor":
        q, scales = quantise(x)
        scales = scales.reshape(-1, 1).expand(len(x), num_blocks)
        out = x.new_empty(len(x), num_rows)
        gemm(q, scales, weight, ones, column_scales, bias, out)
        return out

    return apply
