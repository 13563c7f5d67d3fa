"""States after draft tokens by the Triton kernels: those of the reference, in the same slots."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from tests.kernels.test_draft_states import STEPS, cases
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
DTYPES = (torch.float32, torch.bfloat16)[: 1 if IS_INTERPRETED else 2]


def on_device(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(DEVICE) for name, x in case.items()}


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.nan_to_num(0).double(), wanted.nan_to_num(0).double()
    assert (found - wanted).norm() <= TOLERANCE * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_outputs_and_all_states_are_those_of_the_reference(step, dtype):
    for name, case in cases(step, dtype):
        if name == "mamba2_scan" and dtype == torch.float32:
            case = {n: x.bfloat16() if n in ("x", "dt", "b", "c") else x for n, x in case.items()}
        case = on_device(case)
        other = case | {"state": case["state"].clone()}
        wanted = getattr(torch_ops, name)(**other)
        assert_near(KERNELS[name](**case), wanted)
        for found, state in zip(case["state"], other["state"]):
            assert_near(found, state)


@pytest.mark.parametrize("count", [1, 40])
def test_padding_of_a_graph_has_no_drafts_and_changes_no_state_but_that_of_slot_0(count):
    """Requests of no tokens, then one of all tokens that are left."""
    step = STEPS["beside one token and prompts"]
    padded = (*step, (0, 0, 0), (0, 0, 0), (count, 0, 0))
    for (name, alone), (_, case) in zip(cases(step), cases(padded)):
        if name == "mamba2_scan":
            alone, case = (
                {n: x.bfloat16() if n in ("x", "dt", "b", "c") else x for n, x in one.items()}
                for one in (alone, case)
            )
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
        case, alone = on_device(case), on_device(alone)
        case["state"] = alone["state"].clone()
        wanted, y = KERNELS[name](**alone), KERNELS[name](**case)
        assert torch.equal(y[:num_tokens], wanted) and y.isfinite().all()
        assert torch.equal(case["state"][1:].nan_to_num(7), alone["state"][1:].nan_to_num(7))


@needs_gpu
def test_a_captured_graph_serves_other_drafts():
    steps = [((5, 3, 4), (1, 2, 0), (10, 0, 0)), ((1, 4, 0), (7, 0, 0), (8, 3, 7))]
    for index in range(4):
        (name, case), (_, other) = ([*cases(step, torch.bfloat16)][index] for step in steps)
        case, other = on_device(case), on_device(other)
        KERNELS[name](**case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = KERNELS[name](**case)
        for key, mine in case.items():
            mine.copy_(other[key])
        graph.replay()
        assert torch.equal(y, KERNELS[name](**other))
        assert torch.equal(case["state"].nan_to_num(7), other["state"].nan_to_num(7))
