"""Triton's recurrence of Mamba2 against its definition in float64, token by token; its convolution
with a bias and its gated norm against plain torch."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.kernels.mamba2_numerics import mamba2_comparison, recurrence
from vllm.kernels.numerics import max_error
from vllm.kernels.select.problem import Mamba2Problem
from vllm.kernels.triton import delta_rule, gates
from vllm.kernels.triton.mamba2 import mamba2_scan
from vllm.ops import torch_ops

pytestmark = MARKS
# Heads, groups, head_dim and state_size; the first of Nemotron-H.
SIZES = ((8, 2, 64, 128), (4, 4, 20, 24), (6, 1, 80, 256), (4, 2, 128, 16))[
    : 2 if IS_INTERPRETED else 4
]
# Requests of one step: (tokens now, tokens before); one that starts has none before.
STEPS = {
    "one token each": ((1, 0), (1, 5), (1, 3)),
    "mixed": ((1, 0), (7, 3), (33, 0), (1, 9), (17, 70), (2, 1)),
    "several chunks": ((1, 2), (70, 0), (65, 70), (129, 1)),
    "one prompt": ((200, 0),),
    "few tokens each": ((2, 0), (3, 5), (1, 2), (7, 1), (8, 0), (8, 9)),
    "a few more": ((8, 3), (9, 0), (9, 4), (2, 1), (10, 70)),
}
NUM_SLOTS = 9


def case_of(step, sizes, dtype=torch.bfloat16) -> dict[str, Tensor]:
    """Views of one projection, as the layer gives them; free slots hold NaN."""
    heads, groups, head_dim, state_size = sizes
    num_tokens = sum(now for now, _ in step)
    parts = heads * head_dim, groups * state_size, groups * state_size
    x, b, c = torch.randn(num_tokens, sum(parts), device=DEVICE).to(dtype).split(parts, 1)
    states = torch.full((NUM_SLOTS, heads, state_size, head_dim), float("nan"), device=DEVICE)
    slots = 1 + torch.randperm(NUM_SLOTS - 1)[: len(step)]
    for slot, (_, before) in zip(slots.tolist(), step, strict=True):
        if before:
            states[slot] = torch.randn(states.shape[1:], device=DEVICE)
    starts = torch.tensor([0, *(now for now, _ in step)]).cumsum(0)
    lens = torch.tensor([now + before for now, before in step])
    return {
        "x": x.unflatten(1, (heads, head_dim)),
        "dt": torch.randn(num_tokens, heads + 3, device=DEVICE).to(dtype)[:, :heads],
        "b": b.unflatten(1, (groups, state_size)),
        "c": c.unflatten(1, (groups, state_size)),
        "decay_rate": 0.2 * torch.rand(heads, device=DEVICE),
        "dt_bias": torch.randn(heads, device=DEVICE),
        "skip": torch.randn(heads, device=DEVICE),
        "state": states,
        "state_slots": slots.int().to(DEVICE),
        "query_start_loc": starts.int().to(DEVICE),
        "seq_lens": lens.int().to(DEVICE),
    }


def assert_right(case, step, limit: float, **options) -> None:
    before = case["state"].clone()
    tokens = [case[name].double() for name in ("x", "dt", "b", "c")]
    of_heads = [case[name].double() for name in ("decay_rate", "dt_bias", "skip")]
    y = mamba2_scan(**case, **options).double()
    starts = case["query_start_loc"].tolist()
    used = case["state_slots"].tolist()
    for r, (slot, (_, kept)) in enumerate(zip(used, step, strict=True)):
        own = [one[starts[r] : starts[r + 1]] for one in tokens]
        state = before[slot].double() if kept else torch.zeros_like(before[slot]).double()
        limits = options.get("dt_limits", (0.0, float("inf")))
        wanted, state = recurrence(*own, *of_heads, state, limits)
        found = y[starts[r] : starts[r + 1]]
        assert (found - wanted).norm() < limit * wanted.norm()
        assert (case["state"][slot].double() - state).norm() < limit * state.norm()
    for slot in set(range(NUM_SLOTS)) - set(used):
        assert torch.equal(case["state"][slot].nan_to_num(7), before[slot].nan_to_num(7))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_outputs_and_states_are_those_of_the_recurrence(step, sizes):
    assert_right(case_of(step, sizes), step, 4e-3)


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_it_passes_the_comparison_of_a_start(dtype):
    for heads, groups, head_dim, state_size in SIZES:
        problem = Mamba2Problem(heads, groups, head_dim, state_size, dtype, 0.01, 0.5)
        found = mamba2_comparison(problem, "triton", torch.device(DEVICE))()
        assert found < max_error(problem)


def test_steps_stay_within_their_limits():
    step = STEPS["mixed"]
    assert_right(case_of(step, SIZES[0]), step, 4e-3, dt_limits=(0.3, 0.7))


@pytest.mark.parametrize("bias", (-12.0, 15.0), ids=("small", "large"))
def test_small_and_large_steps_keep_their_digits(bias):
    step = ((1, 4), (70, 3))
    case = case_of(step, SIZES[0])
    case["dt_bias"][:] = bias
    assert_right(case, step, 4e-3)


@pytest.mark.parametrize("scale", (1e-6, 1e6))
def test_states_of_any_size_keep_their_digits(scale):
    step = ((130, 70), (65, 3))
    case = case_of(step, SIZES[0])
    case["x"][:] *= scale
    case["state"] *= scale
    assert_right(case, step, 4e-3)


def test_rows_that_fill_up_a_graph_change_no_state_but_that_of_slot_0():
    step = ((1, 5), (30, 0))
    alone = case_of(step, SIZES[0])
    case = case_of((*step, (0, 0), (0, 0), (3, 0)), SIZES[0])
    for name, own in alone.items():
        case[name][: len(own)] = own
    case["state_slots"][2:] = case["seq_lens"][2:] = 0
    wanted, y = mamba2_scan(**alone), mamba2_scan(**case)
    assert torch.equal(y[: len(wanted)], wanted) and y.isfinite().all()
    for slot in range(1, NUM_SLOTS):
        assert torch.equal(case["state"][slot].nan_to_num(7), alone["state"][slot].nan_to_num(7))


@pytest.mark.parametrize("step", (((1, 0), (1, 5)), ((1, 4), (40, 0), (3, 2))), ids=str)
def test_a_convolution_adds_its_bias(step):
    channels, taps, dtype = 300, 4, torch.float32
    case = case_of(step, SIZES[0])
    given = {
        "x": torch.randn(sum(now for now, _ in step), channels, device=DEVICE),
        "weight": torch.randn(taps, channels, device=DEVICE),
        "state": torch.randn(NUM_SLOTS, taps - 1, channels, device=DEVICE),
        **{name: case[name] for name in ("state_slots", "query_start_loc", "seq_lens")},
        "bias": torch.randn(channels, device=DEVICE),
    }
    other = {name: one.clone() for name, one in given.items()}
    y, wanted = delta_rule.causal_conv1d(**given), torch_ops.causal_conv1d(**other)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(given["state"], other["state"]) and y.dtype is dtype


@pytest.mark.parametrize("shape", ((5, 8, 512), (1, 3, 100)), ids=str)
def test_the_gated_norm_is_over_a_group(shape):
    num_tokens, groups, columns = shape
    x = torch.randn(shape, device=DEVICE).bfloat16()
    wide = torch.randn(num_tokens, groups * columns + 7, device=DEVICE).bfloat16()
    gate = wide[:, : groups * columns].unflatten(1, (groups, columns))
    weight = torch.rand(groups, columns, device=DEVICE)
    y = gates.silu_mul_rms_norm(x, gate, weight, 1e-5)
    wanted = torch_ops.silu_mul_rms_norm(x, gate, weight, 1e-5)
    torch.testing.assert_close(y, wanted, rtol=8e-3, atol=1e-3)


def test_squared_relu_keeps_nan():
    x = torch.randn(70, 3000, device=DEVICE).bfloat16()
    x[3, 5] = float("nan")
    torch.testing.assert_close(gates.relu2(x), torch_ops.relu2(x), equal_nan=True)


@needs_gpu
def test_a_captured_graph_serves_other_requests():
    step = STEPS["one token each"]
    case = case_of(step, SIZES[0])
    mamba2_scan(**case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mamba2_scan(**case)
    for other_step in (((1, 4), (1, 0), (1, 8)), ((1, 1), (1, 1), (1, 0))):
        other = case_of(other_step, SIZES[0])
        for name, mine in case.items():
            mine.copy_(other[name])
        graph.replay()
        assert torch.equal(y, mamba2_scan(**other))
        assert torch.equal(case["state"].nan_to_num(7), other["state"].nan_to_num(7))
