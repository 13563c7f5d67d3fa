"""Re-quantising to power-of-two scales, against the definition in numpy, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import e4m3
from tests.kernels.test_fp8_utils import BLOCK, SEEDS, block_weight, codes
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearTensors
from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
from vllm.ops.fp8 import requant_error, requantised_ue8m0
from vllm.utils.fp8 import dequantise_blocks, is_power_of_two, per_block_cast_to_fp8


def layer(parts, k, seed=0, use_ue8m0=False, block=BLOCK) -> LinearTensors:
    """Merged weights of `parts` rows each, quantised one by one."""
    pairs = [block_weight(n, k, seed + i, use_ue8m0, block) for i, n in enumerate(parts)]
    return LinearTensors(
        WeightFormat("fp8", "block", block),
        torch.cat([q for q, _ in pairs]),
        tuple(parts),
        torch.cat([scales for _, scales in pairs]),
    )


def recast(q, scales, block=BLOCK):
    """What one weight becomes, block by block in numpy: codes and float32 scales."""
    values, new_scales = np.zeros(q.shape, np.uint8), np.ones(scales.shape, np.float32)
    wide = (e4m3.decode(codes(q)).astype(np.float32)).copy()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            part = wide[own] * np.float32(scales[i, j])
            if np.abs(part).max() > 0:
                new_scales[i, j] = e4m3.scale_of(np.abs(part).max(), True)
            values[own] = e4m3.encode(part / new_scales[i, j])
    return values, new_scales


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 300), k=st.integers(1, 300), seed=SEEDS)
def test_in_place_requantisation_rounds_the_dequantised_weight_again(n, k, seed):
    q, scales = block_weight(n, k, seed)
    wanted_codes, wanted_scales = recast(q, scales)
    requant_weight_ue8m0_inplace(q, scales)
    assert np.array_equal(codes(q), wanted_codes)
    assert np.array_equal(scales, wanted_scales)
    assert is_power_of_two(scales).all()


def test_experts_are_requantised_one_by_one():
    pairs = [block_weight(200, 300, seed) for seed in range(3)]
    q, scales = (torch.stack(tensors) for tensors in zip(*pairs))
    requant_weight_ue8m0_inplace(q, scales)
    for i, pair in enumerate(pairs):
        wanted_codes, wanted_scales = recast(*pair)
        assert np.array_equal(codes(q[i]), wanted_codes)
        assert np.array_equal(scales[i], wanted_scales)


def test_merged_parts_with_partial_blocks_are_requantised_like_each_alone():
    merged = layer((576, 192, 192), 576)
    assert merged.scales.shape == (5 + 2 + 2, 5)
    before = codes(merged.weight).copy(), merged.scales.clone()
    result = requantised_ue8m0(merged)
    row = scale_row = 0
    for n in merged.shard_rows:
        rows, scale_rows = slice(row, row + n), slice(scale_row, scale_row + -(-n // 128))
        wanted = recast(merged.weight[rows], merged.scales[scale_rows])
        assert np.array_equal(codes(result.weight[rows]), wanted[0])
        assert np.array_equal(result.scales[scale_rows], wanted[1])
        row, scale_row = rows.stop, scale_rows.stop
    assert np.array_equal(codes(merged.weight), before[0]), "the checkpoint's tensor was written"
    assert torch.equal(merged.scales, before[1])


def test_merged_experts_are_requantised_part_by_part():
    experts = [layer((192, 192), 200, seed) for seed in (0, 10)]
    merged = LinearTensors(
        experts[0].format,
        torch.stack([e.weight for e in experts]),
        (192, 192),
        torch.stack([e.scales for e in experts]),
    )
    result = requantised_ue8m0(merged)
    for i, expert in enumerate(experts):
        alone = requantised_ue8m0(expert)
        assert np.array_equal(codes(result.weight[i]), codes(alone.weight))
        assert torch.equal(result.scales[i], alone.scales)


def test_a_tall_weight_is_requantised_in_pieces_to_the_same_bits():
    q, scales = block_weight(2048 + 200, 130)
    wanted = recast(q, scales)
    requant_weight_ue8m0_inplace(q, scales)
    assert np.array_equal(codes(q), wanted[0]) and np.array_equal(scales, wanted[1])


def test_powers_of_two_need_no_requantisation_and_no_copy():
    tensors = layer((200, 100), 300, use_ue8m0=True)
    assert requantised_ue8m0(tensors) is tensors
    tensors.weight.view(torch.uint8).fill_(0x7F)  # NaN: whoever computes with it is refused
    error = requant_error(tensors)
    assert (error.relative, error.max_abs, error.is_exact) == (0, 0, True)
    tensors.scales[0, 0] *= 1.5
    with pytest.raises(ValueError, match="NaN"):
        requant_error(tensors)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 150), k=st.integers(1, 150))
def test_blocks_with_power_of_two_scales_keep_their_values_beside_others(seed, n, k):
    q, scales = block_weight(n + 128, k, seed, use_ue8m0=True)
    scales[-1] *= 1.3
    before = dequantise_blocks(q, scales, dtype=torch.float64)
    requant_weight_ue8m0_inplace(q, scales)
    after = dequantise_blocks(q, scales, dtype=torch.float64)
    assert torch.equal(after[:128], before[:128])


def test_a_weight_of_zeros_is_exact_whatever_its_scales():
    tensors = layer((128,), 128)
    tensors.weight.zero_()
    assert requant_error(tensors).is_exact
    assert is_power_of_two(requantised_ue8m0(tensors).scales).all()


@pytest.mark.parametrize("draw", ["gaussian", "student-t"])
def test_requantising_a_real_sized_weight_costs_2_5_to_2_8_percent(draw):
    if draw == "gaussian":
        wide = torch.randn(1024, 1024)
    else:
        wide = torch.distributions.StudentT(4.0).sample((1024, 1024))
    q, scales = per_block_cast_to_fp8(wide)
    tensors = LinearTensors(WeightFormat("fp8", "block", BLOCK), q, (1024,), scales)
    error = requant_error(tensors)
    assert 0.025 < error.relative < 0.028
    assert not error.is_exact


def test_the_error_is_that_of_the_weights_in_float64():
    tensors = layer((2300, 192), 200)
    error = requant_error(tensors)
    parts = zip(tensors.weight.split(tensors.shard_rows), tensors.scales.split([18, 2]))
    change, norm, worst = 0.0, 0.0, 0.0
    for q, scales in parts:
        stored = e4m3.decode(codes(q)) * spread(scales.numpy(), q.shape)
        new_codes, new_scales = recast(q, scales)
        difference = e4m3.decode(new_codes) * spread(new_scales, q.shape) - stored
        change += (difference**2).sum()
        norm += (stored**2).sum()
        worst = max(worst, np.abs(difference).max())
    assert error.relative == pytest.approx((change / norm) ** 0.5, rel=1e-6)
    assert error.max_abs == pytest.approx(worst, rel=1e-5)


def spread(scales: np.ndarray, shape, block=BLOCK) -> np.ndarray:
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return scales.astype(np.float64)[rows][:, columns]


def test_scales_of_merged_parts_are_not_taken_for_one_grid():
    merged = layer((576, 192, 192), 576)
    with pytest.raises(ValueError, match=r"\(8, 5\), not \(9, 5\)"):
        requant_weight_ue8m0_inplace(merged.weight, merged.scales)
