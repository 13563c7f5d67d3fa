"""FP8 arithmetic against its definition in numpy, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import STAND_INS, Gpu, machine

from tests.kernels import e4m3
from vllm.kernels.interface import LinearTensors
from vllm.kernels.make_kernel import make_linear
from vllm.kernels.select.reason import Why
from vllm.machine import Device, Lib, Libs
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    W8A8BlockFp8LinearOp,
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
    requant_weight_ue8m0_inplace,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, get_fp8_min_max
from vllm.utils.deep_gemm import get_tma_aligned_size
from vllm.utils.fp8 import (
    FP8,
    ceil_to_power_of_two,
    dequantise_blocks,
    is_power_of_two,
    per_block_cast_to_fp8,
    round_to_fp8,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = (128, 128)
SEEDS = st.integers(0, 2**31)


def codes(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


def random_values(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """Of very different magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    return (x * (torch.rand(*shape, generator=generator) > 0.1)).to(dtype)


def block_weight(n: int, k: int, seed: int = 0, use_ue8m0: bool = False, block=BLOCK):
    generator = torch.Generator().manual_seed(seed)
    return per_block_cast_to_fp8(torch.randn(n, k, generator=generator), block, use_ue8m0)


# ---------------------------------------------------------------- scales


def test_every_power_of_two_stays_and_its_upper_neighbour_doubles():
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    above = np.nextafter(powers, np.float32(np.inf), dtype=np.float32)
    below = np.nextafter(powers[1:], np.float32(0), dtype=np.float32)
    assert np.array_equal(ceil_to_power_of_two(torch.from_numpy(powers)), powers)
    assert np.array_equal(ceil_to_power_of_two(torch.from_numpy(above))[:-1], powers[1:])
    assert np.array_equal(ceil_to_power_of_two(torch.from_numpy(below)), powers[1:])
    assert is_power_of_two(torch.from_numpy(powers)).all()
    assert not is_power_of_two(torch.from_numpy(above)).any()
    assert not is_power_of_two(torch.from_numpy(below)).any()


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_the_ceiling_is_the_nearest_power_of_two_from_above(value):
    ceiling = float(ceil_to_power_of_two(torch.tensor([value])))
    assert np.frexp(ceiling)[0] == 0.5
    assert ceiling / 2 < value <= ceiling


def test_zero_infinity_and_nan_are_no_powers_of_two_and_have_no_ceiling():
    odd = torch.tensor([0.0, float("inf"), float("nan")])
    assert not is_power_of_two(odd).any()
    assert not is_power_of_two(torch.tensor([-2.0, 3.0, 1e-40])).any()
    assert torch.equal(ceil_to_power_of_two(odd)[:2], odd[:2])
    assert ceil_to_power_of_two(odd)[2].isnan()


def test_the_range_of_e4m3():
    assert get_fp8_min_max() == (-e4m3.VALUES[-1], e4m3.VALUES[-1])


# ---------------------------------------------------------------- casts


def test_all_e4m3_codes_and_all_ties_round_as_defined():
    ties = (e4m3.VALUES[1:] + e4m3.VALUES[:-1]) / 2
    steps = np.concatenate([e4m3.VALUES, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9)])
    x = np.concatenate([steps, -steps]).astype(np.float32)
    q = round_to_fp8(torch.from_numpy(x), torch.ones(()))
    assert np.array_equal(codes(q), e4m3.encode(x))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    ue8m0=st.booleans(),
    seed=SEEDS,
)
def test_a_block_cast_is_the_division_by_448ths_of_each_block(n, k, rows, columns, ue8m0, seed):
    x = random_values(seed, n, k)
    q, scales = per_block_cast_to_fp8(x, (rows, columns), ue8m0)
    assert q.is_contiguous()
    values = x.numpy()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            amax = np.abs(values[own]).max()
            scale = e4m3.scale_of(amax, ue8m0) if amax > 0 else np.float32(1)
            assert float(scales[i, j]) == scale
            assert np.array_equal(codes(q)[own], e4m3.encode(values[own] / scale))


def test_values_too_small_for_a_scale_become_zeros_and_not_nan():
    q, scales = per_block_cast_to_fp8(torch.full((3, 3), 1e-45))
    assert not q.float().any() and torch.equal(scales, torch.ones(1, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="NaN or infinity"):
        per_block_cast_to_fp8(torch.tensor([[1.0, bad]]))


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 20),
    k=st.integers(1, 300),
    group=st.integers(1, 140),
    ue8m0=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_tokens_are_quantised_by_groups_and_the_last_may_be_partial(
    m, k, group, ue8m0, dtype, seed
):
    x = random_values(seed, m, k, dtype=dtype)
    q, scales = per_token_group_quant_fp8(x, group, use_ue8m0=ue8m0)
    assert q.shape == x.shape and q.is_contiguous()
    assert scales.shape == (m, -(-k // group)) and scales.dtype == torch.float32
    values = x.float().numpy()
    for i in range(scales.shape[1]):
        own = values[:, i * group : (i + 1) * group]
        amax = np.abs(own).max(1, initial=0).clip(np.float32(1e-10))
        scale = e4m3.scale_of(amax, ue8m0)
        assert np.array_equal(scales[:, i], scale)
        assert np.array_equal(
            codes(q)[:, i * group : (i + 1) * group], e4m3.encode(own / scale[:, None])
        )


@pytest.mark.parametrize("m,k", [(1, 128), (1, 300), (5, 128), (7, 576), (8, 300)])
def test_scale_layouts_hold_the_same_values(m, k):
    x = torch.randn(m, k)
    plain = per_token_group_quant_fp8(x, 128, use_ue8m0=False)[1]
    column = per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=False)[1]
    aligned = per_token_group_quant_fp8(
        x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False
    )[1]
    assert plain.is_contiguous()
    assert column.stride(-2) == aligned.stride(-2) == 1
    assert aligned.stride(-1) == get_tma_aligned_size(m, 4) and aligned.stride(-1) % 4 == 0
    assert torch.equal(plain, column) and torch.equal(plain, aligned)


def test_a_batch_of_matrices_is_quantised_like_each_of_them():
    x = torch.randn(3, 5, 300)
    q, scales = per_token_group_quant_fp8(x, 128, tma_aligned_scales=True, use_ue8m0=True)
    for i in range(3):
        own_q, own_scales = per_token_group_quant_fp8(x[i], 128, use_ue8m0=True)
        assert np.array_equal(codes(q[i]), codes(own_q)) and torch.equal(scales[i], own_scales)


def test_the_output_tensor_given_is_the_one_written():
    x = torch.randn(4, 130)
    out = torch.empty(4, 130, dtype=FP8)
    q, _ = per_token_group_quant_fp8(x, 128, out_q=out, use_ue8m0=False)
    assert q is out
    assert np.array_equal(codes(q), codes(per_token_group_quant_fp8(x, 128, use_ue8m0=False)[0]))
    with pytest.raises(ValueError, match="out_q"):
        per_token_group_quant_fp8(x, 128, out_q=out[:3], use_ue8m0=False)


def test_on_a_cpu_nobody_wants_powers_of_two():
    x = torch.randn(4, 130)
    assert torch.equal(
        per_token_group_quant_fp8(x, 128)[1],
        per_token_group_quant_fp8(x, 128, use_ue8m0=False)[1],
    )


def test_a_nan_or_infinity_in_an_activation_stays_visible_and_in_its_group():
    x = torch.randn(3, 256)
    x[0, 5], x[1, 200] = float("nan"), float("inf")
    for ue8m0 in (False, True):
        q, scales = per_token_group_quant_fp8(x, 128, use_ue8m0=ue8m0)
        wide = dequantise_blocks(q, scales, (1, 128))
        assert wide[0, :128].isnan().all() and wide[1, 128:].isnan().all()
        assert wide[0, 128:].isfinite().all() and wide[1:, :128].isfinite().all()


@given(m=st.integers(1, 9), groups=st.integers(1, 9), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_packed_scales_are_the_exponent_bytes_of_the_float_scales(m, groups, seed):
    x = random_values(seed, m, groups * 32 - 5)
    q, packed = per_token_group_quant_fp8_packed_for_deepgemm(x, 32)
    wanted_q, scales = per_token_group_quant_fp8(x, 32, use_ue8m0=True)
    assert np.array_equal(codes(q), codes(wanted_q))
    assert packed.dtype == torch.int32 and packed.shape == (m, -(-groups // 4))
    assert packed.stride() == (1, get_tma_aligned_size(m, 4))
    words = packed.numpy().astype(np.int64)
    for i in range(packed.shape[1] * 4):
        byte = words[:, i // 4] >> (8 * (i % 4)) & 0xFF
        if i < groups:
            assert np.array_equal(np.ldexp(1.0, byte - 127), scales[:, i].double().numpy())
        else:
            assert not byte.any()


def test_packed_scales_refuse_what_they_cannot_hold():
    with pytest.raises(ValueError, match="use_ue8m0"):
        per_token_group_quant_fp8_packed_for_deepgemm(torch.randn(2, 128), 128, use_ue8m0=False)


# ---------------------------------------------------------------- products


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 8), n=st.integers(1, 200), k=st.integers(1, 300), seed=SEEDS)
def test_a_block_scaled_product_is_that_of_the_dequantised_values(m, n, k, seed):
    torch.manual_seed(seed)
    a, a_scales = per_token_group_quant_fp8(torch.randn(m, k), 128, use_ue8m0=False)
    b, b_scales = block_weight(n, k, seed)
    wide_a = dequantise_blocks(a, a_scales, (1, 128), torch.float64)
    wide_b = dequantise_blocks(b, b_scales, dtype=torch.float64)
    expected, magnitude = wide_a @ wide_b.T, wide_a.abs() @ wide_b.abs().T
    for product in (fp8_utils.cutlass_scaled_mm, fp8_utils.w8a8_triton_block_scaled_mm):
        y = product(a, b, a_scales, b_scales, BLOCK, torch.float32)
        assert y.dtype == torch.float32
        assert ((y - expected).abs() <= magnitude * 2e-6).all()
        half = product(a, b, a_scales, b_scales, BLOCK, torch.bfloat16)
        assert torch.equal(half, y.bfloat16())


def test_a_product_of_scales_that_do_not_fit_is_refused():
    a, a_scales = per_token_group_quant_fp8(torch.randn(2, 256), 128, use_ue8m0=False)
    b, b_scales = block_weight(128, 256)
    with pytest.raises(ValueError, match="scales of"):
        fp8_utils.cutlass_scaled_mm(a, b, a_scales, b_scales[:, :1], BLOCK)
    with pytest.raises(ValueError, match="columns"):
        fp8_utils.cutlass_scaled_mm(a[:, :128], b, a_scales[:, :1], b_scales, BLOCK)


def make_op(use_deep_gemm: bool | None, chip: str | None = None) -> W8A8BlockFp8LinearOp:
    """On this machine, or on a chip with DeepGEMM."""
    shapes = GroupShape(*BLOCK), GroupShape(1, 128)
    elsewhere = (
        (Device.parse(chip), Libs.of([Lib("deep_gemm", "2.6"), Lib("torch"), Lib("triton", "3.4")]))
        if chip
        else ()
    )
    return W8A8BlockFp8LinearOp(*shapes, use_deep_gemm, *elsewhere)


def reasons_against_deep_gemm(op: W8A8BlockFp8LinearOp, weight: torch.Tensor) -> set[Why]:
    decision = op.selection.decide("", op.problem(weight, torch.bfloat16, has_bias=False))
    (candidate,) = (c for c in decision.candidates if c.backend == "deep_gemm")
    return {reason.why for reason in candidate.reasons}


def test_the_op_computes_what_a_layer_of_the_format_computes():
    weight, scales = block_weight(200, 300)
    x, bias = torch.randn(2, 3, 300), torch.randn(200)
    op = make_op(False)
    y = op.apply(x, weight, scales, bias)
    tensors = LinearTensors(op.format, weight, (200,), scales, bias=bias)
    decision = op.selection.decide("", op.problem(weight, x.dtype, has_bias=True))
    assert torch.equal(y, make_linear(decision, tensors)(x.view(6, 300)).view(2, 3, 200))
    wide = dequantise_blocks(weight, scales)
    assert torch.allclose(y, x @ wide.T + bias, rtol=1e-4, atol=1e-4)


def test_with_deep_gemm_decided_off_the_op_refuses_it_where_it_would_serve():
    weight, _ = block_weight(256, 256)
    assert reasons_against_deep_gemm(make_op(False, "sm_100"), weight) == {Why.POLICY}
    for decided in (True, None):
        op = make_op(decided, "sm_100")
        decision = op.selection.decide("", op.problem(weight, torch.bfloat16, has_bias=False))
        assert decision.chosen == "deep_gemm"


def test_a_cpu_computes_without_deep_gemm():
    weight, scales = block_weight(256, 256)
    x = torch.randn(2, 256)
    results = [make_op(decided).apply(x, weight, scales) for decided in (True, False, None)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert Why.DEVICE in reasons_against_deep_gemm(make_op(True), weight)


def test_a_weight_is_laid_out_once():
    weight, scales = block_weight(256, 256)
    op, x = make_op(False), torch.randn(2, 256)
    before = op.apply(x, weight, scales)
    kernel = op._kernels[weight]
    assert torch.equal(op.apply(x, weight, scales), before) and op._kernels[weight] is kernel


# ---------------------------------------------------------------- on machines with DeepGEMM


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("is_laid_out", [False, True])
def test_the_op_with_deep_gemm_computes_the_product_of_what_the_chip_rounds(
    capability, is_laid_out
):
    torch.manual_seed(0)
    stored, x = block_weight(256, 256), torch.randn(3, 256).bfloat16()
    is_ue8m0 = capability == 100
    given = [tensor.clone() for tensor in stored]
    with machine(Gpu(capability), STAND_INS):
        if is_laid_out:
            given = fp8_utils.deepgemm_post_process_fp8_weight_block(*given, BLOCK, is_ue8m0)
        y = make_op(True, f"sm_{capability}").apply(x, *given)
    if is_ue8m0:
        requant_weight_ue8m0_inplace(*stored)
    wide_x = dequantise_blocks(
        *per_token_group_quant_fp8(x, 128, use_ue8m0=is_ue8m0), (1, 128), torch.float64
    )
    wide_weight = dequantise_blocks(*stored, dtype=torch.float64)
    assert torch.equal(y, (wide_x @ wide_weight.T).bfloat16())


def test_laying_out_without_ue8m0_rounds_nothing():
    q, scales = block_weight(300, 256)
    before = codes(q).copy(), scales.clone()
    with machine(Gpu(90), STAND_INS):
        laid_out = fp8_utils.deepgemm_post_process_fp8_weight_block(q, scales, BLOCK, False)
    assert np.array_equal(codes(laid_out[0]), before[0]) and torch.equal(laid_out[1], before[1])


def test_experts_are_laid_out_like_each_alone():
    pairs = [block_weight(256, 256, seed) for seed in range(3)]
    q, scales = (torch.stack(tensors) for tensors in zip(*pairs))
    with machine(Gpu(100), STAND_INS):
        together = fp8_utils.deepgemm_post_process_fp8_weight_block(q, scales, BLOCK, True)
        alone = [
            fp8_utils.deepgemm_post_process_fp8_weight_block(*pair, BLOCK, True) for pair in pairs
        ]
    for i, (own_q, own_scales) in enumerate(alone):
        assert np.array_equal(codes(together[0][i]), codes(own_q))
        assert torch.equal(together[1][i], own_scales)


def test_activations_get_powers_of_two_by_default_where_deep_gemm_needs_them():
    x = torch.randn(4, 256)
    with machine(Gpu(100), STAND_INS):
        assert is_power_of_two(per_token_group_quant_fp8(x, 128)[1]).all()
    with machine(Gpu(90), STAND_INS):
        assert not is_power_of_two(per_token_group_quant_fp8(x, 128)[1]).any()
