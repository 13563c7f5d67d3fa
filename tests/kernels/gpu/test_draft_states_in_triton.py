"""States after draft tokens by the Triton kernels: those of the reference, in the same slots."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from tests.kernels.test_draft_states import STEPS, TOKENS, cases
from vllm.kernels.triton import delta_rule, mamba2
from vllm.ops import torch_ops

pytestmark = MARKS
KERNELS = {
    "causal_conv1d": delta_rule.causal_conv1d,
    "gated_delta_rule": delta_rule.gated_delta_rule,
    "mamba2_scan": mamba2.mamba2_scan,
}
# Of ||y - wanted|| / ||wanted||: products of chunks are TF32.
TOLERANCE = 4e-3
# As a step has that verifies drafts: no request of more than 4 tokens, some of prompts that end.
SHORT = ((2, 3, 1), (1, 5, 0), (4, 9, 3), (2, 0, 0), (3, 4, 0), (1, 0, 0), (4, 0, 0), (3, 70, 2))
DTYPES = (torch.float32, torch.bfloat16)[: 1 if IS_INTERPRETED else 2]


def on_device(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(DEVICE) for name, x in case.items()}


def device_cases(step, dtype=torch.float32):
    """As `cases`, in a type that tensor cores take for Mamba2."""
    for name, case in cases(step, dtype):
        if name == "mamba2_scan" and dtype == torch.float32:
            case = {n: x.bfloat16() if n in TOKENS[name] else x for n, x in case.items()}
        yield name, on_device(case)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.nan_to_num(0).double(), wanted.nan_to_num(0).double()
    assert (found - wanted).norm() <= TOLERANCE * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_outputs_and_all_states_are_those_of_the_reference(step, dtype):
    for name, case in device_cases(step, dtype):
        other = case | {"state": case["state"].clone()}
        wanted = getattr(torch_ops, name)(**other)
        assert_near(KERNELS[name](**case), wanted)
        for found, state in zip(case["state"], other["state"]):
            assert_near(found, state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_of_few_tokens_each_give_the_states_of_the_reference(dtype):
    for name, case in device_cases(SHORT, dtype):
        other = case | {"state": case["state"].clone()}
        wanted = getattr(torch_ops, name)(**other)
        assert_near(KERNELS[name](**case, max_query_len=4), wanted)
        for found, state in zip(case["state"], other["state"]):
            assert_near(found, state)


def test_who_else_is_in_a_step_changes_no_bit_of_a_request_of_few_tokens():
    """A prompt behind them, whose tokens come in chunks."""
    num_tokens = sum(now for now, _, _ in SHORT)
    for name, case in device_cases((*SHORT, (70, 3, 0))):
        alone = case | {n: case[n][:num_tokens] for n in (*TOKENS[name], "draft_slots")}
        alone |= {n: case[n][:-1] for n in ("state_slots", "query_start_loc", "seq_lens")}
        alone["state"] = case["state"].clone()
        y = KERNELS[name](**case)
        assert torch.equal(KERNELS[name](**alone, max_query_len=4), y[:num_tokens])
        case["state"][case["state_slots"][-1]] = alone["state"][case["state_slots"][-1]]
        assert torch.equal(case["state"].nan_to_num(7), alone["state"].nan_to_num(7))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_padding_of_few_tokens_each_changes_no_state_but_that_of_slot_0(count):
    """As in the graph of a verification shape: requests of up to 4 tokens, then empty ones."""
    lengths = [min(4, count - start) for start in range(0, count, 4)] + [0, 0]
    num_tokens = sum(now for now, _, _ in SHORT)
    for name, alone in device_cases(SHORT):
        for key in ("state_slots", "draft_slots"):  # slot 0 is nobody's
            alone[key] = torch.where(alone[key] >= 0, alone[key] + 1, -1).int()
        alone["state"] = torch.cat((alone["state"][:1], alone["state"]))
        ends = num_tokens + torch.tensor(lengths, device=DEVICE).cumsum(0)
        zeros, tokens = torch.zeros(len(lengths), device=DEVICE).int(), torch.arange(count)
        case = alone | {n: torch.cat((alone[n], alone[n][tokens])) for n in TOKENS[name]}
        case |= {n: torch.cat((alone[n], zeros)) for n in ("state_slots", "seq_lens")}
        case["query_start_loc"] = torch.cat((alone["query_start_loc"], ends)).int()
        nowhere = torch.full((count,), -1, device=DEVICE).int()
        case["draft_slots"] = torch.cat((alone["draft_slots"], nowhere))
        case["state"] = alone["state"].clone()
        y, wanted = (KERNELS[name](**one, max_query_len=4) for one in (case, alone))
        assert torch.equal(y[:num_tokens], wanted) and y.isfinite().all()
        assert torch.equal(case["state"][1:].nan_to_num(7), alone["state"][1:].nan_to_num(7))


@pytest.mark.parametrize("count", [1, 40])
def test_padding_of_a_graph_has_no_drafts_and_changes_no_state_but_that_of_slot_0(count):
    """Requests of no tokens, then one of all tokens that are left."""
    step = STEPS["beside one token and prompts"]
    padded = (*step, (0, 0, 0), (0, 0, 0), (count, 0, 0))
    for (name, alone), (_, case) in zip(device_cases(step), device_cases(padded)):
        num_tokens = len(alone["draft_slots"])
        alone["state"] = torch.cat((alone["state"][:1], alone["state"]))  # after slot 0
        alone["state_slots"] = alone["state_slots"] + 1
        drafts = alone["draft_slots"]
        alone["draft_slots"] = torch.where(drafts >= 0, drafts + 1, -1)
        case = (
            alone
            | {
                n: torch.cat((alone[n], x[num_tokens:]))
                for n, x in case.items()
                if x.shape[0] == len(case["draft_slots"])
            }
            | {n: case[n].clone() for n in ("state_slots", "query_start_loc", "seq_lens")}
        )
        case["state_slots"][: len(step)] = alone["state_slots"]
        case["state_slots"][len(step) :] = case["seq_lens"][len(step) :] = 0
        case["draft_slots"][num_tokens:] = -1
        case["state"] = alone["state"].clone()
        wanted, y = KERNELS[name](**alone), KERNELS[name](**case)
        assert torch.equal(y[:num_tokens], wanted) and y.isfinite().all()
        assert torch.equal(case["state"][1:].nan_to_num(7), alone["state"][1:].nan_to_num(7))


@needs_gpu
@pytest.mark.parametrize(
    "steps, most",
    [
        ([((5, 3, 4), (1, 2, 0), (10, 0, 0)), ((1, 4, 0), (7, 0, 0), (8, 3, 7))], 16),
        ([((4, 3, 3), (1, 2, 0), (3, 0, 0)), ((1, 4, 0), (3, 0, 0), (4, 3, 3))], 4),
    ],
)
def test_a_captured_graph_serves_other_drafts(steps, most):
    for index in range(4):
        (name, case), (_, other) = ([*cases(step, torch.bfloat16)][index] for step in steps)
        case, other = on_device(case), on_device(other)
        KERNELS[name](**case, max_query_len=most)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = KERNELS[name](**case, max_query_len=most)
        for key, mine in case.items():
            mine.copy_(other[key])
        graph.replay()
        assert torch.equal(y, KERNELS[name](**other))
        assert torch.equal(case["state"].nan_to_num(7), other["state"].nan_to_num(7))
