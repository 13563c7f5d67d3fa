"""NVFP4 experts of the CUTLASS backend, on the CPU, where its ops are computed by references.

What the GPU computes instead was not run on hardware: addresses are proved by
tests/cmake/test_grouped_addresses.py, machine code is read by tests/cmake/test_full_build.py.
"""

import pytest
import torch
from nvfp4_experts import expected, experts, kernel_of, relative_error
from torch import Tensor

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.report.question import parse_lib
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.select.reason import Why
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.ops.fp4_ops import scaled_fp4_quant_grouped
from vllm.ops.moe_router import route
from vllm.ops.nvfp4 import (
    max_grouped_scale_rows,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_quantize_grouped,
    swizzle_scales,
)

# experts, top k, hidden, intermediate: whole tiles of scales; tiles that end inside on both axes.
SIZES = ((4, 2, 256, 128), (5, 3, 96, 160), (1, 1, 128, 32))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("is_shared", [True, False], ids=["one factor", "gate and up apart"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_token_gets_the_weighted_sum_of_its_experts(sizes, is_shared):
    count, top_k, hidden, inner = sizes
    tensors = experts(count, hidden, inner, is_shared)
    kernel = kernel_of(tensors, top_k)
    for num_tokens in (1, 2, 130):
        x = torch.randn(num_tokens, hidden).bfloat16()
        weights, ids = route(torch.randn(num_tokens, count), top_k, renormalise=True)
        y = kernel(x, weights, ids)
        assert y.dtype == x.dtype
        assert relative_error(y, expected(tensors, x, weights, ids)) < 0.005


def test_a_product_for_each_part_is_made_only_where_their_factors_differ():
    for is_shared, num_products in ((True, 3), (False, 6)):
        kernel = kernel_of(experts(3, 64, 32, is_shared), 1)
        assert len(kernel.gate_up.alpha) == len(kernel.gate_up.weight) == num_products
        assert len(kernel.down.alpha) == 3


def test_no_tokens_give_no_results():
    kernel = kernel_of(experts(4, 64, 32), 2)
    y = kernel(torch.empty(0, 64).bfloat16(), torch.empty(0, 2), torch.empty(0, 2).long())
    assert y.shape == (0, 64)


def test_pairs_of_experts_elsewhere_add_nothing():
    tensors = experts(4, 64, 32)
    x, weights = torch.randn(40, 64).bfloat16(), torch.rand(40, 3)
    ids = torch.rand(40, 4).topk(3).indices
    ids[torch.rand(40, 3) < 0.5] = -1
    y = kernel_of(tensors, 3)(x, weights, ids)
    assert relative_error(y, expected(tensors, x, weights, ids)) < 0.005
    assert bool((y[(ids < 0).all(1)] == 0).all())


def test_experts_that_nobody_asks_for_do_not_count():
    tensors = experts(5, 64, 32)
    x, ids = torch.randn(9, 64).bfloat16(), torch.tensor([[3, 1]] * 9)
    weights = torch.full((9, 2), 0.5)
    wanted = kernel_of(tensors, 2)(x, weights, ids)
    tensors.down_global_scales[[0, 2, 4]] = float("nan")
    assert torch.equal(kernel_of(tensors, 2)(x, weights, ids), wanted)


def test_a_token_has_the_same_result_in_any_company():
    kernel = kernel_of(experts(8, 64, 32), 3)
    x, logits = torch.randn(40, 64).bfloat16(), torch.randn(40, 8)
    whole = kernel(x, *route(logits, 3, renormalise=True))
    for rows in (slice(0, 1), slice(7, 12)):
        part = kernel(x[rows], *route(logits[rows], 3, renormalise=True))
        torch.testing.assert_close(part, whole[rows], rtol=2**-7, atol=1e-3)


# ---------------------------------------------------------------- the op


@pytest.mark.parametrize("num_parts", [1, 2])
def test_each_expert_s_rows_meet_its_own_weights(num_parts: int):
    # One expert has no rows; 7 are nobody's.
    offsets = torch.tensor([0, 3, 3, 133], dtype=torch.int32)
    m, n, k, count = 140, 40, 96, 3
    x, weight = torch.randn(m, k), torch.randn(count * num_parts, n, k)
    divisors, alpha = torch.rand(count) * 300 + 100, torch.rand(count * num_parts)
    q, scales = nvfp4_quantize_grouped(x, divisors, offsets)
    codes = torch.zeros(m, k // 2, dtype=torch.uint8)
    codes[: len(q)] = q
    room = torch.zeros(max_grouped_scale_rows(m, count), scales.shape[1], dtype=torch.uint8)
    room[: len(scales)] = scales.view(torch.uint8)
    packed = [nvfp4_quantize(one, torch.tensor([500.0])) for one in weight]
    out = torch.full((m, num_parts * n), float("nan")).bfloat16()
    torch.ops.vllm.cutlass_nvfp4_gemm_grouped(
        codes,
        room.view(torch.float8_e4m3fn),
        torch.stack([codes for codes, _ in packed]),
        swizzle_scales(torch.stack([scales for _, scales in packed])),
        alpha,
        offsets,
        out,
    )
    assert bool(out[133:].isnan().all())
    for expert, (begin, end) in enumerate(((0, 3), (3, 3), (3, 133))):
        divisor = divisors[expert].view(1)
        wide = nvfp4_dequantize(*nvfp4_quantize(x[begin:end], divisor), divisor) * divisor
        for part in range(num_parts):
            one = expert * num_parts + part
            wanted = alpha[one] * wide @ nvfp4_dequantize(*packed[one], torch.ones(1)).T
            found = out[begin:end, part * n : (part + 1) * n].float()
            torch.testing.assert_close(found, wanted, rtol=2**-8, atol=1e-3)


def test_the_ops_can_be_traced_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, pairs = torch.empty(5, 64).bfloat16(), torch.empty(10, dtype=torch.int32)
        ends = torch.empty(4, dtype=torch.int32)
        q, scales = scaled_fp4_quant_grouped(x, torch.empty(3), ends, pairs, 2)
        assert q.shape == (10, 32) and scales.shape == (max_grouped_scale_rows(10, 3), 4)
        out = torch.empty(10, 48).bfloat16()
        weight = torch.empty(3, 48, 32, dtype=torch.uint8)
        rows = torch.empty(3, 128, 4, dtype=torch.float8_e4m3fn)
        torch.ops.vllm.cutlass_nvfp4_gemm_grouped(
            q, scales, weight, rows, torch.empty(3), ends, out
        )


def test_a_row_is_quantised_for_each_pair_of_its_token():
    x, divisors = torch.randn(4, 64).bfloat16(), torch.tensor([100.0, 300.0])
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    pairs = torch.tensor([0, 3, 7, 2, 5, -77, 10**9], dtype=torch.int32)  # two are of no expert
    q, scales = scaled_fp4_quant_grouped(x, divisors, ends, pairs, 2)
    wanted = scaled_fp4_quant_grouped(x[[0, 1, 3, 1, 2]], divisors, ends)
    assert q.shape == (7, 32) and torch.equal(q[:5], wanted[0])

    def as_bytes(t: Tensor) -> Tensor:
        return t[:256].view(torch.uint8)

    assert torch.equal(as_bytes(scales), as_bytes(wanted[1]))


# ---------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("device", "archs", "dtype", "inner", "why"),
    [
        ("sm_100", "100f", "bf16", 128, []),
        ("sm_103", "100f", "bf16", 128, []),
        ("sm_120", "120f", "bf16", 128, []),
        ("sm_121", "120f", "bf16", 128, []),
        ("sm_90", "90a", "bf16", 128, [Why.DEVICE]),
        ("sm_120", "100f", "bf16", 128, [Why.LIBRARY]),
        ("sm_100", "100f", "fp16", 128, [Why.DTYPE]),
        ("sm_100", "100f", "bf16", 48, [Why.SHAPE]),
    ],
)
def test_families_100_and_120_compute_experts_natively(device, archs, dtype, inner, why):
    problem = MoEProblem(
        8, 2, 256, inner, WeightFormat.parse("nvfp4"), (ActScheme.NVFP4_GROUP16,), dtype=dtype
    )
    libs = Libs.of([parse_lib(f"native=1+{archs}"), registry.built()])
    decision = select(problem, Device.parse(device), libs, Policy(), registry.specs("moe"))
    own = next(c for c in decision.candidates if c.backend == "cutlass")
    assert sorted({reason.why for reason in own.reasons}) == why
