"""DeepGEMM: FP8 block GEMM, dense and grouped, compiled at run time by the library itself."""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.problem import ActScheme, LinearProblem, MoEProblem
from vllm.kernels.spec import Candidate, KernelSpec, Scales

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.activations import InputQuant
    from vllm.kernels.spec import Device
    from vllm.kernels.tensors import LinearKernel, LinearTensors, MoEKernel, MoETensors

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
SPECS = (
    LINEAR,
    # Rows are sorted and quantised by Triton kernels.
    _Spec(
        family="moe",
        libs=(("deep_gemm", ""), ("triton", "3.2")),
        layouts=frozenset({"standard", "batched"}),
    ),
)

_BLOCK = 128
# Most tokens for which each expert gets a block of its own, with room for all of them.
_MASKED_TOKENS = 256


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Lays the weight out once; each call quantises x [M, K] and runs one GEMM."""
    import torch

    from vllm.kernels.activations import QuantizedInput, QuantizingKernel
    from vllm.model_executor.layers.quantization.utils.block_fit import fitted_kernel
    from vllm.utils.deep_gemm import fp8_gemm_nt

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, bias = prepare(tensors, winner), tensors.bias

        def multiply(x: QuantizedInput) -> "Tensor":
            out = x.q.new_empty(x.shape[0], weight[0].shape[0], dtype=torch.bfloat16)
            if x.shape[0]:
                fp8_gemm_nt((x.q, x.scales), weight, out)
            return out if bias is None else out.add_(bias)

        return QuantizingKernel(_input_quant(winner), multiply)

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
    *experts, n, k = weight.shape
    num_groups = experts[0] if experts else None
    scales = transform_sf_into_required_layout(
        scales, n, k, (_BLOCK, _BLOCK), num_groups=num_groups, arch=arch
    )
    return weight, scales


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Lays the weights out once; each call sorts the pairs of token and expert, and runs two
    grouped GEMMs over their rows: padded to whole tiles, or for few tokens in a block for each
    expert, of which the library reads the rows that are there."""
    from vllm.kernels.triton import moe_rows
    from vllm.utils import deep_gemm as library
    from vllm.utils.math_utils import round_up

    if winner.fit is not None:
        from vllm.model_executor.layers.quantization.utils.block_fit import padded_experts

        tensors = padded_experts(tensors)
    num_experts = tensors.num_experts
    gate_up, down = (prepare(stack, winner) for stack in tensors.all_experts())

    def masked(x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        # Whole tiles: the library writes whole ones, over whatever comes after an expert's rows.
        size = round_up(x.shape[0], library.get_mk_alignment_for_contiguous_layout()[0])
        rows = moe_rows.sort(ids, num_experts, rows_per_expert=size)
        layout = moe_rows.Rows(num_experts * size, size, winner.scales)
        expected = -(-ids.numel() // num_experts)

        def multiply(q: "Tensor", scales: "Tensor", weight: "tuple[Tensor, Tensor]") -> "Tensor":
            out = x.new_empty(num_experts, size, weight[0].shape[1])
            a = (q.view(num_experts, size, -1), scales)
            library.fp8_m_grouped_gemm_nt_masked(a, weight, out, rows.ends[1:], expected)
            return out.view(num_experts * size, -1)

        between = multiply(*moe_rows.spread(x, rows.positions, layout), gate_up)
        out = multiply(*moe_rows.activate(between, rows.positions, layout), down)
        return moe_rows.combine(out, weights, rows.positions, num_experts)

    def contiguous(x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        tile = library.get_mk_alignment_for_contiguous_layout()[0]
        rows = moe_rows.sort(ids, num_experts, block_m=tile, is_aligned=True)
        layout = moe_rows.Rows(rows.num_blocks * tile, scales=winner.scales)

        def multiply(q: "Tensor", scales: "Tensor", weight: "tuple[Tensor, Tensor]") -> "Tensor":
            out = x.new_empty(layout.num_rows, weight[0].shape[1])
            library.m_grouped_fp8_gemm_nt_contiguous((q, scales), weight, out, rows.expert_of_row)
            return out

        between = multiply(*moe_rows.spread(x, rows.positions, layout), gate_up)
        out = multiply(*moe_rows.activate(between, rows.positions, layout), down)
        return moe_rows.combine(out, weights, rows.positions, num_experts)

    def apply(x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        if x.shape[0] == 0:
            return x.clone()
        return (masked if x.shape[0] <= _MASKED_TOKENS else contiguous)(x, weights, ids)

    return apply


def _input_quant(winner: Candidate) -> "InputQuant":
    """x [M, K] -> float8_e4m3fn [M, K] and scales of 1x128 groups, laid out for the chip."""
    from vllm._custom_ops import ScaleLayout
    from vllm.kernels.activations import InputQuant

    if winner.scales == Scales.UE8M0:
        return InputQuant(ScaleLayout.PACKED_UE8M0)
    return InputQuant(ScaleLayout.TMA_ALIGNED, winner.scales == Scales.FLOAT32_CEIL_UE8M0)
