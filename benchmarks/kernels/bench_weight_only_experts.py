"""Experts in MXFP4 by the weight-only kernel, of the sizes of gpt-oss-20b, at the few tokens of
decode steps.

    python benchmarks/kernels/bench_weight_only_experts.py [--out DIR] [--tokens M ...]

A figure is the median of CUDA-graph replays in which every call has experts of its own, as long as
there are any, so that no weight is found in the L2 cache. `gate_up` and `down`: one product of
sorted pairs, for each size of the blocks of rows that are multiplied together; `layer`: everything
from the tokens and their experts to the sum, with the size that the backend chooses. In brackets,
`of_copy`: bytes of the chosen experts that a product reads a second, of those that a copy reads and
writes.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_results import write_results
from gpu_timing import copy_bandwidth, replay_microseconds
from torch import Tensor

from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import MoETensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.triton import moe_rows
from vllm.ops.weight_only_layout import PackedWeight, pack_experts, widen_weight
from vllm.ops.weight_only_ops import multiply_experts

EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 2880, 2880
FORMAT = WeightFormat.parse("mxfp4")
TOKENS, BLOCK_ROWS = (1, 2, 4, 8, 16, 32, 64), (8, 16, 32)
SETS = 8  # of experts that calls choose, one after another
MAX_ERROR = 5e-3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of weight_only_experts.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    args = parser.parse_args()
    copy = copy_bandwidth() * 1e6
    print(f"copy {copy / 1e12:.2f} TB/s")
    tensors = random_experts()
    stacks = zip(*(tensors.expert(index) for index in range(EXPERTS)))
    gate_up, down = (pack_experts(stack, EXPERTS) for stack in stacks)
    problem = MoEProblem(
        EXPERTS, TOP_K, HIDDEN, INNER, FORMAT, bias=True, activation="swigluoai", swiglu_limit=7.0
    )
    layer = registry.backend("marlin").moe(problem, tensors, Candidate("marlin", None))
    rows = []
    for m in args.tokens:
        all_ids = chosen(m)
        found: dict[str, Any] = {"m": m, "us": {}, "of_copy": {}}
        for name, weight in (("gate_up", gate_up), ("down", down)):
            for block_rows in BLOCK_ROWS:
                us = product_time(weight, all_ids, block_rows)
                key = f"{name} {block_rows}"
                found["us"][key] = us
                found["of_copy"][key] = bytes_read(weight, all_ids) / us * 1e6 / copy
        x, weights = random_input(m, HIDDEN), torch.rand(m, TOP_K, device="cuda")
        found["us"]["layer"] = replay_microseconds(
            [partial(layer, x, weights, ids) for ids in all_ids]
        )
        rows.append(found)
        print(f"{m:4}  " + "  ".join(show(found, key) for key in found["us"]), flush=True)
    if args.out:
        write_results(args.out, "weight_only_experts.json", copy_bytes_per_s=copy, rows=rows)


def show(found: dict[str, Any], key: str) -> str:
    share = f" ({found['of_copy'][key]:.2f})" if key in found["of_copy"] else ""
    return f"{key} {found['us'][key]:.1f}{share}"


def random_experts() -> MoETensors:
    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, dtype=torch.uint8, device="cuda")

    return MoETensors(
        FORMAT,
        random(256, EXPERTS, 2 * INNER, HIDDEN // 2),
        random(256, EXPERTS, HIDDEN, INNER // 2),
        gate_up_scales=random(4, EXPERTS, 2 * INNER, HIDDEN // 32) + 118,
        down_scales=random(4, EXPERTS, HIDDEN, INNER // 32) + 118,
        gate_up_bias=torch.randn(EXPERTS, 2 * INNER, device="cuda"),
        down_bias=torch.randn(EXPERTS, HIDDEN, device="cuda"),
    )


def random_input(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def chosen(num_tokens: int) -> list[Tensor]:
    """int64 [num_tokens, TOP_K] for every set; the sets of one token have no expert in common."""
    order = torch.stack([torch.randperm(EXPERTS, device="cuda") for _ in range(num_tokens)])
    return list(order.view(num_tokens, SETS, TOP_K).transpose(0, 1).contiguous())


def bytes_read(weight: PackedWeight, all_ids: list[Tensor]) -> float:
    """By a product, on average of the sets: each expert that is chosen once."""
    num_experts = sum(len(ids.unique()) for ids in all_ids) / len(all_ids)
    return num_experts * sum(part[0].nbytes for part in weight.parts if part is not None)


def product_time(weight: PackedWeight, all_ids: list[Tensor], block_rows: int) -> float:
    num_pairs = all_ids[0].numel()
    x = random_input(num_pairs, weight.num_columns)
    found = [moe_rows.sort(ids, EXPERTS, block_m=block_rows) for ids in all_ids]

    def call(rows: moe_rows.Sorted) -> Tensor:
        return multiply_experts(x, weight, rows.blocks, block_rows, num_pairs, rows.order)

    check(call(found[0]), x, weight, all_ids[0], found[0].positions)
    return replay_microseconds([lambda rows=rows: call(rows) for rows in found])


def check(out: Tensor, x: Tensor, weight: PackedWeight, ids: Tensor, positions: Tensor) -> None:
    expected = torch.empty_like(out, dtype=torch.float32)
    for expert in ids.unique().tolist():
        parts = (part if part is None else part[expert] for part in weight.parts)
        codes, scales, row_factors = parts
        one = replace(weight, codes=codes, scales=scales, row_factors=row_factors)
        pairs = (ids.flatten() == expert).nonzero().flatten()
        expected[positions.flatten()[pairs].long()] = x[pairs].float() @ widen_weight(one).T
    error = (out.float() - expected).norm() / expected.norm()
    assert error < MAX_ERROR, f"relative error {error}"


if __name__ == "__main__":
    main()
