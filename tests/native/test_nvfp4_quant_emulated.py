"""csrc's NVFP4 quantiser for rows of experts, run thread by thread on a CPU, bit for bit.

CUDA is emulated (emulated_cuda/). On a GPU: tests/kernels/gpu/test_nvfp4_quant.py. The table of
experts that it makes is also what the grouped NVFP4 GEMM of Blackwell finds its rows by.
"""

import shutil
from pathlib import Path

import pytest
import torch
from native import emulated
from native.emulated import compiled
from slow import quick

from vllm.ops.nvfp4 import (
    max_grouped_scale_rows,
    nvfp4_quantize_grouped,
)
from vllm.ops.torch_ops import silu_and_mul

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# Of Header in nvfp4_quant.cpp.
FIELDS = [
    "m", "num_groups", "num_experts", "num_tokens", "top_k", "scale_rows", "num_sms", "is_gated",
    "x", "global_scales", "expert_offsets", "pairs", "out", "scales_at",
]  # fmt: skip
MANY_SMS, ONE_SM = 1000, 1  # of which a thread takes one group, or several
# Rows of experts, the last of none: empty ones first, in between and last; whole tiles.
ROUTINGS = ([5, 0], [0, 128, 1, 0, 127, 129, 3], [0] * 40 + [2] * 30 + [0] * 20 + [11])
POISON = 0x55


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvfp4_quant")
    # Apart from the real fp8_ptx.cuh, in whose place comes the emulated one.
    target, ignored = folder / "csrc" / "quantization", shutil.ignore_patterns("fp8_ptx.cuh")
    for name in ("w8a8", "fp4"):
        shutil.copytree(CSRC / "quantization" / name, target / name, ignore=ignored)
    shutil.copy(CSRC / "launch.cuh", folder / "csrc")
    shutil.copy(HERE / "nvfp4_quant.cpp", folder)
    return compiled(folder / "nvfp4_quant.cpp", folder, "-ffp-contract=off")


def run(program, x, divisors, ends, pairs, top_k, num_sms, is_gated=False):
    """Codes [rows, K / 2] and scales of all scale rows, poisoned where nothing is written."""
    num_rows = x.shape[0] if pairs is None else len(pairs)
    groups = x.shape[1] // (32 if is_gated else 16)
    codes = torch.full((num_rows, groups * 8), POISON, dtype=torch.uint8)
    scale_rows = max_grouped_scale_rows(num_rows, len(divisors))
    scales = torch.full((scale_rows, -(-groups // 4) * 4), POISON, dtype=torch.uint8)
    filling = torch.full((-codes.nbytes % 64,), POISON, dtype=torch.uint8)
    out = torch.cat([codes.flatten(), filling, scales.flatten()])
    header = {
        "m": num_rows, "num_groups": groups, "num_experts": len(divisors),
        "num_tokens": x.shape[0], "top_k": top_k, "scale_rows": scale_rows, "num_sms": num_sms,
        "is_gated": int(is_gated), "scales_at": codes.nbytes + len(filling),
    }  # fmt: skip
    tensors = {"x": x, "global_scales": divisors, "expert_offsets": ends, "pairs": pairs}
    out = emulated.call(program, FIELDS, header, {**tensors, "out": out}, "out")
    return out[: codes.nbytes].view(codes.shape), out[header["scales_at"] :].view(scales.shape)


def check(codes, scales, wanted):
    num_rows, num_scale_rows = (part.shape[0] for part in wanted)
    assert torch.equal(codes[:num_rows], wanted[0])
    assert torch.equal(scales[:num_scale_rows], wanted[1].view(torch.uint8))
    assert bool((codes[num_rows:] == POISON).all()) and bool(
        (scales[num_scale_rows:] == POISON).all()
    )


def routed(counts):
    """(divisors, ends) of experts of so many rows; the last count is of rows of no expert."""
    divisors = torch.rand(len(counts) - 1) * 300 + 1
    return divisors, torch.tensor([0, *counts[:-1]]).cumsum(0).int()


@pytest.mark.parametrize("num_sms", quick([MANY_SMS, ONE_SM], [MANY_SMS]))
@pytest.mark.parametrize("counts", ROUTINGS, ids=lambda counts: f"{len(counts)}-{sum(counts)}")
def test_a_token_is_quantised_in_the_row_of_each_of_its_pairs(program, counts, num_sms):
    torch.manual_seed(0)
    top_k, num_rows = 3, sum(counts)
    divisors, ends = routed(counts)
    x = torch.randn(-(-num_rows // top_k), 112).mul(3).bfloat16()
    pairs = torch.randperm(len(x) * top_k)[:num_rows].int()
    # Of rows of no expert, pairs hold what memory held.
    last = int(ends[-1])
    pairs[last:] = torch.tensor([-1, 2**31 - 1, -(2**31), 10**9])[torch.arange(counts[-1]) % 4]
    codes, scales = run(program, x, divisors, ends, pairs, top_k, num_sms)
    tokens = (pairs[:last] // top_k).long()
    check(codes, scales, nvfp4_quantize_grouped(x[tokens], divisors, ends))


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
def test_rows_without_pairs_are_those_of_x(program, is_gated):
    torch.manual_seed(0)
    counts = ROUTINGS[1]
    divisors, ends = routed(counts)
    x = torch.randn(sum(counts), 224 if is_gated else 112).bfloat16()
    codes, scales = run(program, x, divisors, ends, None, 1, ONE_SM, is_gated)
    if not is_gated:
        check(codes, scales, nvfp4_quantize_grouped(x, divisors, ends))
        return
    # The exponential of a CPU is not that of torch, to the last bit: few values round apart.
    wanted = nvfp4_quantize_grouped(silu_and_mul(x), divisors, ends)
    last, last_scale = (part.shape[0] for part in wanted)
    assert float((codes[:last] != wanted[0]).float().mean()) < 1e-2
    apart = scales[:last_scale].int() - wanted[1].view(torch.uint8).int()
    assert int(apart.abs().max()) <= 1
