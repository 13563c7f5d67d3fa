"""The emulation backends compute what a chip would: which values are rounded, and how."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import e4m3
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearKernel, LinearTensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import Origin
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.utils.fp8 import dequantise_blocks, per_block_cast_to_fp8
from vllm.utils.math_utils import cdiv

FORMAT = WeightFormat("fp8", "block", (128, 128))
BACKENDS = ("emulation", "emulation-ue8m0")


def merged(parts: tuple[int, ...], k: int, use_ue8m0: bool = False) -> LinearTensors:
    pairs = [per_block_cast_to_fp8(torch.randn(n, k), use_ue8m0=use_ue8m0) for n in parts]
    weight, scales = (torch.cat(tensors) for tensors in zip(*pairs))
    return LinearTensors(FORMAT, weight, parts, scales)


def winner_of(backend: str, problem: LinearProblem) -> Candidate:
    """The choice when the backend is asked for by a flag."""
    policy = Policy((Override("linear", backend, Origin(2, f"--linear-backend {backend}")),))
    specs = registry.specs("linear")
    return select(problem, Device.parse("cpu"), Libs(), policy, specs).winner


def make(backend: str, tensors: LinearTensors, dtype: str = "fp32") -> LinearKernel:
    problem = LinearProblem(
        *tensors.weight.shape,
        tensors.format,
        (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE),
        dtype,
        bias=tensors.bias is not None,
        parts=tensors.shard_rows,
    )
    return registry.backend(backend).linear(problem, tensors, winner_of(backend, problem))


# ---------------------------------------------------------------- the same, from the definitions


def wide_activations(x: torch.Tensor, use_ue8m0: bool) -> np.ndarray:
    values = x.float().numpy()
    wide = np.empty(values.shape)
    for start in range(0, values.shape[1], 128):
        own = np.s_[:, start : start + 128]
        scale = e4m3.scale_of(np.abs(values[own]).max(1, keepdims=True), use_ue8m0)
        wide[own] = e4m3.decode(e4m3.encode(values[own] / scale)) * scale
    return wide


def wide_weight(tensors: LinearTensors, use_ue8m0: bool) -> np.ndarray:
    values = e4m3.decode(tensors.weight.view(torch.uint8).numpy())
    wide = np.empty(values.shape)
    row = scale_row = 0
    for num_rows in tensors.shard_rows:
        for i in range(0, num_rows, 128):
            for j in range(0, values.shape[1], 128):
                own = np.s_[row + i : row + min(i + 128, num_rows), j : j + 128]
                scale = tensors.scales[scale_row + i // 128, j // 128].numpy()
                block = values[own].astype(np.float32) * scale
                if use_ue8m0:
                    scale = e4m3.scale_of(np.abs(block).max(), True)
                    block = e4m3.decode(e4m3.encode(block / scale)) * scale
                wide[own] = block
        row, scale_row = row + num_rows, scale_row + cdiv(num_rows, 128)
    return wide


def assert_as_defined(backend: str, tensors: LinearTensors, x: torch.Tensor) -> None:
    use_ue8m0 = backend == "emulation-ue8m0"
    a, b = wide_activations(x, use_ue8m0), wide_weight(tensors, use_ue8m0)
    error = np.abs(make(backend, tensors)(x).double().numpy() - a @ b.T)
    # float32 sums of a few hundred terms. One value rounded otherwise would be off by 2^-4 of it.
    assert (error <= 2e-6 * (np.abs(a) @ np.abs(b).T) + 1e-30).all()


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 6),
    parts=st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple),
    k=st.integers(1, 400),
    seed=st.integers(0, 2**31),
)
def test_activations_and_weights_are_rounded_as_described(backend, m, parts, k, seed):
    torch.manual_seed(seed)
    assert_as_defined(backend, merged(parts, k), torch.randn(m, k))


@pytest.mark.parametrize("backend", BACKENDS)
def test_merged_projections_with_partial_blocks_of_rows_and_columns(backend):
    """QKV of SmolLM2: 576 | 192 | 192 rows, 576 columns."""
    assert_as_defined(backend, merged((576, 192, 192), 576), torch.randn(5, 576))


def test_single_values_are_rounded_to_the_bit():
    """With one column there is no sum: the output is the product of two rounded numbers."""
    x, tensors = torch.randn(400, 1), merged((300,), 1)
    for backend in BACKENDS:
        use_ue8m0 = backend == "emulation-ue8m0"
        a, b = wide_activations(x, use_ue8m0), wide_weight(tensors, use_ue8m0)
        wanted = a.astype(np.float32) @ b.astype(np.float32).T
        assert np.array_equal(make(backend, tensors)(x).numpy(), wanted)


def test_with_power_of_two_scales_everywhere_both_compute_the_same():
    tensors = merged((200, 100), 300, use_ue8m0=True)
    # A greatest value of 448 per group makes every activation scale a power of two too.
    x = torch.randn(4, 300).clamp(-4, 4)
    x[:, ::128] = 448 / 64
    first, second = (make(backend, tensors)(x) for backend in BACKENDS)
    assert torch.equal(first, second)
    tensors = merged((200, 100), 300)
    first, second = (make(backend, tensors)(x) for backend in BACKENDS)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_stored_weight_is_never_written(backend):
    tensors = merged((200,), 300)
    stored, scales = tensors.weight.view(torch.uint8).clone(), tensors.scales.clone()
    make(backend, tensors)(torch.randn(2, 300))
    assert torch.equal(tensors.weight.view(torch.uint8), stored)
    assert torch.equal(tensors.scales, scales)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name,dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_bias_is_added_before_the_one_rounding_to_the_output_type(backend, name, dtype):
    tensors = merged((200,), 300)
    tensors.bias = torch.randn(200)
    plain = dataclasses.replace(tensors, bias=None)
    x = torch.randn(3, 300).to(dtype)
    y = make(backend, tensors, name)(x)
    assert y.dtype == dtype
    assert torch.equal(y, (make(backend, plain)(x.float()) + tensors.bias).to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_no_rows(backend):
    assert make(backend, merged((200,), 300))(torch.randn(0, 300)).shape == (0, 200)


def test_ue8m0_costs_1_44_to_1_65_times_the_error_of_float32_scales():
    """Against what the checkpoint holds. Its own rounding is in neither error."""
    x, weight = torch.randn(32, 2048), torch.randn(2048, 2048)
    q, scales = per_block_cast_to_fp8(weight)
    exact = x.double() @ dequantise_blocks(q, scales, dtype=torch.float64).T
    tensors = LinearTensors(FORMAT, q, (2048,), scales)
    float32, ue8m0 = (
        float((make(backend, tensors)(x) - exact).norm() / exact.norm()) for backend in BACKENDS
    )
    assert 0.025 < float32 < 0.027
    assert 1.44 < ue8m0 / float32 < 1.65
