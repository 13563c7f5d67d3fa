"""FP8 linear layers with random weights, and what their formats say of them."""

from dataclasses import replace

import torch

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearTensors
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import Origin
from vllm.kernels.select.select import select
from vllm.machine import NATIVE, Device, DeviceCapability, Lib, Libs

SCHEMES = ("dynamic-token", "dynamic-tensor", "static-tensor")
H100 = Device("cuda", DeviceCapability(9, 0))
KERNELS = ("sm90_fp8_block_gemm/90a", "skinny_fp8_block_gemm/90a")
LIBS = Libs.of([registry.built(), Lib("triton", "3.6.0"),
                Lib("torch", torch.__version__.partition("+")[0], ("scaled-blocks",)),
                Lib(NATIVE, "0.1.0", KERNELS)])  # fmt: skip
POLICIES = {
    name: Policy(overrides=(Override("linear", name, Origin(2, "test")),))
    for name in ("triton", "scaled_mm", "scaled_mm-blockwise", "emulation", "cutlass", "skinny")
}


def make(problem: LinearProblem, tensors: LinearTensors, backend: str):
    decision = select(problem, H100, LIBS, POLICIES[backend], registry.specs("linear"))
    module = registry.maker(decision)
    return module.linear(problem, tensors, decision.winner)


def block_layer(parts, k, block=(128, 128), has_bias=False, device="cpu"):
    torch.manual_seed(0)
    n = sum(parts)
    rows = sum(-(-part // block[0]) for part in parts)
    weight_format = WeightFormat("fp8", "block", block)
    weight = torch.randn(n, k, device=device).clamp(-3, 3) * 100
    tensors = LinearTensors(
        weight_format,
        weight.to(torch.float8_e4m3fn),
        tuple(parts),
        torch.rand(rows, -(-k // block[1]), device=device) * 1e-3 + 1e-4,
        torch.randn(n, device=device) if has_bias else None,
    )
    acts = (ActScheme.DYNAMIC_GROUP128,)
    problem = LinearProblem(n=n, k=k, weight=weight_format, act=acts, dtype="bf16", parts=parts)
    return problem, tensors


def inputs(m: int, k: int, device: str = "cpu") -> torch.Tensor:
    x = torch.randn(m, k, device=device) * torch.logspace(-2, 2, k, device=device)
    return x.bfloat16()


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def check_plain_scales(
    m: int, scheme: str, scale: str, parts: tuple[int, ...], device: str, backend: str = "scaled_mm"
):
    """That a kernel computes a layer with a scale for each part or row as the format says; one with
    dynamic activations may have an input scale, which is not looked at."""
    problem, tensors = block_layer(parts, 512, has_bias=True, device=device)
    x = inputs(m, 512, device)
    problem = replace(
        problem, weight=WeightFormat("fp8", scale), act=(ActScheme(scheme),), m_range=(1, max(1, m))
    )
    tensors.format = problem.weight
    count = len(parts) if scale == "tensor" else problem.n
    tensors.scales = torch.rand(count, 1, device=device) * 1e-3 + 1e-4
    tensors.input_scale = torch.tensor(0.7, device=device)
    y = make(problem, tensors, backend)(x)
    assert y.shape == (m, problem.n)
    if m:
        assert relative(y, reference(x, tensors, scheme)) < 4e-3


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
