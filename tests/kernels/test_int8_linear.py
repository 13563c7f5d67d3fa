"""int8 layers by activations in int8, against what the format says."""

from dataclasses import replace

import pytest
import torch
from selection_cases import ask, linear

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.backends import scaled_mm
from vllm.kernels.interface import LinearTensors
from vllm.ops import int8

TOKEN, STATIC = ActScheme.DYNAMIC_TOKEN_INT8, ActScheme.STATIC_TENSOR_INT8


def layer(parts=(256, 64), k=512, has_bias=True, scheme=TOKEN):
    torch.manual_seed(0)
    n = sum(parts)
    tensors = LinearTensors(
        WeightFormat.parse("int8-channel"),
        torch.randint(-128, 128, (n, k), dtype=torch.int8),
        parts,
        torch.rand(n, 1) * 1e-3 + 1e-4,
        torch.randn(n) if has_bias else None,
        torch.tensor(0.05),
    )
    act = (scheme, ActScheme.NONE)
    problem = linear("int8-channel", n=n, k=k, parts=parts, act=act, dtype="fp32")
    return problem, tensors


def make(problem, tensors):
    decision = ask(problem, "cpu", wishes="--linear-backend scaled_mm")
    assert decision.chosen == "scaled_mm"
    return registry.maker(decision).linear(problem, tensors, decision.winner)


def expected(x, tensors, scheme):
    """In float64."""
    wide = x.double()
    amax = wide.abs().amax(1, keepdim=True)
    scale = amax / 127 if scheme is TOKEN else tensors.input_scale.double()
    codes = torch.where(amax > 0, wide / scale, 0).round().clamp(-128, 127)
    out = codes * scale @ (tensors.weight.double() * tensors.scales.double()).T
    return out if tensors.bias is None else out + tensors.bias.double()


@pytest.mark.parametrize("m", (0, 1, 16, 17, 33))
@pytest.mark.parametrize("scheme", [TOKEN, STATIC])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_the_rounded_activations(m, scheme, has_bias):
    problem, tensors = layer(has_bias=has_bias, scheme=scheme)
    x = torch.randn(m, problem.k) * torch.logspace(-2, 1, problem.k)
    y = make(problem, tensors)(x)
    assert y.shape == (m, problem.n) and y.dtype == x.dtype
    assert torch.allclose(y.double(), expected(x, tensors, scheme), rtol=1e-5, atol=1e-5)


def test_static_scales_saturate():
    problem, tensors = layer(scheme=STATIC)
    x = torch.full((1, problem.k), 100.0)
    assert torch.allclose(
        make(problem, tensors)(x), make(problem, tensors)(torch.full_like(x, 127 * 0.05))
    )


def test_a_token_of_zeros_gives_the_bias_and_one_of_nan_gives_nan():
    problem, tensors = layer()
    x = torch.zeros(3, problem.k)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    y = make(problem, tensors)(x)
    assert torch.equal(y[0], tensors.bias)
    assert bool(y[1].isnan().all()) and not bool(y[2].isfinite().any())


def test_a_row_is_the_same_in_any_batch():
    problem, tensors = layer()
    kernel, x = make(problem, tensors), torch.randn(40, 512)
    whole = kernel(x)
    assert all(torch.equal(kernel(x[i : i + 1]), whole[i : i + 1]) for i in (0, 17, 39))


@pytest.mark.parametrize("m", (1, 16, 17, 40))
def test_rows_that_fill_up_few_tokens_change_nothing(m):
    q, weight = torch.randint(-128, 128, (m + 48, 64), dtype=torch.int8).split([m, 48])
    exact = q.double() @ weight.double().T
    assert torch.equal(int8.product(q, weight, scaled_mm.LEAST_INT8_ROWS).double(), exact)


def test_the_largest_sum_is_exact_and_more_columns_are_refused():
    problem, _ = layer()
    most = scaled_mm.MAX_INT8_COLUMNS // 8 * 8
    low = torch.full((1, most), -128, dtype=torch.int8)
    assert int(int8.product(low, low.expand(8, -1).contiguous())[0, 0]) == 128 * 128 * most
    decision = ask(replace(problem, k=most + 8), "cpu", wishes="--linear-backend scaled_mm")
    assert decision.chosen is None
    (reason,) = next(c for c in decision.candidates if c.backend == "scaled_mm").reasons
    assert "do not fit into int32" in reason.text


def test_a_weight_only_checkpoint_is_not_served_by_it():
    problem, _ = layer()
    decision = ask(replace(problem, act=(ActScheme.NONE,)), "90")
    assert decision.chosen == "torch"


def test_on_a_gpu_it_serves_and_on_a_cpu_weight_only_kernels_come_first():
    problem = replace(layer()[0], dtype="bf16")
    chosen = {device: ask(problem, device).chosen for device in ("80", "89", "90", "100", "cpu")}
    assert chosen == {
        "80": "scaled_mm",
        "89": "scaled_mm",
        "90": "scaled_mm",
        "100": "marlin",
        "cpu": "cpu",
    }
    assert ask(problem, "cpu", wishes="--require-native").chosen == "scaled_mm"
