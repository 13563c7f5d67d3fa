"""The arithmetic of quantised kernels in plain torch, on any device: to see what a chip's numbers
do, not to be fast.

A weight is held as the chip would see it, in float32; activations are rounded as the chip would
round them, and multiplied in float32. What is rounded, and how, is what the selector says of the
winner. Two backends can be asked for by name, whatever the chip: `emulation` quantises activations
per token and 128 columns with float32 scales, as Hopper's kernels do; `emulation-ue8m0` computes
what DeepGEMM does on capability family 100: weights re-quantised to power-of-two scales at load,
activations quantised with such scales too. Every other backend is emulated as one chip has it:
`emulate:BACKEND@CHIP` (vllm/config/emulate.py).
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.kernels.backends.shared import expert_activation
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.spec import KernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors

    Rounding = Callable[[Tensor], Tensor]
    """x [M, K] -> the values that a kernel multiplies in its place, float32."""

_Spec = partial(
    KernelSpec,
    family="linear",
    devices=frozenset({"cpu", "sm_7x", "sm_8x", "sm_9x", "sm_10x", "sm_11x", "sm_12x"}),
    formats=frozenset({"fp8-block"}),
    dtypes=frozenset({"fp32", "bf16", "fp16"}),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    is_emulation=True,
)

SPECS = (
    _Spec(backend="emulation", scales=(("*", Scales.FLOAT32),)),
    _Spec(backend="emulation-ue8m0", scales=(("*", Scales.UE8M0),)),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """4 bytes for an element of the weight; inputs and outputs are rounded to the problem's type,
    which is that of the chip's kernels."""
    from vllm.ops.block_fit import fitted_kernel
    from vllm.utils.torch_utils import dtype_of

    make = partial(_kernel, winner=winner, dtype=dtype_of(problem.dtype))
    # Only a shard that begins inside a block needs its first block whole.
    return fitted_kernel(tensors, winner.fit if tensors.is_cut else None, make)


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Both products of every expert as `linear` computes them, for its own tokens alone; what is
    between them is rounded to the problem's type."""
    import torch

    from vllm.ops import torch_ops
    from vllm.ops.block_fit import padded_experts
    from vllm.utils.torch_utils import dtype_of

    dtype = dtype_of(problem.dtype)
    is_cut = tensors.row_offset or tensors.column_offset
    tensors = padded_experts(tensors) if is_cut else tensors
    pairs = (tensors.expert(index) for index in range(tensors.num_experts))
    experts = [tuple(_kernel(part, winner, dtype) for part in pair) for pair in pairs]

    activate = expert_activation(problem, torch_ops)

    def apply(x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        total = torch.zeros_like(x, dtype=torch.float32)
        for index, (gate_up, down) in enumerate(experts):
            rows, places = torch.where(ids == index)
            if rows.numel():
                inner = activate(gate_up(x[rows].to(dtype)))
                total.index_add_(0, rows, down(inner).float() * weights[rows, places, None])
        return total.to(x.dtype)

    return apply


def _kernel(tensors: "LinearTensors", winner: Candidate, dtype: "torch.dtype") -> "LinearKernel":
    from vllm.ops import torch_ops
    from vllm.ops.packed_weights import pack_with
    from vllm.ops.scale_rounding import requantised

    rounded = rounding(winner, tensors)
    if winner.rescales:
        tensors = requantised(tensors, winner.scales, dtype)
    stored = pack_with(torch_ops.pack_linear, tensors)
    packed = torch_ops.pack_linear(stored.dequantize(), bias=tensors.bias)

    def apply(x: "Tensor") -> "Tensor":
        return torch_ops.linear(rounded(x.to(dtype)), packed).to(dtype).to(x.dtype)

    return apply


def rounding(winner: Candidate, tensors: "LinearTensors") -> "Rounding":
    """How the winner quantises activations, and what its products see of them."""
    from vllm.ops import int8, nvfp4
    from vllm.ops.fp8 import quantise_groups
    from vllm.utils import fp8

    def per_tensor(x: "Tensor", scale: "Tensor | None" = None) -> "Tensor":
        if scale is None:
            scale = fp8.fp8_scales(x.float().abs().max().clamp(min=fp8.MIN_AMAX))
        return fp8.round_to_fp8(x, scale).float() * scale

    def per_group(x: "Tensor", group: int, use_ue8m0: bool = winner.rescales) -> "Tensor":
        q, scales = quantise_groups(x, group, use_ue8m0=use_ue8m0)
        return fp8.dequantise_blocks(q, scales, (1, group))

    match winner.act:
        case ActScheme.DYNAMIC_GROUP128:
            return lambda x: per_group(x, 128)
        case ActScheme.MXFP8_GROUP32:
            return lambda x: per_group(x, 32, True)
        case ActScheme.DYNAMIC_TOKEN:
            return lambda x: per_group(x, x.shape[1])
        case ActScheme.DYNAMIC_TENSOR:
            return per_tensor
        case ActScheme.STATIC_TENSOR:
            assert tensors.input_scale is not None
            return partial(per_tensor, scale=tensors.input_scale)
        case ActScheme.DYNAMIC_TOKEN_INT8 | ActScheme.STATIC_TENSOR_INT8:
            return lambda x: int8.dequantise(*int8.quantise(x, tensors.input_scale))
        case ActScheme.NVFP4_GROUP16:
            assert tensors.input_scale is not None
            divisor = tensors.input_scale.float().reciprocal().reshape(1)
            return lambda x: nvfp4.nvfp4_dequantize(*nvfp4.nvfp4_quantize(x, divisor), divisor)
        case _:
            return lambda x: x.float()
