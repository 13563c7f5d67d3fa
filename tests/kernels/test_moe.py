"""Every backend that computes experts, against a sum in float64 written token by token."""

import pytest
import torch
from torch import Tensor

from vllm.architectures.router import Router
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearTensors, MoETensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import MoEProblem
from vllm.ops import torch_ops
from vllm.ops.moe_router import route
from vllm.utils.torch_utils import SHORT_NAMES, dtype_of

BACKENDS = [
    name for name in registry.backend_names("moe") if hasattr(registry.backend(name), "moe")
]
ON_CPU = [
    name
    for name in BACKENDS
    if any("cpu" in spec.devices for spec in registry.specs("moe") if spec.backend == name)
]
FORMATS = ("fp32", "bf16", "fp16", "fp8-block", "fp8-channel", "fp8-tensor", "fp8-block[32x48]")
# experts, top k, hidden, intermediate: blocks and panels that end inside; one expert; all chosen.
SIZES = ((7, 2, 180, 136), (1, 1, 33, 5), (4, 4, 64, 40))


def stacked(weight: WeightFormat, shard_rows: tuple[int, ...], columns: int, count: int):
    """Random weights of `count` experts and their scales."""
    values = torch.randn(count, sum(shard_rows), columns) / columns**0.5
    if not weight.is_quantized:
        return values.to(dtype_of(weight.element)), None
    scales = torch.rand(count, *weight.scale_shape(shard_rows, columns)) + 0.5
    return values.to(torch.float8_e4m3fn), scales


def make_experts(name: str, count: int, hidden: int, inner: int) -> MoETensors:
    weight = WeightFormat.parse(name)
    gate_up, gate_up_scales = stacked(weight, (inner, inner), hidden, count)
    down, down_scales = stacked(weight, (hidden,), inner, count)
    return MoETensors(weight, gate_up, down, gate_up_scales, down_scales)


def problem_of(tensors: MoETensors, top_k: int, dtype: torch.dtype) -> MoEProblem:
    count, hidden, inner = tensors.down.shape
    return MoEProblem(count, top_k, hidden, inner, tensors.format, dtype=SHORT_NAMES[dtype])


def make(backend: str, tensors: MoETensors, top_k: int, dtype: torch.dtype = torch.float32):
    problem = problem_of(tensors, top_k, dtype)
    winner = Candidate(backend, problem.act[0])
    return registry.backend(backend).moe(problem, tensors, winner)


def wide(weights: LinearTensors) -> Tensor:
    scales = weights.row_scales()
    return torch_ops.pack_linear(weights.weight, scales, weights.block_k).dequantize().double()


def expected(tensors: MoETensors, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    experts = [tuple(map(wide, tensors.expert(i))) for i in range(tensors.num_experts)]
    for token, (row, shares, chosen) in enumerate(zip(x.double(), weights.double(), ids)):
        for share, expert in zip(shares, chosen):
            gate_up, down = experts[int(expert)]
            gate, up = (gate_up @ row).chunk(2)
            out[token] += share * (down @ (torch.nn.functional.silu(gate) * up))
    return out


def routed(num_tokens: int, count: int, top_k: int) -> tuple[Tensor, Tensor]:
    return route(torch.randn(num_tokens, count) * 2, top_k, renormalise=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_the_backends_tested_here_are_all_that_run_on_a_cpu():
    assert ON_CPU == ["cpu", "torch"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_token_gets_the_weighted_sum_of_its_experts(backend, name, sizes):
    count, top_k, hidden, inner = sizes
    tensors = make_experts(name, count, hidden, inner)
    kernel = make(backend, tensors, top_k)
    for num_tokens in (1, 2, 31):
        x = torch.randn(num_tokens, hidden)
        weights, ids = routed(num_tokens, count, top_k)
        wanted = expected(tensors, x, weights, ids)
        torch.testing.assert_close(kernel(x, weights, ids).double(), wanted, atol=2e-5, rtol=2e-5)
        assert num_tokens == 1 or wanted.std() > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_half_precision_loses_only_its_own_bits(backend, dtype):
    tensors = make_experts("fp8-block", 6, 96, 72)
    x = torch.randn(20, 96).to(dtype)
    weights, ids = routed(20, 6, 3)
    y = make(backend, tensors, 3, dtype)(x, weights, ids)
    assert y.dtype == dtype
    wanted = expected(tensors, x, weights, ids)
    # Rounded after gate-up, after the activation, as each expert's result and as their sum.
    bound = 6 * torch.finfo(dtype).eps * wanted.abs().max()
    assert (y.double() - wanted).abs().max() < bound


@pytest.mark.parametrize("backend", ON_CPU)
def test_experts_that_a_token_does_not_ask_for_do_not_count(backend):
    """Whatever they hold: infinity times nothing would be NaN."""
    tensors = make_experts("fp32", 5, 48, 24)
    x, ids = torch.randn(9, 48), torch.tensor([[3, 1]] * 8 + [[0, 2]])
    weights = torch.full((9, 2), 0.5)
    wanted = expected(tensors, x, weights, ids)[:8]
    tensors.down[[0, 2, 4]] = float("inf")
    y = make(backend, tensors, 2)(x, weights, ids)[:8]
    torch.testing.assert_close(y.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ON_CPU)
def test_a_token_that_is_not_finite_spoils_no_other(backend):
    tensors = make_experts("bf16", 4, 48, 24)
    kernel = make(backend, tensors, 2)
    x = torch.randn(12, 48)
    weights, ids = routed(12, 4, 2)
    wanted = kernel(x, weights, ids)
    x[5] = float("nan")
    y = kernel(x, weights, ids)
    assert bool(y[5].isnan().all())
    others = torch.arange(12) != 5
    torch.testing.assert_close(y[others], wanted[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8-block"])
def test_native_results_of_a_token_have_the_same_bits_in_any_company(name, dtype):
    # hidden is no multiple of any vector, so that a token's columns fall on tails and bodies.
    tensors = make_experts(name, 8, 77, 40)
    kernel = make("cpu", tensors, 3, dtype)
    x, logits = torch.randn(300, 77).to(dtype), torch.randn(300, 8)
    whole = kernel(x, *route(logits, 3, renormalise=True))
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(100, 229), slice(299, 300)):
        part = kernel(x[rows], *route(logits[rows], 3, renormalise=True))
        assert torch.equal(part, whole[rows])


def test_many_tokens_on_one_expert_and_none_on_others():
    tensors = make_experts("fp8-block", 16, 64, 32)
    x = torch.randn(8192, 64)
    ids = torch.full((8192, 2), 5)
    ids[:, 1] = 11
    weights = torch.rand(8192, 2)
    y = make("cpu", tensors, 2)(x, weights, ids)
    some = torch.tensor([0, 4095, 8191])
    wanted = expected(tensors, x[some], weights[some], ids[some])
    torch.testing.assert_close(y[some].double(), wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(y, make("torch", tensors, 2)(x, weights, ids), atol=2e-5, rtol=2e-5)


def test_nan_among_fp8_weights_names_the_expert():
    tensors = make_experts("fp8-block", 4, 48, 24)
    tensors.down.view(torch.uint8)[2, 3, 5] = 0x7F
    with pytest.raises(ValueError, match=r"expert 2: weight: given 1 E4M3 NaN"):
        make("cpu", tensors, 2)


def test_the_router_takes_the_likeliest_and_may_renormalise():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    likely = torch.softmax(logits, -1)[0]
    weights, ids = route(logits, 2, renormalise=False)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights[0], likely[[1, 3]])
    weights, _ = route(logits, 2, renormalise=True)
    torch.testing.assert_close(weights[0], likely[[1, 3]] / likely[[1, 3]].sum())


def test_the_router_computes_probabilities_in_float32():
    weights, ids = route(torch.randn(5, 16).bfloat16(), 4, renormalise=True)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))


def test_experts_are_chosen_from_the_topk_groups_alone():
    routing = Router(8, 4, renormalise=False, num_groups=4, topk_groups=2)
    _, ids = route(torch.randn(50, 8), **routing.arguments())
    assert all(len(set((row // 2).tolist())) == 2 for row in ids)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"top_k": 9}, "num_experts_per_tok = 9 is more than num_experts = 8"),
        (
            {"num_groups": 4},
            "num_experts_per_tok = 4, but topk_group = 1 of n_group = 4 .* up to 2",
        ),
        ({"num_groups": 8, "topk_groups": 3}, "leave 3 of 8 experts .* up to 3"),
        ({"num_groups": 3}, "n_group = 3 groups of 8 experts; accepted: an n_group that divides"),
        ({"num_groups": 2, "topk_groups": 3}, "topk_group = 3 of n_group = 2"),
        ({"num_groups": 2, "topk_groups": 0}, "topk_group = 0 of n_group = 2"),
    ],
)
def test_a_router_without_enough_experts_to_choose_from_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        Router(**{"num_experts": 8, "top_k": 4, "renormalise": True} | given)
