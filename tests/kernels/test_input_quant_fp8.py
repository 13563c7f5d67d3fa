"""QuantFP8 against the definition of E4M3 in numpy, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import STAND_INS, Gpu, machine

from tests.kernels import e4m3
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.utils.deep_gemm import get_tma_aligned_size
from vllm.utils.fp8 import is_power_of_two

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
cases = given(
    m=st.integers(1, 20),
    k=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)


def codes(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


def random_input(m: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(m, k, generator=generator) * 10).to(dtype)


@settings(max_examples=30, deadline=None)
@cases
def test_a_dynamic_scale_of_the_tensor(m, k, dtype, seed):
    x = random_input(m, k, dtype, seed)
    q, scale = QuantFP8(False, GroupShape.PER_TENSOR)(x)
    values = x.float().numpy()
    wanted = e4m3.scale_of(np.abs(values).max().clip(np.float32(1e-10)), False)
    assert scale.shape == (1,) and float(scale) == wanted
    assert np.array_equal(codes(q), e4m3.encode(values / wanted))


@settings(max_examples=30, deadline=None)
@cases
def test_a_dynamic_scale_per_token(m, k, dtype, seed):
    x = random_input(m, k, dtype, seed)
    x[0] = 0
    q, scales = QuantFP8(False, GroupShape.PER_TOKEN)(x)
    values = x.float().numpy()
    wanted = e4m3.scale_of(np.abs(values).max(1, keepdims=True).clip(np.float32(1e-10)), False)
    assert np.array_equal(scales, wanted)
    assert np.array_equal(codes(q), e4m3.encode(values / wanted))
    assert not q[0].float().any()


@settings(max_examples=30, deadline=None)
@cases
def test_a_static_scale_is_taken_as_it_is_and_large_values_saturate(m, k, dtype, seed):
    x = random_input(m, k, dtype, seed)
    scale = torch.tensor([0.031])
    q, same = QuantFP8(True, GroupShape.PER_TENSOR)(x, scale)
    assert same is scale
    assert np.array_equal(codes(q), e4m3.encode(x.float().numpy() / scale.numpy()))


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("column_major,tma_aligned", [(0, 0), (1, 0), (1, 1)])
def test_groups_come_in_the_layout_asked_for(use_ue8m0, column_major, tma_aligned):
    x = torch.randn(7, 300)
    quantise = QuantFP8(False, GroupShape(1, 128), None, column_major, tma_aligned, use_ue8m0)
    q, scales = quantise(x)
    wanted_q, wanted_scales = per_token_group_quant_fp8(x, 128, use_ue8m0=use_ue8m0)
    assert np.array_equal(codes(q), codes(wanted_q)) and torch.equal(scales, wanted_scales)
    assert bool(is_power_of_two(scales).all()) == use_ue8m0
    sizes = {(0, 0): (3, 1), (1, 0): (1, 7), (1, 1): (1, get_tma_aligned_size(7, 4))}
    assert scales.stride() == sizes[column_major, tma_aligned]


def test_whether_powers_of_two_are_wanted_is_asked_once():
    x = torch.randn(4, 256)
    with machine(Gpu(100), STAND_INS):
        quantise = QuantFP8(False, GroupShape(1, 128))
        refusing = QuantFP8(False, GroupShape(1, 128), use_ue8m0=False)
    assert is_power_of_two(quantise(x)[1]).all()
    assert not is_power_of_two(refusing(x)[1]).any()
    assert not is_power_of_two(QuantFP8(False, GroupShape(1, 128))(x)[1]).any()


@pytest.mark.parametrize("shape", [GroupShape.PER_TENSOR, GroupShape.PER_TOKEN, GroupShape(1, 128)])
def test_rows_are_padded_with_zeros_up_to_the_number_asked_for(shape):
    x = torch.randn(5, 256)
    plain, scales = QuantFP8(False, shape)(x)
    padded, same = QuantFP8(False, shape, num_token_padding=17)(x)
    assert padded.shape == (17, 256) and torch.equal(scales, same)
    assert np.array_equal(codes(padded[:5]), codes(plain)) and not codes(padded[5:]).any()
    assert QuantFP8(False, shape, num_token_padding=3)(x)[0].shape == (5, 256)


def test_calling_it_is_the_reference():
    x = torch.randn(3, 256)
    quantise = QuantFP8(False, GroupShape(1, 128))
    for called, native in zip(quantise(x), quantise.forward_native(x)):
        assert torch.equal(called.float(), native.float())


@pytest.mark.parametrize(
    "arguments",
    [
        {"static": True, "group_shape": GroupShape(1, 128)},
        {"static": True, "group_shape": GroupShape.PER_TOKEN},
        {"static": False, "group_shape": GroupShape.PER_CHANNEL},
        {"static": False, "group_shape": GroupShape(128, 128)},
        {"static": False, "group_shape": GroupShape.PER_TOKEN, "use_ue8m0": True},
        {"static": False, "group_shape": GroupShape.PER_TENSOR, "column_major_scales": True},
        {"static": False, "group_shape": GroupShape.PER_TOKEN, "tma_aligned_scales": True},
    ],
    ids=str,
)
def test_combinations_without_a_meaning_are_refused(arguments):
    with pytest.raises(ValueError, match="GroupShape"):
        QuantFP8(**arguments)


def test_a_scale_is_needed_when_static_and_refused_when_dynamic():
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="needs its scale"):
        QuantFP8(True, GroupShape.PER_TENSOR)(x)
    with pytest.raises(ValueError, match="leave `scale` out"):
        QuantFP8(False, GroupShape.PER_TENSOR)(x, torch.ones(1))
