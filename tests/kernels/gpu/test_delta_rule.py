"""The Triton gated delta-net against its definition in float64, token by token."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.kernels.delta_numerics import delta_rule_comparison
from vllm.kernels.numerics import max_error
from vllm.kernels.select.problem import DeltaRuleProblem
from vllm.kernels.triton import delta_rule as kernels

pytestmark = MARKS
# Requests of one step: (tokens now, tokens before); one that starts has none before.
STEPS = {
    "one token each": ((1, 0), (1, 5), (1, 3)),
    "mixed": ((1, 0), (7, 3), (33, 0), (1, 9), (17, 70), (2, 1)),
    "several chunks": ((1, 2), (70, 0), (65, 70), (129, 1)),
    "one prompt": ((200, 0),),
    "few tokens each": ((2, 0), (3, 5), (1, 2), (7, 1), (8, 0), (8, 9)),
    "a few more": ((8, 3), (9, 0), (9, 4), (2, 1), (10, 70)),
}
SIZES = ((128, 128), (24, 20), (40, 33), (256, 64))[: 2 if IS_INTERPRETED else 4]
NUM_SLOTS, KEY_HEADS, HEADS = 9, 2, 4
# Of ||y - wanted|| / ||wanted||: products of chunks are TF32.
TOLERANCE = 3e-3


def requests(step: tuple[tuple[int, int], ...]) -> dict[str, Tensor]:
    starts = torch.tensor([0, *(now for now, _ in step)]).cumsum(0)
    lens = torch.tensor([now + before for now, before in step])
    slots = 1 + torch.randperm(max(NUM_SLOTS - 1, len(step)))[: len(step)] % (NUM_SLOTS - 1)
    named = {"state_slots": slots, "query_start_loc": starts, "seq_lens": lens}
    return {name: x.int().to(DEVICE) for name, x in named.items()}


def rule_case(step, key_dim: int, value_dim: int, dtype=torch.float32) -> dict[str, Tensor]:
    """Views of one projection, as the layer gives them; free slots hold NaN."""
    num_tokens = sum(now for now, _ in step)
    sizes = (KEY_HEADS * key_dim, KEY_HEADS * key_dim, HEADS * value_dim)
    q, k, v = torch.randn(num_tokens, sum(sizes), device=DEVICE).to(dtype).split(sizes, 1)
    ba = torch.randn(num_tokens, 2 * HEADS, device=DEVICE).to(dtype)
    case = {
        "query": q.unflatten(1, (KEY_HEADS, key_dim)),
        "key": k.unflatten(1, (KEY_HEADS, key_dim)),
        "value": v.unflatten(1, (HEADS, value_dim)),
        "a": ba[:, HEADS:],
        "b": ba[:, :HEADS],
        "decay_rate": torch.rand(HEADS, device=DEVICE),
        "dt_bias": torch.randn(HEADS, device=DEVICE),
        "state": torch.full((NUM_SLOTS, HEADS, key_dim, value_dim), float("nan"), device=DEVICE),
        **requests(step),
    }
    return with_states(case, step)


def conv_case(step, channels: int, taps: int, dtype=torch.float32) -> dict[str, Tensor]:
    num_tokens = sum(now for now, _ in step)
    state = torch.full((NUM_SLOTS, taps - 1, channels), float("nan"), device=DEVICE).to(dtype)
    case = {
        "x": torch.randn(num_tokens, channels + 5, device=DEVICE).to(dtype)[:, :channels],
        "weight": torch.randn(taps, channels, device=DEVICE),
        "state": state,
        **requests(step),
    }
    return with_states(case, step)


def with_states(case: dict[str, Tensor], step) -> dict[str, Tensor]:
    for slot, (_, before) in zip(case["state_slots"].tolist(), step, strict=True):
        if before:
            case["state"][slot] = torch.randn(case["state"].shape[1:], device=DEVICE)
    return case


def pieces(case: dict[str, Tensor]):
    """(tokens, slot, whether it starts) of each request."""
    bounds = pairwise(case["query_start_loc"].tolist())
    for (begin, end), slot, seq_len in zip(
        bounds, case["state_slots"].tolist(), case["seq_lens"].tolist(), strict=True
    ):
        yield range(begin, end), slot, seq_len == end - begin


def rule_by_definition(case: dict[str, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    c = {name: x.double() if x.is_floating_point() else x for name, x in case.items()}
    out, states = torch.zeros_like(c["value"]), {}
    group = HEADS // KEY_HEADS

    def unit(x: Tensor) -> Tensor:
        scaled = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return scaled.repeat_interleave(group, 0)

    for tokens, slot, starts in pieces(case):
        state = torch.zeros_like(c["state"][slot]) if starts else c["state"][slot].clone()
        for t in tokens:
            q, k = unit(c["query"][t]) * c["query"].shape[2] ** -0.5, unit(c["key"][t])
            softplus = torch.nn.functional.softplus(c["a"][t] + c["dt_bias"])
            state = state * torch.exp(-c["decay_rate"] * softplus)[:, None, None]
            delta = c["value"][t] - torch.einsum("hk,hkv->hv", k, state)
            delta = delta * torch.sigmoid(c["b"][t])[:, None]
            state = state + k[:, :, None] * delta[:, None]
            out[t] = torch.einsum("hk,hkv->hv", q, state)
        states[slot] = state
    return out, states


def conv_by_definition(case: dict[str, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    x, weight = case["x"].double(), case["weight"].double()
    out, states = torch.zeros_like(x), {}
    for tokens, slot, starts in pieces(case):
        state = case["state"][slot].double()
        rows = torch.cat(
            (torch.zeros_like(state) if starts else state, x[tokens.start : tokens.stop])
        )
        for i, t in enumerate(tokens):
            out[t] = torch.nn.functional.silu((rows[i : i + len(weight)] * weight).sum(0))
        states[slot] = rows[len(tokens) :]
    return out, states


def assert_close(case, run, wanted: Tensor, states: dict[int, Tensor], tolerance: float) -> None:
    before = case["state"].clone()
    y = run(**case, out=torch.full(wanted.shape, float("nan"), device=DEVICE))
    assert (y.double() - wanted).norm() < tolerance * wanted.norm()
    for slot, state in states.items():
        assert (case["state"][slot].double() - state).norm() < tolerance * state.norm()
    for slot in set(range(NUM_SLOTS)) - set(states):
        assert torch.equal(case["state"][slot].nan_to_num(7), before[slot].nan_to_num(7))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_outputs_and_states_are_those_of_the_recurrence(step, sizes):
    case = rule_case(step, *sizes)
    assert_close(case, kernels.gated_delta_rule, *rule_by_definition(case), TOLERANCE)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_it_passes_the_comparison_of_a_start(dtype, sizes):
    problem = DeltaRuleProblem(KEY_HEADS, HEADS, *sizes, dtype)
    assert delta_rule_comparison(problem, "triton", torch.device(DEVICE))() < max_error(problem)


@pytest.mark.parametrize("decay_rate", (1e-4, 0))
@pytest.mark.parametrize("spread", (0, 0.1), ids=("the same", "alike"))
@pytest.mark.parametrize("size", (64, 128))
def test_keys_that_repeat_keep_their_digits(size, spread, decay_rate):
    """Then every row of the system is as large as it can be, and cancels in its inverse."""
    case = rule_case(((150, 0), (70, 3)), size, size)
    case["key"][:] = case["key"][:1] + spread * torch.randn_like(case["key"])
    case["b"][:], case["decay_rate"][:] = 9, decay_rate
    assert_close(case, kernels.gated_delta_rule, *rule_by_definition(case), 3 * TOLERANCE)


@pytest.mark.parametrize("scale", (1e-6, 1e6))
def test_states_of_any_size_keep_their_digits(scale):
    """Products with them are of half precision, which holds none of these."""
    case = rule_case(((130, 70), (65, 0)), 128, 128)
    case["value"][:] *= scale
    case["state"] *= scale
    assert_close(case, kernels.gated_delta_rule, *rule_by_definition(case), TOLERANCE)


def test_inputs_of_half_precision():
    case = rule_case(((1, 5), (100, 0), (65, 3)), 128, 128, torch.bfloat16)
    assert_close(case, kernels.gated_delta_rule, *rule_by_definition(case), 2 * TOLERANCE)


@pytest.mark.parametrize("channels, taps", [(300, 4), (1000, 2), (60, 8)])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_convolution_reaches_back_before_the_step(step, channels, taps):
    case = conv_case(step, channels, taps)
    assert_close(case, kernels.causal_conv1d, *conv_by_definition(case), 1e-5)


@pytest.mark.parametrize("count", [0, 1, 2, 70])
@pytest.mark.parametrize("step", [((1, 5), (70, 3), (33, 0)), ((1, 0), (3, 0), (2, 9))], ids=str)
def test_padding_of_a_graph_changes_no_state_but_that_of_slot_0(step, count):
    """Requests of no tokens, up to one fewer than tokens; then one of all tokens that are left: it
    has no keys."""
    num_empty = min(30, sum(now for now, _ in step) + count - 1 - len(step) - 1)
    for make, by_definition, kernel, sizes in (
        (rule_case, rule_by_definition, kernels.gated_delta_rule, (128, 128)),
        (conv_case, conv_by_definition, kernels.causal_conv1d, (300, 4)),
    ):
        alone = make(step, *sizes)
        wanted, states = by_definition(alone)
        case = make((*step, *((0, 0),) * num_empty, (count, 0)), *sizes)
        num_tokens = len(wanted)
        for name, own in alone.items():
            case[name][: len(own)] = own
        case["state_slots"][3:] = case["seq_lens"][3:] = 0
        before = case["state"].clone()
        y = kernel(**case)
        assert (y[:num_tokens].double() - wanted).norm() < TOLERANCE * wanted.norm()
        assert y.isfinite().all()
        for slot, state in states.items():
            assert (case["state"][slot].double() - state).norm() < TOLERANCE * state.norm()
        for slot in set(range(1, NUM_SLOTS)) - set(states):
            assert torch.equal(case["state"][slot].nan_to_num(7), before[slot].nan_to_num(7))


@needs_gpu
def test_a_captured_graph_serves_other_requests():
    step = STEPS["one token each"]
    case = rule_case(step, 128, 128, torch.bfloat16)
    kernels.gated_delta_rule(**case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.gated_delta_rule(**case)
    for other_step in (((1, 4), (1, 0), (1, 8)), ((1, 1), (1, 1), (1, 0))):
        other = rule_case(other_step, 128, 128, torch.bfloat16)
        for name, mine in case.items():
            mine.copy_(other[name])
        graph.replay()
        assert torch.equal(y, kernels.gated_delta_rule(**other))
        assert torch.equal(case["state"].nan_to_num(7), other["state"].nan_to_num(7))
