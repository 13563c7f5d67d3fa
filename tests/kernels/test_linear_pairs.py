"""Linear layers of bfloat16 activations: one set of bits, by pairs of bfloat16 or by float32."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.conftest import LINEAR_ISAS, use_isa
from tests.kernels.test_linear_codes import KINDS, make_codes
from vllm.ops import cpu_ops
from vllm.platforms import native

WHOLE = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16,
         "int8": torch.int8}  # fmt: skip
PAIRS, REFERENCE = LINEAR_ISAS[:2]


def make_weight(kind: str, n: int, k: int, block_k: int) -> cpu_ops.LinearWeight:
    if kind in KINDS:
        return cpu_ops.pack_linear_codes(**make_codes(kind, n, k, block_k))
    weight = (torch.randn(n, k) * (40 if kind == "int8" else 1)).to(WHOLE[kind])
    scales = torch.rand(n, -(-k // block_k)) + 0.5
    return cpu_ops.pack_linear(weight, scales, block_k, torch.randn(n))


def by_isa(x: Tensor, packed: cpu_ops.LinearWeight, *names: str) -> list[Tensor]:
    """Results on each instruction set; skips the test where the chip lacks one."""
    default = native.load().cpu_isa()
    results = []
    try:
        for name in names:
            use_isa(name)
            out = torch.full((len(x), packed.num_outputs), float("nan"), dtype=x.dtype)
            results.append(cpu_ops.linear(x, packed, out))
    finally:
        native.load(default)
    return results


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 60),
    n=st.integers(1, 70),
    half_k=st.integers(1, 200),
    block_k=st.sampled_from((1, 2, 3, 5, 16, 31, 32, 50, 64, 100, 128, 130, 257, 500)),
    kind=st.sampled_from((*WHOLE, *KINDS)),
    seed=st.integers(0, 1000),
)
def test_every_instruction_set_gives_the_same_bits(m, n, half_k, block_k, kind, seed):
    torch.manual_seed(seed)
    packed = make_weight(kind, n, 2 * half_k, block_k)
    x = torch.randn(m, 2 * half_k).bfloat16()
    pairs, avx512, avx2 = by_isa(x, packed, *LINEAR_ISAS[:3])
    assert not pairs.isnan().any()
    assert torch.equal(pairs, avx512) and torch.equal(avx512, avx2)


@pytest.mark.parametrize("kind", (*WHOLE, *KINDS))
def test_a_row_has_the_same_bits_in_every_batch(linear_isa, kind):
    packed = make_weight(kind, 100, 546, 32)
    x = torch.randn(450, 546).bfloat16()
    whole = cpu_ops.linear(x, packed)
    for m in (*range(1, 28), 129, 400):
        for start in (0, 3, 450 - m):
            part = cpu_ops.linear(x[start : start + m], packed)
            assert torch.equal(part, whole[start : start + m]), (m, start)


# What vdpbf16ps would take for zeros: small inputs, and small sums of larger ones.
@pytest.mark.parametrize("x_exponent,weight_exponent", [(-130, 0), (-100, -30), (-60, -60), (0, 0)])
@pytest.mark.parametrize("kind", ("bf16", "fp8", "int4"))
def test_denormal_numbers_count(kind, x_exponent, weight_exponent):
    x = (torch.randn(40, 64) * 2.0**x_exponent).bfloat16()
    x[20:] = torch.randn(20, 64)  # other tiles have none
    scales = torch.full((33, 2), 2.0 ** min(-x_exponent - weight_exponent, 100))
    if kind == "bf16":
        weight = torch.randn(33, 64) * 2.0**weight_exponent
        weight[:, 32:] = 1e-40
        packed = cpu_ops.pack_linear(weight.bfloat16(), scales, 32)
    elif kind == "fp8":
        packed = cpu_ops.pack_linear(torch.randn(33, 64).to(torch.float8_e4m3fn), scales, 32)
    else:
        packed = cpu_ops.pack_linear_codes(torch.randint(256, (33, 32)).byte(), scales, 32)
    pairs, avx512 = by_isa(x, packed, PAIRS, REFERENCE)
    assert torch.equal(pairs, avx512)
    assert bool((pairs[:20] != 0).any())


def test_infinite_and_nan_activations_stay_in_their_rows():
    packed = make_weight("fp8", 40, 96, 32)
    x = torch.randn(30, 96).bfloat16()
    x[3, 5], x[17, 90] = float("inf"), float("nan")
    pairs, avx512 = by_isa(x, packed, PAIRS, REFERENCE)
    assert torch.equal(pairs.isnan(), avx512.isnan())
    assert torch.equal(pairs.nan_to_num(), avx512.nan_to_num())
    assert not torch.isfinite(pairs[[3, 17]]).any()
    others = [row for row in range(30) if row not in (3, 17)]
    assert torch.isfinite(pairs[others]).all()


def test_pairs_are_faster_for_many_rows(num_threads):
    """By nearly 2 where nothing else runs; the best of many short runs, in turns, of one thread."""
    native.load().cpu_set_num_threads(1)
    packed, x = make_weight("fp8", 512, 512, 128), torch.randn(96, 512).bfloat16()
    by_isa(x, packed, PAIRS, REFERENCE)
    best = dict.fromkeys((PAIRS, REFERENCE), float("inf"))
    default = native.load().cpu_isa()
    for _ in range(100):
        for name in best:
            native.load(name)
            start = time.perf_counter()
            cpu_ops.linear(x, packed)
            best[name] = min(best[name], time.perf_counter() - start)
    native.load(default)
    assert best[PAIRS] < 0.8 * best[REFERENCE]
