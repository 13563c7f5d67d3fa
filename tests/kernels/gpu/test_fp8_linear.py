"""FP8 linear layers through Triton and torch's own GEMM, against what the formats say.

TRITON_INTERPRET=1 runs the Triton kernel on the CPU.
"""

import os
from dataclasses import replace

import pytest
import torch

from vllm.kernels import registry
from vllm.kernels.problem import ActScheme, LinearProblem, WeightFormat
from vllm.kernels.select import select
from vllm.kernels.spec import Device, Lib, Libs, Origin, Override, Policy
from vllm.kernels.tensors import LinearTensors
from vllm.platforms.interface import DeviceCapability

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or the interpreter"
    ),
]
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
# Triton's interpreter cuts float32 off where the chip rounds it to bfloat16.
LIMIT = 8e-3 if IS_INTERPRETED else 4e-3
H100 = Device("cuda", DeviceCapability(9, 0))
LIBS = Libs.of([registry.built(), Lib("triton", "3.6.0"), Lib("torch", torch.__version__)])
POLICIES = {
    name: Policy(overrides=(Override("linear", name, Origin(2, "test")),))
    for name in ("triton", "scaled_mm", "emulation")
}


def make(problem: LinearProblem, tensors: LinearTensors, backend: str):
    decision = select(problem, H100, LIBS, POLICIES[backend], registry.specs("linear"))
    module = registry.maker(decision)
    return module.linear(problem, tensors, decision.winner)


def block_layer(parts, k, block=(128, 128), has_bias=False, seed=0):
    torch.manual_seed(seed)
    n = sum(parts)
    rows = sum(-(-part // block[0]) for part in parts)
    weight_format = WeightFormat("fp8", "block", block)
    weight = torch.randn(n, k, device=DEVICE).clamp(-3, 3) * 100
    tensors = LinearTensors(
        weight_format,
        weight.to(torch.float8_e4m3fn),
        tuple(parts),
        torch.rand(rows, -(-k // block[1]), device=DEVICE) * 1e-3 + 1e-4,
        torch.randn(n, device=DEVICE) if has_bias else None,
    )
    acts = (ActScheme.DYNAMIC_GROUP128,)
    problem = LinearProblem(n=n, k=k, weight=weight_format, act=acts, dtype="bf16", parts=parts)
    return problem, tensors


def inputs(m: int, k: int) -> torch.Tensor:
    x = torch.randn(m, k, device=DEVICE) * torch.logspace(-2, 2, k, device=DEVICE)
    return x.bfloat16()


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


TOKENS = (1, 2, 16, 17, 33, 64, 100) if IS_INTERPRETED else (1, 2, 16, 17, 33, 64, 100, 129, 1000)


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
    problem, tensors = block_layer(parts, k, block, has_bias)
    x = inputs(m, k)
    expected = make(problem, tensors, "emulation")(x)
    y = make(problem, tensors, "triton")(x)
    assert y.shape == expected.shape and y.dtype == torch.bfloat16
    assert relative(y, expected) < LIMIT


def test_no_token_gives_no_row():
    problem, tensors = block_layer((256,), 256)
    assert make(problem, tensors, "triton")(inputs(0, 256)).shape == (0, 256)


def test_a_row_is_the_same_in_any_batch():
    problem, tensors = block_layer((256,), 512)
    kernel = make(problem, tensors, "triton")
    x = inputs(40, 512)
    whole = kernel(x)
    assert torch.equal(kernel(x[:33]), whole[:33])


def test_rows_after_the_last_token_change_nothing():
    problem, tensors = block_layer((256,), 256)
    kernel = make(problem, tensors, "triton")
    x = inputs(64, 256)
    expected = kernel(x[:21].clone())
    x[21:] = float("nan")
    assert torch.equal(kernel(x[:21]), expected)


@pytest.mark.skipif(IS_INTERPRETED, reason="torch's own kernels need a GPU")
@pytest.mark.parametrize("m", (0, 1, 16, 33, 1000))
@pytest.mark.parametrize("scheme", ["dynamic-token", "dynamic-tensor", "static-tensor"])
@pytest.mark.parametrize("scale", ["tensor", "channel"])
@pytest.mark.parametrize("parts", [(256,), (320, 64, 64)])
def test_tensors_and_channels_are_computed_as_the_format_says(m, scheme, scale, parts):
    problem, tensors = block_layer(parts, 512, has_bias=True)
    x = inputs(m, 512)
    problem = replace(problem, weight=WeightFormat("fp8", scale), act=(ActScheme(scheme),))
    tensors.format = problem.weight
    count = len(parts) if scale == "tensor" else problem.n
    tensors.scales = torch.rand(count, 1, device=DEVICE) * 1e-3 + 1e-4
    if scheme == "static-tensor":
        tensors.input_scale = torch.tensor(0.7, device=DEVICE)
    y = make(problem, tensors, "scaled_mm")(x)
    assert y.shape == (m, problem.n)
    if m:
        assert relative(y, reference(x, tensors, scheme)) < LIMIT


def reference(x: torch.Tensor, tensors: LinearTensors, scheme: str) -> torch.Tensor:
    x = x.double()
    if scheme == "static-tensor":
        scale = tensors.input_scale.double()
    else:
        amax = x.abs().amax(-1, keepdim=True) if scheme == "dynamic-token" else x.abs().amax()
        scale = amax / 448
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    weight = tensors.weight.double() * tensors.row_scales().double()
    return rounded @ weight.T + tensors.bias.double()


@pytest.mark.skipif(IS_INTERPRETED, reason="graphs need a GPU")
@pytest.mark.parametrize("backend", ["triton", "scaled_mm"])
def test_a_captured_graph_serves_other_tokens(backend):
    problem, tensors = block_layer((256,), 512)
    if backend == "scaled_mm":
        acts = (ActScheme.DYNAMIC_TOKEN,)
        problem = replace(problem, weight=WeightFormat("fp8", "channel"), act=acts)
        tensors.format, tensors.scales = problem.weight, torch.rand(256, 1, device=DEVICE)
    kernel = make(problem, tensors, backend)
    held = inputs(8, 512)
    kernel(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(held)
    held.copy_(inputs(8, 512) * 3)
    graph.replay()
    assert torch.equal(y, kernel(held))
