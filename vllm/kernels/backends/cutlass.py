"""Our own CUTLASS kernels: FP8 block and NVFP4 GEMM, dense and grouped; on Hopper FP8 with a scale
for each row too."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE
from vllm.utils.dataclasses import dataclass

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors
    from vllm.kernels.triton.moe_rows import ExpertRows

_SM90, _SM100, _SM120 = {"90a"}, {"100a", "100f", "103a"}, {"120a", "120f", "121a"}
_Spec = partial(
    KernelSpec,
    backend="cutlass",
    dtypes=shared.HALF,
    libs=((NATIVE, ""),),
    devices=frozenset({"sm_90", "sm_10x", "sm_12x"}),
    native_archs=frozenset(_SM90 | _SM100 | _SM120),
    n_align=16,
    k_align=16,
)
_Nvfp4 = partial(
    _Spec,
    native=("sm100_nvfp4_gemm", "sm120_nvfp4_gemm"),
    devices=frozenset({"sm_10x", "sm_12x"}),
    native_archs=frozenset(_SM100 | _SM120),
    n_align=32,
    k_align=32,
    **shared.NVFP4,
)
SPECS = (
    _Spec(
        family="linear",
        native=("sm90_fp8_block_gemm", "sm100_fp8_block_gemm", "sm120_fp8_block_gemm"),
        **shared.FP8_BLOCKS,
    ),
    _Spec(
        family="linear",
        native=("sm90_fp8_block_gemm",),
        devices=frozenset({"sm_90"}),
        native_archs=frozenset(_SM90),
        **shared.FP8_ROWS,
    ),
    _Nvfp4(family="linear", check=partial(shared.nvfp4_parts, 32)),
    _Spec(
        family="moe",
        native=("sm90_fp8_block_gemm", "sm100_fp8_grouped_gemm", "sm120_fp8_grouped_gemm"),
        dtypes=frozenset({"bf16"}),
        **shared.FP8_BLOCKS,
    ),
    _Nvfp4(
        family="moe",
        native=("sm100_nvfp4_grouped_gemm", "sm120_nvfp4_grouped_gemm"),
        dtypes=frozenset({"bf16"}),
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes an FP8 weight as it is stored, or swizzles the scales of an NVFP4 one; each call
    quantises x [M, K] and multiplies."""
    if problem.format == "nvfp4":
        return _nvfp4_linear(tensors)
    if problem.format != "fp8-block":
        from vllm.platforms import native

        return shared.channel_kernel(tensors, winner, native.load().sm90_fp8_channel_gemm)
    from vllm.ops.fp8_quant import ScaleLayout
    from vllm.ops.gemm_ops import cutlass_fp8_block_gemm

    return shared.block_kernel(tensors, winner, ScaleLayout.TMA_ALIGNED, cutlass_fp8_block_gemm)


def _nvfp4_linear(tensors: "LinearTensors") -> "LinearKernel":
    from vllm._custom_ops import scaled_fp4_quant
    from vllm.ops.gemm_ops import cutlass_nvfp4_gemm
    from vllm.ops.nvfp4 import swizzle_scales

    weight, bias = tensors.weight, tensors.bias
    assert tensors.scales is not None and tensors.input_scale is not None
    inverse = tensors.input_scale.reciprocal().reshape(1)
    products = []
    for rows, alpha in tensors.products():
        part_bias = None if bias is None else bias[rows]
        scales = swizzle_scales(tensors.scales[rows])
        products.append((rows, weight[rows], scales, alpha, part_bias))

    def apply(x: "Tensor") -> "Tensor":
        q, scales = scaled_fp4_quant(x, inverse)
        out = x.new_empty(x.shape[0], weight.shape[0])
        for rows, *operands in products:
            cutlass_nvfp4_gemm(q, scales, *operands, out[:, rows])
        return out

    return apply


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Takes FP8 block weights as they are stored, or swizzles the scales of NVFP4 ones; each call
    sorts rows by expert, and quantises and multiplies them twice. Nothing waits for the device, so
    a CUDA graph can capture it."""
    if winner.fit is not None:
        from vllm.ops.block_fit import padded_experts

        tensors = padded_experts(tensors)
    nvfp4 = Nvfp4Moe.of(tensors) if problem.format == "nvfp4" else None
    if not (tensors.down.is_cuda and find_spec("triton") is not None):
        return nvfp4 or _blocks_in_torch(tensors)
    from vllm.kernels.triton import moe_rows

    return moe_rows.KernelOfRows(nvfp4.unadded if nvfp4 else _blocks_unadded(tensors))


def _added_in_torch(
    x: "Tensor",
    weights: "Tensor",
    ids: "Tensor",
    num_experts: int,
    multiply: "Callable[[Tensor, Tensor, Tensor], None]",
) -> "Tensor":
    """What a MoE kernel computes, with rows sorted and added in torch.

    multiply: of the pair of each row, the ends [E + 1] of the experts' rows, and where results of
    rows go.
    """
    import torch

    # Pairs of experts elsewhere come after the last group, and stay zeros.
    experts, order = torch.where(ids < 0, num_experts, ids).flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=ids.device)
    sorted_out = x.new_zeros(ids.numel(), x.shape[1])
    multiply(order, torch.searchsorted(experts, bounds, out_int32=True), sorted_out)
    out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
    return (out.view(*ids.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _blocks_in_torch(tensors: "MoETensors") -> "MoEKernel":
    import torch

    from vllm.ops.fp8_quant import per_token_group_fp8_quant, silu_and_mul_group_quant
    from vllm.ops.gemm_ops import cutlass_fp8_block_gemm_grouped as gemm

    def apply(x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        def multiply(pairs: "Tensor", ends: "Tensor", out: "Tensor") -> None:
            # Scales stay row-major: those of a group begin at any row.
            q, scales = per_token_group_fp8_quant(x)
            rows = pairs // ids.shape[1]
            q = q.view(torch.uint8).index_select(0, rows).view(q.dtype)
            scales = scales.index_select(0, rows)
            inner = x.new_empty(len(rows), tensors.gate_up.shape[1])
            gemm(q, scales, tensors.gate_up, tensors.gate_up_scales, ends, inner)
            q, scales = silu_and_mul_group_quant(inner)
            gemm(q, scales, tensors.down, tensors.down_scales, ends, out)

        return _added_in_torch(x, weights, ids, tensors.num_experts, multiply)

    return apply


def _blocks_unadded(tensors: "MoETensors") -> "Callable[[Tensor, Tensor, Tensor], ExpertRows]":
    """The same in six launches, or seven for many tokens."""
    from vllm.kernels.triton import moe_rows
    from vllm.ops.gemm_ops import cutlass_fp8_block_gemm_grouped as gemm

    num_experts = tensors.num_experts

    def unadded(x: "Tensor", weights: "Tensor", ids: "Tensor") -> moe_rows.ExpertRows:
        rows = moe_rows.sort(ids, num_experts)
        layout = moe_rows.Rows(ids.numel(), is_row_major=True)

        def multiply(q: "Tensor", scales: "Tensor", weight: "Tensor", grid: "Tensor") -> "Tensor":
            out = x.new_empty(layout.num_rows, weight.shape[1])
            gemm(q, scales, weight, grid, rows.ends, out)
            return out

        assert tensors.gate_up_scales is not None and tensors.down_scales is not None
        q, scales = moe_rows.spread(x, rows.positions, layout)
        inner = multiply(q, scales, tensors.gate_up, tensors.gate_up_scales)
        q, scales = moe_rows.activate(inner, rows.positions, layout)
        out = multiply(q, scales, tensors.down, tensors.down_scales)
        return moe_rows.ExpertRows(out, weights, rows.positions, num_experts)

    return unadded


@dataclass(frozen=True)
class _Nvfp4Experts:
    """One of the two weights of every expert, as `cutlass_nvfp4_gemm_grouped` takes them.

    Parts are gate and up, where their global scales differ in some expert; else there is one.
    weight: uint8 [E * parts, N, K / 2]. scales: E4M3 [E * parts, N up to 128s, K / 16 up to 4s],
    each swizzled. alpha: float32 [E * parts], by which a product is multiplied. input_divisors:
    float32 [E], the global scales that inputs are quantised with.
    """

    weight: "Tensor"
    scales: "Tensor"
    alpha: "Tensor"
    input_divisors: "Tensor"

    @classmethod
    def of(cls, stack: "LinearTensors") -> "_Nvfp4Experts":
        """stack: as of `MoETensors.all_experts`."""
        from vllm.ops.nvfp4 import swizzle_scales

        weight, scales, global_scales = stack.weight, stack.scales, stack.global_scales
        assert scales is not None and global_scales is not None and stack.input_scale is not None
        inputs = stack.input_scale.amax(1)  # parts share their input
        is_shared = bool((global_scales == global_scales[:, :1]).all())
        num_parts = 1 if is_shared else global_scales.shape[1]
        rows = (weight.shape[0] * num_parts, weight.shape[1] // num_parts, -1)
        return cls(
            weight.reshape(rows),
            swizzle_scales(scales.reshape(rows)),
            (inputs[:, None] * global_scales[:, :num_parts]).flatten(),
            inputs.reciprocal(),
        )


@dataclass(frozen=True)
class Nvfp4Moe:
    """Both weights of every expert. Called, it sorts rows in torch; `unadded` sorts in Triton."""

    gate_up: _Nvfp4Experts
    down: _Nvfp4Experts
    num_experts: int

    @classmethod
    def of(cls, tensors: "MoETensors") -> "Nvfp4Moe":
        gate_up, down = map(_Nvfp4Experts.of, tensors.all_experts())
        return cls(gate_up, down, tensors.num_experts)

    def __call__(self, x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        def multiply(pairs: "Tensor", ends: "Tensor", out: "Tensor") -> None:
            self._multiply(x, pairs.int(), ends, ids.shape[1], out)

        return _added_in_torch(x, weights, ids, self.num_experts, multiply)

    def unadded(self, x: "Tensor", weights: "Tensor", ids: "Tensor") -> "ExpertRows":
        from vllm.kernels.triton import moe_rows

        rows = moe_rows.sort(ids, self.num_experts)
        out = x.new_empty(ids.numel(), x.shape[1])
        self._multiply(x, rows.order, rows.ends, ids.shape[1], out)
        return moe_rows.ExpertRows(out, weights, rows.positions, self.num_experts)

    def _multiply(
        self, x: "Tensor", pairs: "Tensor", ends: "Tensor", top_k: int, out: "Tensor"
    ) -> None:
        """To row r of out what the expert of pair pairs[r] makes of its token. Expert e has rows
        ends[e] to ends[e + 1]; others are not written, and nothing depends on them."""
        from vllm.ops.fp4_ops import scaled_fp4_quant_grouped, silu_and_mul_scaled_fp4_quant_grouped
        from vllm.ops.gemm_ops import cutlass_nvfp4_gemm_grouped as gemm

        gate_up, down = self.gate_up, self.down
        between = x.new_empty(len(pairs), 4 * down.weight.shape[2])  # gate and up; 2 codes a byte
        q, scales = scaled_fp4_quant_grouped(x, gate_up.input_divisors, ends, pairs, top_k)
        gemm(q, scales, gate_up.weight, gate_up.scales, gate_up.alpha, ends, between)
        q, scales = silu_and_mul_scaled_fp4_quant_grouped(between, down.input_divisors, ends)
        gemm(q, scales, down.weight, down.scales, down.alpha, ends, out)
