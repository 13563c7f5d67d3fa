"""States after draft tokens: each is what decoding token by token leaves."""

import pytest
import torch
from test_delta_net import conv_case, delta_rule_case
from test_native_mamba2 import mamba2_case
from torch import Tensor

from vllm.ops import cpu_ops, torch_ops

NUM_SLOTS = 24
# Requests of a step: (tokens now, tokens before, draft tokens among those of now).
STEPS = {
    "drafts alone": ((4, 3, 3), (2, 9, 1), (8, 70, 7)),
    "beside one token and prompts": ((1, 5, 0), (5, 3, 4), (20, 0, 0), (2, 9, 1), (1, 0, 0)),
    "after padding": ((1, 2, 0), (3, 4, 2), (7, 1, 0)),
}
TOKENS = {
    "causal_conv1d": ("x",),
    "gated_delta_rule": ("query", "key", "value", "a", "b"),
    "mamba2_scan": ("x", "dt", "b", "c"),
}


def cases(step, dtype=torch.float32):
    """(name of the operation, arguments) with NaN in the slots that hold no state."""
    lengths = [(now, before) for now, before, _ in step]
    for name, case in (
        ("causal_conv1d", conv_case(60, dtype=dtype, lengths=lengths)),
        ("causal_conv1d", conv_case(60, dtype=dtype, lengths=lengths) | {"bias": torch.randn(60)}),
        ("gated_delta_rule", delta_rule_case(24, 36, dtype, lengths)),
        ("mamba2_scan", mamba2_case((4, 2, 10, 12), dtype, lengths)),
    ):
        state = case["state"].new_full((NUM_SLOTS, *case["state"].shape[1:]), float("nan"))
        slots = torch.randperm(NUM_SLOTS).int()
        case["state_slots"], free = slots[: len(step)], slots[len(step) :].tolist()
        draft_slots = []
        for slot, (now, before, num_drafts) in zip(case["state_slots"].tolist(), step, strict=True):
            if before:
                state[slot] = torch.randn(state.shape[1:])
            draft_slots += [-1] * (now - num_drafts) + [free.pop() for _ in range(num_drafts)]
        case["draft_slots"] = torch.tensor(draft_slots).int()
        yield name, case | {"state": state}


def token_by_token(call, names, case: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and states of a step whose draft tokens are computed in steps of their own."""
    case = case | {"state": case["state"].clone()}
    draft_slots, starts = case.pop("draft_slots"), case["query_start_loc"].tolist()
    state, outputs = case["state"], []
    for r, slot in enumerate(case["state_slots"].tolist()):
        own = draft_slots[starts[r] : starts[r + 1]]
        num_known, end = int((own < 0).sum()), starts[r + 1] - starts[r]
        before = int(case["seq_lens"][r]) - end
        kept = {}
        for begin, stop in [(0, num_known), *((t, t + 1) for t in range(num_known, end))]:
            tokens = slice(starts[r] + begin, starts[r] + stop)
            piece = case | {name: case[name][tokens] for name in names}
            piece["state_slots"] = torch.tensor([slot]).int()
            piece["query_start_loc"] = torch.tensor([0, stop - begin]).int()
            piece["seq_lens"] = torch.tensor([before + stop]).int()
            outputs.append(call(**piece))
            kept[int(own[stop - 1])] = state[slot].clone()
        state[slot] = kept.pop(-1)
        for target, value in kept.items():
            state[target] = value
    return torch.cat(outputs), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_native_kernels_leave_the_bits_of_decoding_token_by_token(step, dtype):
    for name, case in cases(step, dtype):
        call = getattr(cpu_ops, name)
        wanted, states = token_by_token(call, TOKENS[name], case)
        assert torch.equal(call(**case), wanted)
        assert torch.equal(case["state"].nan_to_num(7), states.nan_to_num(7))
        assert case["state"].isnan().flatten(1).all(1).sum() == NUM_SLOTS - len(step) - sum(
            num_drafts for *_, num_drafts in step
        )


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_reference_leaves_the_states_of_decoding_token_by_token(step):
    for name, case in cases(step):
        call = getattr(torch_ops, name)
        wanted, states = token_by_token(call, TOKENS[name], case)
        torch.testing.assert_close(call(**case), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(case["state"], states, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("ops", (cpu_ops, torch_ops), ids=("cpu", "torch"))
def test_outputs_go_where_they_are_wanted(ops):
    for name, case in cases(STEPS["beside one token and prompts"]):
        call, other = getattr(ops, name), case | {"state": case["state"].clone()}
        out = torch.full_like(case["value" if name == "gated_delta_rule" else "x"], 9)
        assert call(**case, out=out) is out
        assert torch.equal(call(**other), out)


def test_a_step_without_drafts_is_as_ever():
    for name, case in cases(((1, 5, 0), (20, 0, 0), (4, 3, 0))):
        call, other = getattr(cpu_ops, name), case | {"state": case["state"].clone()}
        del other["draft_slots"]
        assert torch.equal(call(**case), call(**other))
        assert torch.equal(case["state"].nan_to_num(7), other["state"].nan_to_num(7))
