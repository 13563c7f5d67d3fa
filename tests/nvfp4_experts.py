"""NVFP4 experts with factors that differ, and what the format says they compute."""

import torch
from torch import Tensor

from vllm.kernels import registry
from vllm.kernels.problem import ActScheme, MoEProblem, WeightFormat
from vllm.kernels.spec import Candidate
from vllm.kernels.tensors import LinearTensors, MoEKernel, MoETensors
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import (
    nvfp4_dequantize,
    nvfp4_quantize,
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
