"""Random weights of every format that the weight-only kernels take, beside what they stand for."""

import torch

from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearTensors, MoETensors
from vllm.ops.nvfp4 import e2m1_decode, unpack_e2m1

FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "mxfp4", "nvfp4",
           "int4-group[32]", "int4-group[128]", "int4-channel")  # fmt: skip
INT8 = ("int8-channel", "int8-group[32]", "int8-group[128]")
SHARDS = [(64,), (100,), (48, 40, 16), (130, 130)]
FP8 = torch.float8_e4m3fn


def make_linear(name, shards, k, row_offsets=(), column_offset=0, device="cpu"):
    """(tensors, weight float32 [N, K]). K may end within a group, as no checkpoint's does."""
    weight_format = WeightFormat.parse(name)
    n = sum(shards)
    if weight_format.element == "fp8":
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)
        codes[(codes & 0x7F) == 0x7F] = 0
        tensors = LinearTensors(weight_format, codes.view(FP8), shards)
        rows, columns = _scale_grid(weight_format, shards, k, row_offsets, column_offset)
        tensors.scales = torch.rand(rows, columns, device=device) * 1e-3 + 1e-4
        tensors.row_offsets, tensors.column_offset = row_offsets, column_offset
        return tensors, wide_of(tensors)
    if name == "mxfp8":
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)
        codes[(codes & 0x7F) == 0x7F] = 0
        scales = torch.randint(113, 119, (n, -(-k // 32)), dtype=torch.uint8, device=device)
        tensors = LinearTensors(weight_format, codes.view(FP8), shards, scales)
        return tensors, wide_of(tensors)
    if weight_format.element == "int8":
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
        groups = k // weight_format.columns_per_scale(k)
        scales = torch.rand(n, groups, device=device) * 1e-3 + 1e-4
        tensors = LinearTensors(weight_format, codes, shards, scales)
        if weight_format.scale == "group":
            shape = (n, groups)
            tensors.zero_points = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        return tensors, wide_of(tensors)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    tensors = LinearTensors(weight_format, codes, shards)
    if name == "mxfp4":
        shape = (n, -(-k // 32))
        tensors.scales = torch.randint(113, 119, shape, dtype=torch.uint8, device=device)
        return tensors, wide_of(tensors)
    if name == "nvfp4":
        scales = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, device=device)
        tensors.scales = scales.view(FP8)
        tensors.global_scales = (torch.rand(len(shards), device=device) + 0.1) * 1e-4
        return tensors, wide_of(tensors)
    groups = -(-k // weight_format.columns_per_scale(k))
    tensors.scales = (torch.rand(n, groups, device=device) * 1e-2 + 1e-3).half().float()
    if name in ("int4-group[32]", "int4-channel"):
        zeros = torch.randint(0, 16, (n, groups), dtype=torch.uint8, device=device)
        tensors.zero_points = zeros
    return tensors, wide_of(tensors)


def make_spread_mxfp4(num_rows, device="cpu"):
    """MXFP4 whose rows have every scale from 2^-16 to 2^8, the most that the weight-only kernels
    hold of one row: (tensors, weight float32)."""
    tensors, _ = make_linear("mxfp4", (num_rows,), 25 * 32, device=device)
    tensors.weight[:, ::16] = 0x7E  # 6 and -4 in every group
    exponents = torch.arange(111, 136, dtype=torch.uint8, device=device)
    orders = [exponents.roll(row) for row in range(num_rows)]
    tensors.scales = torch.stack(orders)
    return tensors, wide_of(tensors)


def _scale_grid(weight_format, shards, k, row_offsets, column_offset):
    if not row_offsets and not column_offset:
        return weight_format.scale_shape(shards, k)
    rows, columns = weight_format.block
    offsets = row_offsets or (0,) * len(shards)
    return (
        sum(-(-(first + size) // rows) for first, size in zip(offsets, shards)),
        -(-(column_offset + k) // columns),
    )


def make_moe(name, num_experts, hidden, inner, device="cpu"):
    """(tensors, [(gate_up, down)] float32 of every expert)."""
    weight_format = WeightFormat.parse(name)
    gate_ups = [make_linear(name, (inner, inner), hidden, device=device)[0]
                for _ in range(num_experts)]  # fmt: skip
    downs = [make_linear(name, (hidden,), inner, device=device)[0] for _ in range(num_experts)]

    def stacked(parts, field):
        found = [getattr(part, field) for part in parts]
        if found[0] is None:
            return None
        return torch.stack([f.view(torch.uint8) for f in found]).view(found[0].dtype)

    tensors = MoETensors(weight_format, stacked(gate_ups, "weight"), stacked(downs, "weight"))
    for field in ("scales", "global_scales", "zero_points"):
        setattr(tensors, f"gate_up_{field}", stacked(gate_ups, field))
        setattr(tensors, f"down_{field}", stacked(downs, field))
    return tensors, [(wide_of(g), wide_of(d)) for g, d in zip(gate_ups, downs)]


def wide_of(tensors):
    """float32 [N, K] of the numbers that the format defines."""
    scales, columns = tensors.row_scales(), tensors.block_k
    if tensors.format.element in ("fp8", "mxfp8"):
        values = tensors.weight.float()
    elif tensors.format.element == "int8":
        values = tensors.weight.float()
        if tensors.zero_points is not None:
            zeros = tensors.zero_points.float().repeat_interleave(columns, 1)
            values = values - zeros[:, : values.shape[1]]
    else:
        codes = unpack_e2m1(tensors.weight)
        is_e2m1 = tensors.format.element in ("nvfp4", "mxfp4")
        values = e2m1_decode(codes) if is_e2m1 else codes.float() - 8
        if tensors.zero_points is not None:
            zeros = tensors.zero_points.repeat_interleave(columns, 1)[:, : codes.shape[1]]
            values = codes.float() - zeros
    return values * scales.repeat_interleave(columns, 1)[:, : values.shape[1]]


def fill_blocks(expected, x, order, blocks, weights, block_rows, bias):
    """Rows of `expected` that blocks of (expert, first row, end) cover, two for each row of x; bias
    [experts, N]."""
    for expert, first, end in blocks.T.tolist():
        if expert >= 0:
            rows = slice(first, min(end, first + block_rows))
            own = x[(order[rows] // 2).long()].double() @ wide_of(weights[expert]).double().T
            expected[rows] = (own + bias[expert].double()).bfloat16()
