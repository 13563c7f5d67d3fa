"""W8A8 arithmetic in plain torch, on any device: to see what a chip's numbers do, not to be fast.

`emulation` quantises activations per token and 128 columns with float32 scales, as Hopper's
kernels do. `emulation-ue8m0` computes what DeepGEMM does on capability family 100: weights
re-quantised to power-of-two scales at load, activations quantised with such scales too.
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.problem import ActScheme, LinearProblem
from vllm.kernels.spec import Candidate, KernelSpec, Scales

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors

_GROUP = 128  # columns of an activation that share one scale
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
    """Holds the weight as the chip would see it, dequantised: float32, 4 bytes an element.

    Activations are quantised and dequantised at every call; the product is a float32 matmul.
    """
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.ops import torch_ops

    has_power_of_two_scales = winner.scales != Scales.FLOAT32
    if has_power_of_two_scales:
        tensors = fp8_utils.requantised_ue8m0(tensors)
    stored = torch_ops.pack_linear(tensors.weight, tensors.row_scales(), tensors.block_k)
    packed = torch_ops.pack_linear(stored.dequantize(), bias=tensors.bias)

    def apply(x: "Tensor") -> "Tensor":
        q, scales = fp8_utils.per_token_group_quant_fp8(
            x, _GROUP, use_ue8m0=has_power_of_two_scales
        )
        rounded = fp8_utils.dequantise_blocks(q, scales, (1, _GROUP))
        return torch_ops.linear(rounded, packed).to(x.dtype)

    return apply
