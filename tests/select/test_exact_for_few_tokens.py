"""Kernels that round less beside those that round more: of one split, and between equals."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import LIBS, TOKENS, ask, linear, parse_device, timed

from vllm.formats.act_scheme import ActScheme
from vllm.kernels.evidence.splits import Timings, expected
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.report import Report
from vllm.kernels.report.side_effects import side_effect
from vllm.kernels.report.text_report import how, page
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.reason import Why

BLACKWELL = ("100", "103", "120", "121")
W4A16 = "skinny-w4a16"
FEW_EXACT = f"{W4A16}<=8|cutlass"


def times(**us: tuple[float, ...]) -> Timings:
    """Microseconds for TOKENS; `skinny_w4a16` is skinny-w4a16."""
    named = tuple((name.replace("_", "-"), own) for name, own in us.items())
    return Timings("tuned/example.json", TOKENS, named)


def nvfp4(few: float, cutlass: tuple[float, ...] = (10, 10, 10, 10, 20), **others) -> Timings:
    """skinny-w4a16 takes `few` for 1 and 8 tokens, and no more than 16; CUTLASS 10."""
    return times(skinny_w4a16=(few, few, 90.0, 90.0, 90.0), cutlass=cutlass, **others)


# ---------------------------------------------------------------- one split of two schemes


@pytest.mark.parametrize("device", BLACKWELL)
def test_few_tokens_are_multiplied_as_they_are_where_that_was_measured_faster(device):
    decision = ask(linear("nvfp4"), device, timings=nvfp4(9.3))  # 7 %
    assert (decision.chosen, decision.origin.rank) == (FEW_EXACT, 6)
    acts = {c.backend: c.act for c in decision.candidates}
    assert acts[W4A16] is ActScheme.NONE and acts["cutlass"] is ActScheme.NVFP4_GROUP16
    assert decision.winner.act is ActScheme.NVFP4_GROUP16  # of its last part
    assert side_effect(decision) == ""


@pytest.mark.parametrize("device", BLACKWELL)
def test_without_measurements_activations_are_quantised(device):
    for m_range in ((1, 8192), (1, 16)):
        decision = ask(linear("nvfp4", m_range=m_range), device)
        assert (decision.chosen, decision.origin.rank) == ("cutlass", 7)


def test_a_checkpoint_decides_which_schemes_there_are():
    only_w4a4 = linear("nvfp4", act=(ActScheme.NVFP4_GROUP16,))
    decision = ask(only_w4a4, "120", timings=nvfp4(5.0))
    assert decision.chosen == "cutlass"
    refused = next(c for c in decision.candidates if c.backend == W4A16)
    assert Why.NUMERICS in {reason.why for reason in refused.reasons}
    only_w4a16 = linear("nvfp4", act=(ActScheme.NONE,))
    assert ask(only_w4a16, "120", timings=nvfp4(5.0)).chosen == "marlin"


def test_native_kernels_alone_make_no_such_split():
    decision = ask(linear("nvfp4"), "120", "all", "--require-native", timings=nvfp4(5.0))
    assert decision.chosen == "cutlass" and decision.origin.text == "--require-native"
    assert decision.candidates[0].backend == FEW_EXACT


def test_a_layout_of_its_own_is_no_part_beside_the_stored_one():
    slow = (90.0, 90.0, 90.0, 90.0, 90.0)
    timings = nvfp4(9.0, marlin=(5.0, 5.0, 90.0, 90.0, 90.0), torch=slow)
    assert ask(linear("nvfp4"), "120", timings=timings).chosen == FEW_EXACT


def test_experts_and_other_formats_have_no_such_kernel():
    for weight in ("fp8-block", "int4-group[128]", "bf16"):
        candidate = next(c for c in ask(linear(weight), "120").candidates if c.backend == W4A16)
        assert Why.FORMAT in {reason.why for reason in candidate.reasons}


def test_every_report_says_what_each_part_does_to_activations():
    decision = ask(linear("nvfp4"), "120", timings=nvfp4(9.0))
    assert how(decision.winner, decision)[:2] == [
        f"{W4A16} up to M = 8 (weight-only)",
        "cutlass above (activations nvfp4-group16)",
    ]
    values = Report(parse_device("120"), LIBS["all"], {}, [("a", decision)])
    shown = " ".join(page(values).split())
    assert f"{W4A16} up to M = 8 (weight-only), cutlass above (activations nvfp4-group16)" in shown
    content = report(*values)
    assert parse_report(content).records == [("a", decision)]
    same = ask(linear(), "90", timings=timed(skinny=(1, 8), deep_gemm=(9, 8192), cutlass=(1, 0)))
    assert how(same.winner, same)[:3] == [
        "skinny up to M = 8", "deep_gemm above", "activations dynamic-group128"
    ]  # fmt: skip


# ---------------------------------------------------------------- between equals


def test_a_range_ends_where_the_kernel_that_rounds_less_stops_being_as_fast():
    """Faster for one token by 7 % and as fast for eight."""
    timings = times(skinny_w4a16=(9.3, 10.1, 90.0, 90.0, 90.0), cutlass=(10.0,) * 5)
    assert ask(linear("nvfp4"), "120", timings=timings).chosen == FEW_EXACT
    assert ask(linear("nvfp4"), "120", timings=replace(timings, grade=Grade.IMPORTED)).chosen in (
        f"{W4A16}<=1|cutlass",
        "cutlass",
    )


def test_a_tie_alone_makes_no_split():
    assert ask(linear("nvfp4"), "120", timings=nvfp4(10.0)).chosen == "cutlass"
    assert ask(linear("nvfp4"), "120", timings=nvfp4(9.8)).chosen == "cutlass"


EQUAL = timed(deep_gemm=(1, 8192), cutlass=(1, 8192), marlin=(1, 8192))


@pytest.mark.parametrize(
    ("device", "wish", "grade", "chosen"),
    [
        ("100", "--requant allow", Grade.MEASURED, "marlin"),  # rounds nothing
        ("90", "-", Grade.MEASURED, "marlin"),
        ("100", "--requant allow --require-native", Grade.MEASURED, "cutlass"),  # once, not twice
        ("90", "-", Grade.IMPORTED, "cutlass"),  # DeepGEMM compiles
    ],
)
def test_of_equals_the_one_that_rounds_least_serves_where_times_are_measured_here(
    device, wish, grade, chosen
):
    timings = replace(EQUAL, grade=grade)
    assert ask(linear(), device, "all", wish, timings=timings).chosen == chosen


def test_kernels_that_round_alike_keep_the_default_order():
    timings = timed(cutlass=(1, 8192), flashinfer_cutlass=(1, 8192))
    assert ask(linear("nvfp4"), "120", timings=timings).chosen == "cutlass"


# ---------------------------------------------------------------- kernels that compile


@pytest.mark.parametrize(
    ("few", "chosen"),
    [
        (9.3, (W4A16, "cutlass")),  # 7 % for few tokens is 2.9 % on average
        (9.6, (W4A16, "cutlass")),
        (9.8, ("cutlass",)),
    ],
)
def test_what_compiles_and_rounds_less_is_left_out_only_where_it_is_no_faster(few, chosen):
    able, compiling = ((("cutlass", None), (W4A16, 16))), (W4A16,)
    timings = nvfp4(few)
    plain = timings.best_split(able, (1, 8192), compiling)
    assert plain == ((None, "cutlass"),)
    found = timings.best_split(able, (1, 8192), compiling, (), (("cutlass", 1),))
    assert tuple(name for _, name in found) == chosen


_NAMES = ("exact", "rounds", "rounds twice")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from((10.0, 10.2, 12.0, 30.0))] * 3), min_size=1, max_size=6)
)
def test_roundings_never_cost_time_and_are_never_more_than_without_the_rule(columns):
    tokens = tuple(2**i for i in range(len(columns)))
    timings = Timings("", tokens, tuple(zip(_NAMES, zip(*columns))))
    able, counts = (
        tuple((name, None) for name in reversed(_NAMES)),
        {"rounds": 1, "rounds twice": 2},
    )
    m_range = (1, tokens[-1])

    def rounded(parts) -> int:
        own = (next(b for limit, b in parts if limit is None or m <= limit) for m in tokens)
        return sum(counts.get(name, 0) for name in own)

    plain = timings.best_split(able, m_range)
    found = timings.best_split(able, m_range, (), (), tuple(counts.items()))
    assert len(found) <= len(plain) and rounded(found) <= rounded(plain)
    slower = expected(timings, found, _NAMES, m_range), expected(timings, plain, _NAMES, m_range)
    assert slower[0].mean_regret <= slower[1].mean_regret + 0.03
