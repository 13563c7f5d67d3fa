"""Selection is cheap enough to run for every layer at load."""

from selection_cases import LIBS, linear, moe, parse_device, policy_of, timed
from slowness import seconds_elsewhere

from vllm.kernels import registry
from vllm.kernels.evidence.imported import find_imported
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.tables import Chip
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.select import select

MAX_MICROSECONDS = 60
# Two kinds of work do not slow down alike.
ALLOWANCE = 1.2
# Of longer calls, which others on the machine interrupt more often than the yardstick.
ATTEMPTS = 3
PROBLEMS = {
    "plain": linear(),
    "merged and cut": linear(n=960, parts=(576, 192, 192), cut_n=32),
    "nvfp4": linear("nvfp4"),
    "moe": moe(),
}


MEASURED = timed(skinny=(1, 8), deep_gemm=(9, 512), cutlass=(513, 8192), torch=(1, 0))


def microseconds(problem, device: str, wishes: str, timings=None, attempts: int = 1) -> float:
    policy = policy_of(wishes, "qwen3_5_moe_text", device)
    chip = parse_device(device)
    specs = registry.specs(problem.family, chip.family)
    arguments = (problem, chip, LIBS["all"], policy, specs)

    def choose() -> object:
        return select(*arguments, "model.layers.0.mlp.down_proj", timings)

    return min(seconds_elsewhere(choose) for _ in range(attempts)) * 1e6


def test_a_choice_by_the_default_order_takes_60_microseconds_at_most():
    took = {
        (name, device, wishes): microseconds(problem, device, wishes)
        for name, problem in PROBLEMS.items()
        for device in ("90", "100", "cpu")
        for wishes in ("-", "VLLM_USE_DEEP_GEMM=1")
    }
    slow = {case: round(us) for case, us in took.items() if us > MAX_MICROSECONDS * ALLOWANCE}
    assert not slow, f"microseconds: {slow}"


H100 = Chip(parse_device("90"), 132, 3352)


def test_a_choice_by_measurements_takes_60_microseconds_at_most():
    took = microseconds(linear(), "90", "-", MEASURED, ATTEMPTS)
    assert took <= MAX_MICROSECONDS * ALLOWANCE, f"{took:.1f} us"


def test_a_choice_by_a_row_of_18_counts_takes_60_microseconds_at_most():
    """Of this build's table, for an H100: a split of five parts."""
    problem = linear(n=4096, k=12288)
    measured = Known.of(H100).evidence(problem)
    assert measured.grade is Grade.MEASURED and len(measured.tokens) == 18
    took = microseconds(problem, "90", "-", measured, ATTEMPTS)
    assert took <= MAX_MICROSECONDS * ALLOWANCE, f"{took:.1f} us"


def test_a_choice_by_estimates_of_seven_kernels_takes_60_microseconds_at_most():
    """Of a size that nobody measured, which becomes a split of five parts."""
    problem = linear(n=2816, k=3072)
    estimated = Known.of(H100).evidence(problem)
    assert estimated.grade is Grade.ESTIMATED and len(estimated.us) == 7
    took = microseconds(problem, "90", "-", estimated, ATTEMPTS)
    assert took <= MAX_MICROSECONDS * ALLOWANCE, f"{took:.1f} us"


def test_that_others_timed_no_two_kernels_is_found_out_in_microseconds():
    """A B200's linear layers."""
    chip = Chip(parse_device("100"), 148, 7672)
    known = Known.of(chip)
    assert find_imported(chip, "linear")
    assert known.evidence(linear(n=4224)) is None
    took = seconds_elsewhere(lambda: known.evidence(linear(n=4224))) * 1e6
    assert took <= 10, f"{took:.1f} us"
