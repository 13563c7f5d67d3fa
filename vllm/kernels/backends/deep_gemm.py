"""DeepGEMM: FP8 block GEMM, dense and grouped, compiled at run time by the library itself."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.problem import ActScheme, LinearProblem
from vllm.kernels.spec import Candidate, KernelSpec, Scales

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.spec import Device
    from vllm.kernels.tensors import LinearKernel, LinearTensors

_Spec = partial(
    KernelSpec,
    backend="deep_gemm",
    # Every version has kernels for 9.0 and 10.x; those for 12.x only where the package says so.
    devices=frozenset({"sm_90", "sm_10x", "sm_12x"}),
    carries=(("sm_12x", "deep_gemm", "sm120"),),
    libs=(("deep_gemm", ""),),
    formats=frozenset({"fp8-block"}),
    blocks=frozenset({(128, 128)}),
    scales=(("sm_9x", Scales.FLOAT32), ("sm_10x", Scales.UE8M0), ("sm_12x", Scales.UE8M0)),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    dtypes=frozenset({"bf16"}),
    k_align=128,
)

LINEAR = _Spec(family="linear", n_align=64)
SPECS = (LINEAR, _Spec(family="moe", layouts=frozenset({"standard", "batched"})))

_BLOCK = 128


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Lays the weight out once; each call quantises x [M, K] and runs one GEMM."""
    import torch

    from vllm.model_executor.layers.quantization.utils.block_fit import fitted_kernel
    from vllm.utils.deep_gemm import fp8_gemm_nt

    # A shard that begins inside a block would have to say where; no loader makes one yet.
    assert winner.fit is None or problem.cut_n == problem.cut_k == 1
    quantize = _quantizer(winner)

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, bias = prepare(tensors, winner), tensors.bias

        def apply(x: "Tensor") -> "Tensor":
            out = x.new_empty(x.shape[0], weight[0].shape[0], dtype=torch.bfloat16)
            if x.shape[0]:
                fp8_gemm_nt(quantize(x), weight, out)
            return out if bias is None else out.add_(bias)

        return apply

    return fitted_kernel(tensors, winner.fit, make)


def prepare(
    tensors: "LinearTensors", winner: Candidate, arch: "Device | None" = None
) -> "tuple[Tensor, Tensor]":
    """The weight and its scales as `fp8_gemm_nt` reads them; `tensors` are never written to.

    arch: the chip to lay out for, None for the current one.
    """
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requantised_ue8m0
    from vllm.utils.deep_gemm import transform_sf_into_required_layout

    if winner.is_lossy:
        tensors = requantised_ue8m0(tensors)
    weight, scales = tensors.weight, tensors.scales
    assert scales is not None
    n, k = weight.shape
    scales = transform_sf_into_required_layout(scales, n, k, (_BLOCK, _BLOCK), arch=arch)
    return weight, scales


def _quantizer(winner: Candidate) -> "Callable[[Tensor], tuple[Tensor, Tensor]]":
    """x [M, K] -> float8_e4m3fn [M, K] and scales of 1x128 groups, laid out for the chip."""
    from vllm._custom_ops import ScaleLayout, per_token_group_fp8_quant

    if winner.scales == Scales.UE8M0:
        return partial(per_token_group_fp8_quant, layout=ScaleLayout.PACKED_UE8M0)
    return partial(
        per_token_group_fp8_quant,
        layout=ScaleLayout.TMA_ALIGNED,
        use_ue8m0=winner.scales == Scales.FLOAT32_CEIL_UE8M0,
    )
