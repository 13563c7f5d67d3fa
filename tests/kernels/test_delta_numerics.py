"""The comparison of the delta rule finds the mistakes that kernels make."""

import pytest
import torch
from selection_cases import ask, delta_rule

from vllm.kernels.backends import cpu
from vllm.kernels.delta_numerics import delta_rule_comparison
from vllm.kernels.numerics import WrongResultError, max_error
from vllm.kernels.select.problem import DeltaRuleProblem
from vllm.kernels.select.reason import Why
from vllm.ops import cpu_ops

CPU = torch.device("cpu")
Q, K, V, A, B, DECAY, BIAS, STATE, SLOTS, STARTS, LENS = range(11)


@pytest.mark.parametrize("backend", ("cpu", "torch"))
@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("sizes", ((2, 4, 24, 20), (1, 1, 128, 64), (3, 6, 40, 256)))
def test_kernels_of_the_cpu_are_right(sizes, dtype, backend):
    problem = DeltaRuleProblem(*sizes, dtype)
    assert delta_rule_comparison(problem, backend, CPU)() < max_error(problem) / 2


def changed(place: int, change):
    """The rule with another argument than what it is given."""

    def rule(*given):
        given = [*given]
        given[place] = change(given[place])
        return cpu_ops.gated_delta_rule(*given)

    return rule


def forgets_states(*given):
    given = [*given]
    states, given[STATE] = given[STATE], given[STATE].clone()
    out = cpu_ops.gated_delta_rule(*given)
    states[given[SLOTS][0].long()] = given[STATE][given[SLOTS][0].long()]
    return out


def writes_to_nobodys_slot(*given):
    out = cpu_ops.gated_delta_rule(*given)
    given[STATE][0] = 0.0
    return out


def goes_on_from_what_a_slot_held(*given):
    given = [*given]
    given[LENS] = given[LENS] + 1
    return cpu_ops.gated_delta_rule(*given)


def wrong_for_long_prompts_alone(*given):
    out = cpu_ops.gated_delta_rule(*given)
    lengths = given[STARTS].diff()
    is_long = (lengths > 128).repeat_interleave(lengths)
    return torch.where(is_long[:, None, None], out * 1.03, out)


WRONG = {
    "output by 3 %": (lambda *given: cpu_ops.gated_delta_rule(*given) * 1.03, "relative error"),
    "decay": (changed(DECAY, lambda x: x * 1.5), "relative error"),
    "bias": (changed(BIAS, torch.zeros_like), "relative error"),
    "beta": (changed(B, lambda x: x * 0.8), "relative error"),
    "heads": (changed(V, lambda x: x.roll(1, 1)), "relative error"),
    "keys": (changed(K, lambda x: x.roll(1, 2)), "relative error"),
    "long prompts": (wrong_for_long_prompts_alone, "129 tokens after 0"),
    "states": (forgets_states, "the state of"),
    "fresh states": (goes_on_from_what_a_slot_held, "NaN or infinity"),
    "free slots": (writes_to_nobodys_slot, "a state was written to the slot of no request"),
    "rows": (lambda *given: cpu_ops.gated_delta_rule(*given)[1:], "has 144 rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found(monkeypatch, name):
    rule, text = WRONG[name]
    monkeypatch.setattr(cpu, "delta_rule", lambda problem: rule)
    with pytest.raises(WrongResultError, match=text):
        delta_rule_comparison(DeltaRuleProblem(2, 4, 32, 48, "bf16"), "cpu", CPU)()


def test_float32_on_a_gpu_is_torchs_and_large_heads_too():
    assert ask(delta_rule(), "90").chosen == "triton"
    wide = ask(delta_rule(dtype="fp32"), "90")
    assert wide.chosen == "torch"
    large = ask(delta_rule(value_dim=512), "90")
    (triton,) = (c for c in large.candidates if c.backend == "triton")
    assert large.chosen == "torch" and [r.why for r in triton.reasons] == [Why.SHAPE]
