"""Selection is cheap enough to run for every layer at load."""

from selection_cases import LIBS, linear, moe, parse_device, policy_of, timed
from slowness import seconds_elsewhere

from vllm.kernels import registry
from vllm.kernels.select.select import select

MAX_MICROSECONDS = 50
# Two kinds of work do not slow down alike.
ALLOWANCE = 1.5
PROBLEMS = {
    "plain": linear(),
    "merged and cut": linear(n=960, parts=(576, 192, 192), cut_n=32),
    "nvfp4": linear("nvfp4"),
    "moe": moe(),
}


MEASURED = timed(skinny=(1, 8), deep_gemm=(9, 512), cutlass=(513, 8192), torch=(1, 0))


def microseconds(problem, device: str, wishes: str, timings=None) -> float:
    policy = policy_of(wishes, "qwen3_5_moe_text", device)
    chip = parse_device(device)
    specs = registry.specs(problem.family, chip.family)
    arguments = (problem, chip, LIBS["all"], policy, specs)

    def choose() -> object:
        return select(*arguments, "model.layers.0.mlp.down_proj", timings)

    return seconds_elsewhere(choose) * 1e6


def test_a_choice_takes_50_microseconds_at_most():
    took = {
        (name, device, wishes): microseconds(problem, device, wishes)
        for name, problem in PROBLEMS.items()
        for device in ("90", "100", "cpu")
        for wishes in ("-", "VLLM_USE_DEEP_GEMM=1")
    }
    took["measured"] = microseconds(linear(), "90", "-", MEASURED)
    slow = {case: round(us) for case, us in took.items() if us > MAX_MICROSECONDS * ALLOWANCE}
    assert not slow, f"microseconds: {slow}"
