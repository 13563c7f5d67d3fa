"""FP8 linear layers through Triton and torch's own GEMM, against what the formats say."""

from dataclasses import replace

import pytest
import torch
from fp8_linear_cases import SCHEMES, block_layer, check_plain_scales, inputs, make, relative
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat

pytestmark = MARKS
# The interpreter rounds to bfloat16 by cutting off: twice the error.
LIMIT = 4e-3
TOKENS = (1, 2, 16, 17, 33, 64, 100, *(() if IS_INTERPRETED else (129, 1000)))


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(
    ("parts", "k", "block", "has_bias"),
    [
        ((256,), 256, (128, 128), False),
        ((200,), 384, (128, 128), True),
        ((320, 64, 64), 512, (128, 128), False),
        ((192,), 576, (64, 64), False),
        ((48,), 208, (32, 32), True),
    ],
)
def test_blocks_are_computed_as_the_format_says(m, parts, k, block, has_bias):
    problem, tensors = block_layer(parts, k, block, has_bias, device=DEVICE)
    x = inputs(m, k, DEVICE)
    expected = make(problem, tensors, "emulation")(x)
    y = make(problem, tensors, "triton")(x)
    assert y.shape == expected.shape and y.dtype == torch.bfloat16
    assert relative(y, expected) < LIMIT


def test_no_token_gives_no_row():
    problem, tensors = block_layer((256,), 256, device=DEVICE)
    assert make(problem, tensors, "triton")(inputs(0, 256, DEVICE)).shape == (0, 256)


def test_a_row_is_the_same_in_any_batch():
    problem, tensors = block_layer((256,), 512, device=DEVICE)
    kernel = make(problem, tensors, "triton")
    x = inputs(40, 512, DEVICE)
    whole = kernel(x)
    assert torch.equal(kernel(x[:33]), whole[:33])


def test_rows_after_the_last_token_change_nothing():
    problem, tensors = block_layer((256,), 256, device=DEVICE)
    kernel = make(problem, tensors, "triton")
    x = inputs(64, 256, DEVICE)
    expected = kernel(x[:21].clone())
    x[21:] = float("nan")
    assert torch.equal(kernel(x[:21]), expected)


@needs_gpu
@pytest.mark.parametrize("m", (0, 1, 16, 33, 1000))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scale", ["tensor", "channel"])
@pytest.mark.parametrize("parts", [(256,), (320, 64, 64)])
@pytest.mark.parametrize("backend", ["scaled_mm", "cutlass", "skinny"])
def test_tensors_and_channels_are_computed_as_the_format_says(m, scheme, scale, parts, backend):
    if backend != "scaled_mm" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper")
    if backend == "skinny" and m > 16:
        pytest.skip("at most 16 tokens")
    check_plain_scales(m, scheme, scale, parts, DEVICE, backend)


@needs_gpu
@pytest.mark.parametrize("m", (1, 8, 16))
@pytest.mark.parametrize("backend", ["cutlass", "skinny"])
def test_a_kernel_takes_what_a_norm_quantised(m, backend):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper")
    problem, tensors = block_layer((256, 128), 512, has_bias=True, device=DEVICE)
    problem = replace(problem, m_range=(1, 16))
    kernel, x = make(problem, tensors, backend), inputs(m, 512, DEVICE)
    expected = make(problem, tensors, "emulation")(x)
    assert relative(kernel(kernel.input_quant(m).quantise(x)), expected) < LIMIT
    assert relative(kernel(x), expected) < LIMIT


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "scaled_mm", "cutlass"])
def test_a_captured_graph_serves_other_tokens(backend):
    problem, tensors = block_layer((256,), 512, device=DEVICE)
    if backend != "triton":
        acts = (ActScheme.DYNAMIC_TOKEN,)
        problem = replace(problem, weight=WeightFormat("fp8", "channel"), act=acts)
        tensors.format, tensors.scales = problem.weight, torch.rand(256, 1, device=DEVICE)
    kernel = make(problem, tensors, backend)
    held = inputs(8, 512, DEVICE)
    kernel(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(held)
    held.copy_(inputs(8, 512, DEVICE) * 3)
    graph.replay()
    assert torch.equal(y, kernel(held))
