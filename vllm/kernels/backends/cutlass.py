"""Our own CUTLASS kernels: FP8 block and NVFP4 GEMM, dense and grouped; on Hopper FP8 with a scale
for each row too."""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.kernels.backends import channel_scales
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem, Problem
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors
    from vllm.kernels.triton.moe_rows import ExpertRows

_SM90, _SM100, _SM120 = {"90a"}, {"100a", "100f", "103a"}, {"120a", "120f", "121a"}
_Spec = partial(
    KernelSpec,
    backend="cutlass",
    dtypes=frozenset({"bf16", "fp16"}),
    libs=((NATIVE, ""),),
    devices=frozenset({"sm_90", "sm_10x", "sm_12x"}),
    native_archs=frozenset(_SM90 | _SM100 | _SM120),
    n_align=16,
    k_align=16,
)
_Block = partial(
    _Spec,
    native=("sm90_fp8_block_gemm", "sm100_fp8_block_gemm", "sm120_fp8_block_gemm"),
    formats=frozenset({"fp8-block"}),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    blocks=frozenset({(128, 128)}),
    scales=(("*", Scales.FLOAT32),),
)
_Nvfp4 = partial(
    _Spec,
    native=("sm100_nvfp4_gemm", "sm120_nvfp4_gemm"),
    formats=frozenset({"nvfp4"}),
    act=frozenset({ActScheme.NVFP4_GROUP16}),
    devices=frozenset({"sm_10x", "sm_12x"}),
    native_archs=frozenset(_SM100 | _SM120),
    n_align=32,
    k_align=32,
)


def _nvfp4_parts(problem: Problem) -> list[Reason]:
    """Merged parts have global scales of their own, and so may become products of their own."""
    assert isinstance(problem, LinearProblem)
    cut = [size for size in problem.parts if size % 32]
    return [Reason(Why.SHAPE, f"part of {size} rows is not a multiple of 32") for size in cut[:1]]


SPECS = (
    _Block(family="linear"),
    _Spec(
        family="linear",
        native=("sm90_fp8_block_gemm",),
        formats=channel_scales.FORMATS,
        act=channel_scales.ACTS,
        devices=frozenset({"sm_90"}),
        native_archs=frozenset(_SM90),
    ),
    _Nvfp4(family="linear", check=_nvfp4_parts),
    _Block(
        family="moe",
        native=("sm90_fp8_block_gemm", "sm100_fp8_grouped_gemm", "sm120_fp8_grouped_gemm"),
        dtypes=frozenset({"bf16"}),
    ),
    _Nvfp4(
        family="moe",
        native=("sm100_nvfp4_grouped_gemm", "sm120_nvfp4_grouped_gemm"),
        dtypes=frozenset({"bf16"}),
    ),
)


# Formats that `linear` and `moe` have code for.
_MADE = frozenset({"fp8-block", "nvfp4"})
MAKES = {"linear": _MADE | channel_scales.FORMATS, "moe": _MADE}


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes an FP8 weight as it is stored, or swizzles the scales of an NVFP4 one; each call
    quantises x [M, K] and multiplies."""
    if problem.format == "nvfp4":
        return _nvfp4_linear(tensors)
    if problem.format in channel_scales.FORMATS:
        from vllm.platforms import native

        gemm = native.load().sm90_fp8_channel_gemm
        return channel_scales.channel_kernel(tensors, winner, gemm)
    from vllm.kernels.activations import InputQuant, QuantizedInput, QuantizingKernel
    from vllm.ops.block_fit import fitted_kernel
    from vllm.ops.fp8_quant import ScaleLayout
    from vllm.ops.gemm_ops import cutlass_block_scaled_mm

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, scales, bias = tensors.weight, tensors.scales, tensors.bias
        assert scales is not None

        def multiply(x: QuantizedInput) -> "Tensor":
            return cutlass_block_scaled_mm(x.q, weight, x.scales, scales, (128, 128), x.dtype, bias)

        return QuantizingKernel(InputQuant(ScaleLayout.TMA_ALIGNED), multiply)

    return fitted_kernel(tensors, winner.fit, make)


def _nvfp4_linear(tensors: "LinearTensors") -> "LinearKernel":
    """One product for each run of merged parts that share a global scale."""
    from vllm._custom_ops import scaled_fp4_quant
    from vllm.ops.gemm_ops import cutlass_nvfp4_gemm
    from vllm.ops.nvfp4 import swizzle_scales

    weight, bias, input_scale = tensors.weight, tensors.bias, tensors.input_scale
    assert tensors.scales is not None and tensors.global_scales is not None
    assert input_scale is not None
    inverse = input_scale.reciprocal().reshape(1)
    products = []
    start = stop = 0
    factors = tensors.global_scales.tolist()
    for i, num_rows in enumerate(tensors.shard_rows):
        stop += num_rows
        if factors[i + 1 : i + 2] == factors[i : i + 1]:
            continue
        rows = slice(start, stop)
        alpha = (input_scale * tensors.global_scales[i]).reshape(1)
        part_bias = None if bias is None else bias[rows]
        products.append(
            (rows, weight[rows], swizzle_scales(tensors.scales[rows]), alpha, part_bias)
        )
        start = stop

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
    is_in_triton = tensors.down.is_cuda and find_spec("triton") is not None
    if problem.format == "nvfp4":
        return _nvfp4_moe(tensors, is_in_triton)
    import torch

    from vllm.ops.fp8_quant import per_token_group_fp8_quant, silu_and_mul_group_quant
    from vllm.ops.gemm_ops import cutlass_fp8_block_gemm_grouped as gemm

    if winner.fit is not None:
        tensors = _with_whole_blocks(tensors)
    gate_up, down = tensors.gate_up, tensors.down
    num_experts, hidden, _ = down.shape
    if is_in_triton:
        return _with_triton_rows(tensors)
    bounds = torch.arange(num_experts + 1, device=down.device)

    def apply(x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        num_tokens, top_k = ids.shape
        experts, order = ids.flatten().sort(stable=True)
        offsets = torch.searchsorted(experts, bounds, out_int32=True)
        # Scales stay row-major: those of a group begin at any row.
        q, scales = per_token_group_fp8_quant(x)
        rows = order // top_k
        q = q.view(torch.uint8).index_select(0, rows).view(q.dtype)
        inner = x.new_empty(len(rows), gate_up.shape[1])
        gemm(q, scales.index_select(0, rows), gate_up, tensors.gate_up_scales, offsets, inner)
        q, scales = silu_and_mul_group_quant(inner)
        # Pairs of experts elsewhere come before the first group, and stay zeros.
        sorted_out = x.new_zeros(len(rows), hidden)
        gemm(q, scales, down, tensors.down_scales, offsets, sorted_out)
        out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        return (out.view(num_tokens, top_k, hidden) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    return apply


def _with_triton_rows(tensors: "MoETensors") -> "MoEKernel":
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

    return moe_rows.KernelOfRows(unadded)


def _nvfp4_moe(tensors: "MoETensors", is_in_triton: bool) -> "MoEKernel":
    kernel = Nvfp4Moe.of(tensors)
    if not is_in_triton:
        return kernel
    from vllm.kernels.triton import moe_rows

    return moe_rows.KernelOfRows(kernel.unadded)


@dataclass(frozen=True, slots=True)
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
    def of(
        cls,
        weight: "Tensor",
        scales: "Tensor | None",
        global_scales: "Tensor | None",
        input_scales: "Tensor | None",
    ) -> "_Nvfp4Experts":
        """As MoETensors has them: [E, N of all parts, ...], and of the last two [E, parts]."""
        from vllm.ops.nvfp4 import swizzle_scales

        assert scales is not None and global_scales is not None and input_scales is not None
        inputs = input_scales.amax(1)  # parts share their input
        is_shared = bool((global_scales == global_scales[:, :1]).all())
        num_parts = 1 if is_shared else global_scales.shape[1]
        rows = (weight.shape[0] * num_parts, weight.shape[1] // num_parts, -1)
        return cls(
            weight.reshape(rows),
            swizzle_scales(scales.reshape(rows)),
            (inputs[:, None] * global_scales[:, :num_parts]).flatten(),
            inputs.reciprocal(),
        )


@dataclass(frozen=True, slots=True)
class Nvfp4Moe:
    """Both weights of every expert. Called, it sorts rows in torch; `unadded` sorts in Triton."""

    gate_up: _Nvfp4Experts
    down: _Nvfp4Experts
    num_experts: int

    @classmethod
    def of(cls, tensors: "MoETensors") -> "Nvfp4Moe":
        return cls(
            _Nvfp4Experts.of(
                tensors.gate_up,
                tensors.gate_up_scales,
                tensors.gate_up_global_scales,
                tensors.gate_up_input_scales,
            ),
            _Nvfp4Experts.of(
                tensors.down,
                tensors.down_scales,
                tensors.down_global_scales,
                tensors.down_input_scales,
            ),
            tensors.num_experts,
        )

    def __call__(self, x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        import torch

        # Pairs of experts elsewhere come after the last group, and stay zeros.
        experts, order = torch.where(ids < 0, self.num_experts, ids).flatten().sort(stable=True)
        bounds = torch.arange(self.num_experts + 1, device=ids.device)
        ends = torch.searchsorted(experts, bounds, out_int32=True)
        sorted_out = x.new_zeros(ids.numel(), x.shape[1])
        self._multiply(x, order.int(), ends, ids.shape[1], sorted_out)
        out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        return (out.view(*ids.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

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
        between = x.new_empty(len(pairs), 2 * self.inner)
        q, scales = scaled_fp4_quant_grouped(x, gate_up.input_divisors, ends, pairs, top_k)
        gemm(q, scales, gate_up.weight, gate_up.scales, gate_up.alpha, ends, between)
        q, scales = silu_and_mul_scaled_fp4_quant_grouped(between, down.input_divisors, ends)
        gemm(q, scales, down.weight, down.scales, down.alpha, ends, out)

    @property
    def inner(self) -> int:
        """Columns of an expert between its two products."""
        return self.down.weight.shape[2] * 2


def _with_whole_blocks(tensors: "MoETensors") -> "MoETensors":
    """The same experts with zeros around their intermediate rows and columns, up to the borders of
    the blocks that they touch: rows of zeros give zeros, which meet columns of zeros."""
    from dataclasses import replace

    import torch
    from torch.nn.functional import pad

    assert tensors.down_scales is not None and tensors.row_offset == tensors.column_offset
    before, inner = tensors.column_offset, tensors.down.shape[2]
    after = tensors.down_scales.shape[-1] * tensors.format.block[1] - before - inner
    halves = tensors.gate_up.view(torch.uint8).chunk(2, 1)
    gate_up = torch.cat([pad(half, (0, 0, before, after)) for half in halves], 1)
    down = pad(tensors.down.view(torch.uint8), (before, after))
    dtype = tensors.down.dtype
    return replace(
        tensors, gate_up=gate_up.view(dtype), down=down.view(dtype), row_offset=0, column_offset=0
    )
