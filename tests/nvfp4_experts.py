"""NVFP4 experts with factors that differ, and what the format says they compute."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearTensors, MoEKernel, MoETensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import MoEProblem
from vllm.ops.fp4_ops import scaled_fp4_quant_grouped
from vllm.ops.nvfp4 import (
    nvfp4_dequantize,
    nvfp4_quantize,
    swizzle_each,
)

FORMAT = WeightFormat.parse("nvfp4")


def experts(count: int, hidden: int, inner: int, is_shared: bool = False) -> MoETensors:
    """is_shared: whether gate and up have one global scale. Those of experts, and the scales of
    their inputs, are of one size and all different."""

    def stacked(parts: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        factors = (1 + torch.rand(count, parts)) / 2000
        if is_shared:
            factors = factors[:, :1].expand(count, parts).contiguous()
        made = [
            nvfp4_quantize(torch.randn(rows, columns) / columns**0.5, 1 / factor)
            for factor in factors.flatten()
        ]
        codes = torch.stack([codes for codes, _ in made]).view(count, parts * rows, columns // 2)
        scales = torch.stack([scales.view(torch.uint8) for _, scales in made])
        return codes, scales.view(count, parts * rows, -1).view(torch.float8_e4m3fn), factors

    gate_up, gate_up_scales, gate_up_factors = stacked(2, inner, hidden)
    down, down_scales, down_factors = stacked(1, hidden, inner)
    return MoETensors(
        FORMAT,
        gate_up,
        down,
        gate_up_scales,
        down_scales,
        gate_up_input_scales=(1 + torch.rand(count, 2)) / 500,
        down_input_scales=(1 + torch.rand(count, 1)) / 500,
        gate_up_global_scales=gate_up_factors,
        down_global_scales=down_factors,
    )


def kernel_of(tensors: MoETensors, top_k: int) -> MoEKernel:
    sizes = (tensors.num_experts, top_k, tensors.down.shape[1], tensors.inner)
    problem = MoEProblem(*sizes, FORMAT, (ActScheme.NVFP4_GROUP16,), dtype="bf16")
    winner = Candidate("cutlass", problem.act[0])
    kernel: MoEKernel = registry.backend("cutlass").moe(problem, tensors, winner)
    return kernel


def expected(tensors: MoETensors, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """In float64, of inputs quantised for each expert, and rounded to bfloat16 between."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for index in range(tensors.num_experts):
        tokens, places = (ids == index).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        gate_up, down = tensors.expert(index)
        gate, up = (_quantised(x[tokens], gate_up) @ _wide(gate_up).T).bfloat16().chunk(2, 1)
        inner = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
        result = _quantised(inner, down) @ _wide(down).T
        out.index_add_(0, tokens, result * weights[tokens, places, None].double())
    return out


def _quantised(x: Tensor, part: LinearTensors) -> Tensor:
    assert part.input_scale is not None
    divisor = part.input_scale.reciprocal().reshape(1)
    return nvfp4_dequantize(*nvfp4_quantize(x, divisor), divisor).double()


def _wide(part: LinearTensors) -> Tensor:
    """Row by row: the factors of the shards differ."""
    assert part.scales is not None and part.global_scales is not None
    codes, scales = part.weight.split(part.shard_rows), part.scales.split(part.shard_rows)
    shards = zip(codes, scales, part.global_scales, strict=True)
    return torch.cat([nvfp4_dequantize(*shard, 1 / factor) for *shard, factor in shards]).double()


def relative_error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


# ---------------------------------------------------------------- cutlass_nvfp4_gemm_grouped


def operands(counts: list[int], n: int, k: int, num_parts: int) -> dict[str, Tensor]:
    """Arguments of the op for experts of so many rows; three rows are nobody's."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    x, num_weights = torch.randn(sum(counts) + 3, k).bfloat16(), len(counts) * num_parts
    q, scales = scaled_fp4_quant_grouped(x, torch.rand(len(counts)) * 300 + 100, offsets)
    codes = torch.randint(0, 256, (num_weights, n, k // 2), dtype=torch.uint8)
    of_codes = torch.randint(1, 100, (num_weights, n, k // 16), dtype=torch.uint8)
    return {
        "a": q,
        "a_scales": scales,
        "b": codes,
        "b_scales": swizzle_each(of_codes.view(torch.float8_e4m3fn)),
        "alpha": torch.rand(num_weights) / 1e5,
        "offsets": offsets,
        "out": torch.full((len(x), num_parts * n), float("nan")).bfloat16(),
    }


REFUSALS: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("a", lambda t: t.view(torch.int8), "a: given int8"),
    ("a", lambda t: t[:, :24].contiguous(), "a: given 24 bytes a row"),
    ("a", lambda t: t.repeat_interleave(2, 0)[::2], "a: given a strided tensor"),
    ("a_scales", lambda t: t[:128], "a_scales: given shape.*at least 256 rows"),
    ("a_scales", lambda t: t.view(torch.uint8), "a_scales: given uint8; accepted: float8_e4m3fn"),
    ("b", lambda t: t[0], "b: given shape.*3 dimensions"),
    ("b", lambda t: t[:, :36].contiguous(), "b: given 36 rows; accepted: a multiple of 8"),
    ("b", lambda t: t[..., :16].contiguous(), "b: given shape.*bytes of a row of a"),
    ("b_scales", lambda t: t[:, :64].contiguous(), "b_scales: given shape.*rounded up to 128"),
    ("b_scales", lambda t: t[:3], "b_scales: given shape.*weights of b"),
    ("alpha", lambda t: t[:3], "alpha: given shape.*one factor for each product"),
    ("alpha", lambda t: t.double(), "alpha: given float64"),
    ("offsets", lambda t: t.repeat(2)[:4], "b: given 4 weights; .* each of 3 experts"),
    ("offsets", lambda t: t.long(), "offsets: given int64"),
    ("offsets", lambda t: t[:1], "offsets: given 1 offsets"),
    ("out", lambda t: t.half(), "out: given float16; accepted: bfloat16"),
    ("out", lambda t: t[:, :40].contiguous(), "out: given shape.*all parts of an expert"),
    ("out", lambda t: t[:10], "out: given shape.*rows of a"),
    ("out", lambda t: t[:1].expand(t.shape), "out: given rows 0 elements apart"),
]
"""(argument, change, message) of operands([3, 5], 40, 64, 2)."""
