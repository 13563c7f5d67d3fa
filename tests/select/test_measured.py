"""What was measured fastest goes ahead of the default order, and behind everything else."""

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import LIBS, TOKENS, ask, linear, moe, timed
from selection_strategies import devices, excluding, linears, models, some_libs

from vllm.kernels import registry
from vllm.kernels.evidence.cheapest_path import MAX_PARTS, PART_COST
from vllm.kernels.evidence.splits import (
    MEAN_COST_OF_LEAVING_OUT,
    REACH,
    TOLERANCE,
    WORST_COST_OF_LEAVING_OUT,
    Timings,
    expected,
)
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.report import Report
from vllm.kernels.report.text_report import expectation_of, outcome, page
from vllm.kernels.select.problem import AttentionProblem
from vllm.kernels.select.reason import Reason, Why
from vllm.machine import Device, Libs, Quarantined

best_split = Timings.best_split
LISTED = "qwen3_5_moe_text"
ALWAYS, NEVER = (1, 8192), (1, 0)
SPLIT = timed(triton=(1, 64), cutlass=(65, 8192), deep_gemm=NEVER)
SMALL_FIRST = replace(
    timed(skinny=(1, 8), deep_gemm=(9, 8192)),
    us=(
        *timed(skinny=(1, 8), deep_gemm=(9, 8192)).us,
        ("cutlass", tuple(100.0 if m <= 8 else 15.0 for m in TOKENS)),
    ),
)


def test_the_fastest_is_chosen_by_rank_6_with_the_table_that_says_so():
    decision = ask(linear(), "90", timings=timed(triton=ALWAYS, deep_gemm=NEVER))
    assert decision.chosen == "triton"
    assert decision.origin.rank == 6 and "tuned/example.json" in decision.origin.text
    assert decision.candidates[0].backend == "triton"


def test_two_that_win_for_different_numbers_of_tokens_are_one_candidate_with_its_limits():
    decision = ask(linear(), "90", timings=SPLIT)
    assert decision.chosen == "triton<=64|cutlass" and decision.origin.rank == 6
    assert decision.winner.parts == ((64, "triton"), (None, "cutlass"))
    assert decision.candidates[1].backend == "deep_gemm"  # the default order follows


def test_a_kernel_for_few_tokens_serves_those_and_is_no_choice_by_itself():
    decision = ask(linear(), "90", timings=SMALL_FIRST)
    assert decision.chosen == "skinny<=8|deep_gemm"
    alone = next(c for c in decision.candidates if c.backend == "skinny")
    assert [reason.why for reason in alone.reasons] == ["shape"]
    assert ask(linear(m_range=(1, 8)), "90", timings=SMALL_FIRST).chosen == "skinny"


def test_a_weight_that_is_not_quantised_is_split_where_that_was_measured():
    few = timed(skinny=(1, 8), torch=(9, 8192))
    small = linear("bf16", n=64, k=2048)
    for taken in (small, replace(small, bias=True), replace(small, n=16384)):
        assert ask(taken, "90", timings=few).chosen == "skinny<=8|torch"
        assert ask(taken, "90").chosen == "torch"
    for large in (replace(small, n=16385), replace(small, n=16, k=16384)):
        assert ask(large, "90", timings=few).chosen == "torch"


def test_of_weights_that_are_not_quantised_small_ones_need_no_measurement():
    small = linear("bf16", n=64, k=2048, m_range=(1, 16))
    assert ask(small, "90").chosen == "skinny"
    assert ask(replace(small, n=257), "90").chosen == "torch"


@pytest.mark.parametrize(
    ("libs", "chosen"),
    [
        ("all", "skinny<=8|deep_gemm"),
        ("flashinfer", "skinny<=8|cutlass"),
        ("no native", "deep_gemm"),
    ],
)
def test_what_cannot_run_here_is_left_out_of_the_split(libs, chosen):
    decision = ask(linear(), "90", libs, timings=SMALL_FIRST)
    assert (decision.chosen, decision.origin.rank) == (chosen, 6)


def test_sizes_that_the_fastest_does_not_take_go_to_the_next():
    decision = ask(linear(n=4080), "90", timings=timed(deep_gemm=ALWAYS, cutlass=NEVER))
    assert decision.chosen == "cutlass"


def test_a_table_that_lacks_the_first_of_the_default_order_proves_nothing():
    for timings in (timed(triton=ALWAYS), timed(retired=ALWAYS, triton=NEVER), Timings("", (), ())):
        decision = ask(linear(), "90", timings=timings)
        assert (decision.chosen, decision.origin.rank) == ("deep_gemm", 7)


def test_exclusions_beat_measurements_and_are_named():
    timings = timed(deep_gemm=ALWAYS, cutlass=NEVER)
    for wish, model, rank in (("-", LISTED, 5), ("VLLM_USE_DEEP_GEMM=0", "llama", 3)):
        decision = ask(linear(), "100", "all", wish, model, timings=timings)
        assert decision.chosen == "cutlass" and decision.origin.rank == rank


def test_an_exclusion_that_changes_a_split_decides():
    decision = ask(linear(), "90", "all", "VLLM_USE_DEEP_GEMM=0", timings=SMALL_FIRST)
    assert decision.chosen == "skinny<=8|cutlass" and decision.origin.rank == 3
    assert decision.candidates[0].backend == "skinny<=8|deep_gemm"
    assert [reason.why for reason in decision.candidates[0].reasons] == ["policy"]


def test_an_exclusion_of_what_is_slow_anyway_decides_nothing():
    timings = timed(cutlass=ALWAYS, deep_gemm=NEVER)
    decision = ask(linear(), "90", "all", "VLLM_USE_DEEP_GEMM=0", timings=timings)
    assert decision.chosen == "cutlass" and decision.origin.rank == 6


def test_a_forced_backend_beats_measurements_and_its_cost_is_told():
    decision = ask(linear(), "90", "all", "--linear-backend marlin", timings=SPLIT)
    assert decision.chosen == "marlin" and decision.origin.rank == 2
    assert expectation_of(decision) is None  # nobody measured it
    forced = ask(linear(), "90", "all", "--linear-backend cutlass", timings=SMALL_FIRST)
    choice = expectation_of(forced)
    assert choice.worst_regret == pytest.approx(9) and choice.worst_tokens == 1
    assert choice.fastest_there == "skinny" and choice.us[0] == (1, 100.0)
    assert outcome(forced).endswith(f"{choice.mean_regret:.1%} slower than the fastest measured")


def test_what_is_broken_here_is_no_measure_of_regret():
    timings = timed(deep_gemm=ALWAYS, cutlass=NEVER)
    choice = expectation_of(ask(linear(), "90", "flashinfer", timings=timings))
    assert choice.mean_regret == choice.worst_regret == 0


def test_only_the_tokens_that_are_expected_count():
    timings = timed(triton=(1, 8), deep_gemm=(9, 8192))
    assert ask(linear(m_range=(1, 8)), "90", timings=timings).chosen == "triton"
    assert ask(linear(m_range=(512, 4096)), "90", timings=timings).chosen == "deep_gemm"


@settings(max_examples=200, deadline=None)
@given(linears(), devices, some_libs(), models, excluding, st.data())
def test_a_measurement_changes_the_order_and_grades_and_nothing_else(
    problem, device, libs, model, wish, data
):
    timings = data.draw(tables())
    usual = ask(problem, device, libs, wish, model)
    decision = ask(problem, device, libs, wish, model, timings=timings)
    plain = [c for c in decision.candidates if not c.parts]
    known = {c.backend: c.grade for c in usual.candidates}
    ungraded = [replace(c, grade=known[c.backend]) for c in plain]
    assert sorted(ungraded, key=repr) == sorted(usual.candidates, key=repr)
    assert (decision.chosen is None) == (usual.chosen is None)
    if decision.chosen is not None:
        free = {c.backend for c in plain if not c.reasons} | {"skinny"}
        used = {name for _, name in decision.winner.parts} or {decision.chosen}
        assert used <= free
        assert used == {usual.chosen} or decision.origin.rank <= 6


# ---------------------------------------------------------------- splits

_NAMES = ("deep_gemm", "cutlass", "skinny", "triton", "torch")
_TIMES = st.none() | st.floats(1, 1000)


@st.composite
def tables(draw, times=_TIMES, most_tokens=8, most_names=5) -> Timings:
    tokens = sorted(draw(st.sets(st.integers(1, 8192), min_size=1, max_size=most_tokens)))
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=most_names, unique=True))
    us = tuple((name, tuple(draw(times) for _ in tokens)) for name in names)
    return Timings("table.json", tuple(tokens), us)


def cost_of(timings: Timings, able, parts) -> float:
    """What a split costs by its definition: logarithms over the fastest, and PART_COST a part."""
    from math import log

    us, limits = dict(timings.us), dict(able)
    total = PART_COST * (len(parts) - 1)
    for i, m in enumerate(timings.tokens):
        times = {
            name: row[i]
            for name, row in us.items()
            if name in limits and row[i] is not None and (limits[name] is None or m <= limits[name])
        }
        if times:
            own = times.get(next(b for limit, b in parts if limit is None or m <= limit), inf)
            best = min(times.values())
            total += 0 if own <= best * TOLERANCE else log(own / best)
    return total


def every_split(tokens, names):
    for count in range(1, MAX_PARTS + 1):
        yield from _splits(tokens, names, count)


def _splits(tokens, names, count):
    if count == 1:
        yield from (((None, name),) for name in names)
        return
    for i, limit in enumerate(tokens[:-1]):
        for name in names:
            for rest in _splits(tokens[i + 1 :], names, count - 1):
                if rest[0][1] != name:
                    yield ((limit, name), *rest)


@settings(max_examples=150, deadline=None)
@given(tables(st.floats(1, 1000), most_tokens=5, most_names=3))
def test_no_other_split_costs_less(timings):
    able = tuple((name, 16 if name == "skinny" else None) for name, _ in timings.us)
    found = best_split(timings, able, (1, min(8192, REACH * timings.tokens[-1])))
    lasting = {name for name, limit in able if limit is None}
    allowed = [
        parts
        for parts in every_split(timings.tokens, [name for name, _ in able])
        if parts[-1][1] in lasting
    ]
    least = min((cost_of(timings, able, parts) for parts in allowed), default=inf)
    assert (cost_of(timings, able, found) if found else inf) == pytest.approx(least)
    assert len(found) <= MAX_PARTS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from((10.0, 10.6, 12.0, 20.0))] * 3), min_size=7, max_size=7)
)
def test_where_more_parts_would_pay_the_cheapest_of_so_many_are_taken(columns):
    """Seven token counts, of which the fastest kernel may be another each time."""
    tokens, names = tuple(2**i for i in range(len(columns))), ("a", "b", "c")
    timings = Timings("", tokens, tuple(zip(names, zip(*columns))))
    able = tuple((name, None) for name in names)
    found = best_split(timings, able, (1, 64))
    assert len(found) <= MAX_PARTS
    least = min(cost_of(timings, able, split) for split in every_split(tokens, names))
    assert cost_of(timings, able, found) == pytest.approx(least)


def test_nothing_is_split_for_noise_or_for_a_gain_at_a_single_count():
    tokens = (1, 8, 64)
    noisy = Timings("", tokens, (("a", (10, 10, 10)), ("b", (9.8, 10.2, 9.8))))
    small = Timings("", tokens, (("a", (10, 10, 10)), ("b", (9.6, 11, 11))))
    large = Timings("", tokens, (("a", (10, 10, 10)), ("b", (9, 11, 11))))
    able = (("a", None), ("b", None))
    assert best_split(noisy, able, (1, 64)) == best_split(small, able, (1, 64)) == ((None, "a"),)
    assert best_split(large, able, (1, 64)) == ((1, "b"), (None, "a"))


# ---------------------------------------------------------------- kernels compiled at the start


def of_two(*ratios: float) -> Timings:
    """deep_gemm, which compiles when the engine starts, takes 10 us; cutlass so much as much."""
    tokens = tuple(2**i for i in range(len(ratios)))
    us = (("deep_gemm", (10.0,) * len(tokens)), ("cutlass", tuple(10.0 * r for r in ratios)))
    return Timings("", tokens, us)


@pytest.mark.parametrize(
    ("ratios", "chosen"),
    [
        ((1.05, 1.0, 1.02, 1.0), "cutlass"),  # 2 % on average
        ((1.09, 1.0, 1.0, 1.0), "cutlass"),
        ((1.12, 1.0, 1.0, 1.0), "deep_gemm"),  # 12 % at worst
        ((1.05, 1.05, 1.05, 1.05), "deep_gemm"),  # 5 % on average
        ((0.9, 0.9, 1.2, 1.2), "deep_gemm"),  # fastest where it matters, slow elsewhere
    ],
)
def test_a_kernel_that_compiles_at_the_start_must_win_by_more_than_noise(ratios, chosen):
    able = (("deep_gemm", None), ("cutlass", None))
    parts = best_split(of_two(*ratios), able, (1, 64), ("deep_gemm",))
    assert chosen in {name for _, name in parts}
    without = best_split(of_two(*ratios), able[1:], (1, 64), ("deep_gemm",))
    assert without == ((None, "cutlass"),)


def test_of_two_equals_the_one_that_is_built_ahead_of_time_serves():
    timings = timed(deep_gemm=ALWAYS, cutlass=ALWAYS)
    decision = ask(linear(), "90", timings=timings)
    assert decision.chosen == "cutlass" and decision.origin.rank == 6
    forced = ask(linear(), "90", "all", "--linear-backend deep_gemm", timings=timings)
    assert forced.chosen == "deep_gemm"


@settings(max_examples=200, deadline=None)
@given(tables(st.floats(1, 1000)), st.permutations(_NAMES), st.integers(0, 5))
def test_leaving_compiled_kernels_out_costs_no_more_than_its_limits(timings, order, count):
    able = tuple((name, None) for name, _ in timings.us)
    m_range = (1, min(8192, REACH * timings.tokens[-1]))
    names = [name for name, _ in able]
    fastest = expected(timings, best_split(timings, able, m_range), names, m_range)
    found = expected(
        timings, best_split(timings, able, m_range, tuple(order[:count])), names, m_range
    )
    assert found.mean_regret <= max(fastest.mean_regret, MEAN_COST_OF_LEAVING_OUT) + 1e-9
    assert found.worst_regret <= max(fastest.worst_regret, WORST_COST_OF_LEAVING_OUT) + 1e-9


def test_what_was_measured_for_few_tokens_decides_nothing_for_many():
    able = (("deep_gemm", None), ("cutlass", None))
    row = Timings("", (1, 8), (("cutlass", (5.0, 5.0)), ("deep_gemm", (9.0, 9.0))))
    assert best_split(row, able, (1, 8192)) == ()
    assert best_split(row, able, (1, 64)) == ((None, "cutlass"),)


@settings(max_examples=200, deadline=None)
@given(tables())
def test_regret_is_never_negative_and_the_mean_is_at_most_the_worst(timings):
    names = [name for name, _ in timings.us]
    for name in names:
        choice = expected(timings, ((None, name),), names, (1, 8192))
        if choice is not None:
            assert 0 <= choice.mean_regret <= choice.worst_regret + 1e-9
            assert choice.worst_tokens in timings.tokens


# ---------------------------------------------------------------- shown


def test_a_page_and_the_json_tell_the_table_what_to_expect_and_the_regret():
    decision = ask(linear(), "90", "all", "--linear-backend cutlass", timings=SMALL_FIRST)
    values = Report(Device.parse("sm_90"), LIBS["all"], {}, [("a", decision)])
    shown = " ".join(page(values).split())
    assert "100 us for M = 1" in shown and "skinny for M = 1" in shown
    content = json.loads(json.dumps(report(*values)))
    assert report(*parse_report(content)) == content
    told = content["decisions"][0]
    assert told["timings"]["us"]["skinny"] == [10.0, 10.0, 100.0, 100.0, 100.0]
    assert told["expected"]["worst_regret"] == pytest.approx(9)
    assert parse_report(content).records == [("a", decision)]


# ---------------------------------------------------------------- quarantine


def quarantined(backend: str, problem, why: Why = Why.LIBRARY) -> Libs:
    entry = Quarantined(backend, problem.size_key, why, "killed by SIGSEGV")
    return replace(LIBS["all"], quarantined=frozenset({entry}))


def test_a_kernel_that_failed_here_is_rejected_for_that_problem_with_what_happened():
    for why in (Why.LIBRARY, Why.NUMERICS):
        libs = quarantined("deep_gemm", linear(), why)
        decision = ask(linear(), "90", libs, timings=timed(deep_gemm=ALWAYS, cutlass=NEVER))
        assert decision.chosen == "cutlass"
        reasons = next(c.reasons for c in decision.candidates if c.backend == "deep_gemm")
        assert reasons == (Reason(why, "killed by SIGSEGV"),)
        assert ask(linear(n=1024), "90", libs).chosen == "deep_gemm"


def test_a_kernel_that_failed_here_is_refused_when_it_is_asked_for():
    libs = quarantined("deep_gemm", linear())
    assert ask(linear(), "90", libs, "--linear-backend deep_gemm").chosen is None
    assert ask(linear(), "90", libs, "VLLM_USE_DEEP_GEMM=1").chosen == "cutlass"


def test_experts_are_split_by_what_was_measured_too():
    timings = timed(triton=(1, 64), cutlass=(65, 8192), deep_gemm=NEVER)
    decision = ask(moe(), "90", timings=timings)
    assert (decision.chosen, decision.origin.rank) == ("triton<=64|cutlass", 6)
    assert expectation_of(decision).worst_regret == 0
    forced = ask(moe(), "90", "all", "--moe-backend deep_gemm", timings=timings)
    assert expectation_of(forced).worst_regret == pytest.approx(9)


def test_a_failure_speaks_against_problems_of_its_own_family_alone():
    libs = quarantined("deep_gemm", linear())
    assert ask(moe(), "90", libs) == ask(moe(), "90")
    libs = quarantined("deep_gemm", moe())
    assert ask(linear(), "90", libs) == ask(linear(), "90")
    assert ask(moe(), "90").chosen == "deep_gemm" != ask(moe(), "90", libs).chosen
    attention = AttentionProblem(16, 4, 128, "bf16")
    for problem in (
        attention, replace(attention, format="fp8"), replace(attention, sliding_window=512)
    ):  # fmt: skip
        libs = quarantined("triton", problem)
        assert (ask(attention, "90", libs).chosen == "flashinfer") == (problem == attention)
    windowed, libs = replace(attention, sliding_window=512), quarantined("triton", attention)
    assert ask(windowed, "90", libs).chosen == "triton"
    assert all(name in registry.backend_names("linear") for name, _ in SPLIT.us)
    assert set(TOKENS) == set(SPLIT.tokens)


# ---------------------------------------------------------------- layouts of the weight

_LAYOUTS = st.lists(
    st.sampled_from(["stored", "up-first", "a", "b"]), min_size=1, max_size=3, unique=True
).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    tables(st.floats(1, 1000), most_tokens=5, most_names=4),
    st.dictionaries(st.sampled_from(_NAMES), _LAYOUTS),
)
def test_parts_of_a_split_share_a_layout_of_the_weight_and_the_best_of_those_left_wins(
    timings, layouts
):
    able = tuple((name, None) for name, _ in timings.us)
    m_range = (1, min(8192, REACH * timings.tokens[-1]))
    found = best_split(timings, able, m_range, (), tuple(layouts.items()))
    names = [name for name, _ in able]

    def is_of_one_weight(split):
        taken = [set(layouts.get(name, ("stored",))) for _, name in split]
        return bool(set.intersection(*taken))

    allowed = [one for one in every_split(timings.tokens, names) if is_of_one_weight(one)]
    assert found in allowed
    least = min(cost_of(timings, able, split) for split in allowed)
    assert cost_of(timings, able, found) <= least + 1e-9


FEW_AND_MANY = timed(marlin=(1, 64), humming=(65, 8192))
W4A16 = linear("int4-group[128]")


def test_two_that_each_lay_the_weight_out_are_never_split():
    decision = ask(W4A16, "90", timings=FEW_AND_MANY)
    assert decision.chosen in ("marlin", "humming") and not decision.winner.parts
    for winner, loser in (("marlin", "humming"), ("humming", "marlin")):
        timings = timed(**{winner: (1, 1024), loser: (1025, 8192)})
        assert ask(W4A16, "90", timings=timings).chosen == winner


def test_what_shares_the_stored_weight_is_not_split_with_what_lays_it_out():
    timings = timed(marlin=(1, 16), deep_gemm=(17, 8192), cutlass=NEVER)
    assert ask(linear(), "90", timings=timings).chosen == "deep_gemm"


def test_a_kernel_that_would_round_scales_by_more_than_the_budget_yields_to_the_next():
    timings = timed(humming=ALWAYS, marlin=NEVER)
    rounded = replace(W4A16, requant_error=0.002)
    assert ask(W4A16, "90", timings=timings).chosen == "humming"
    for budget, chosen in (("0.01", "humming"), ("0.001", "marlin"), ("0", "marlin")):
        decision = ask(rounded, "90", "all", f"--max-requant-error {budget}", timings=timings)
        assert decision.chosen == chosen
    (humming,) = [c for c in decision.candidates if c.backend == "humming"]
    assert {reason.why for reason in humming.reasons} == {Why.NUMERICS}


# ---------------------------------------------------------------- what else decides


def test_a_fallback_goes_to_what_was_measured_fastest():
    wish = "--linear-backend flashinfer-deepgemm --on-unmet fallback"
    timings = timed(triton=ALWAYS, deep_gemm=NEVER)
    decision = ask(linear(), "100", wishes=wish, timings=timings)
    assert (decision.chosen, decision.origin.rank) == ("triton", 2)
    assert decision.timings == timings


def test_of_two_that_compile_the_dearer_is_left_out_first():
    timings = timed(deep_gemm=ALWAYS, triton=ALWAYS, cutlass=NEVER)
    assert ask(linear(), "90", timings=timings).chosen == "triton"


def test_a_kernel_for_few_tokens_is_not_the_first_that_must_be_measured():
    failed = Quarantined("cutlass", linear().size_key, Why.LIBRARY, "hung")
    libs = replace(LIBS["none"], quarantined=frozenset({failed}))
    decision = ask(linear(), "90", libs, timings=timed(skinny=(1, 8), marlin=(9, 8192)))
    assert (decision.chosen, decision.origin.rank) == ("triton", 7)  # which nobody measured


def test_a_split_of_which_a_part_requantises_says_so():
    decision = ask(linear(), "100", timings=timed(deep_gemm=(1, 64), cutlass=(65, 8192)))
    assert decision.chosen == "deep_gemm<=64|cutlass"
    assert decision.winner.is_lossy and decision.winner.scales == "ue8m0"


def test_a_range_beyond_what_was_measured_goes_by_the_last_count():
    row = Timings("", (1, 512, 4096), (("a", (1.0, 5.0, 9.0)), ("b", (2.0, 6.0, 5.0))))
    assert best_split(row, (("a", None), ("b", None)), (5000, 8192)) == ((None, "b"),)


def test_what_was_asked_for_counts_among_the_fastest_though_it_could_not_be_chosen():
    row = Timings("", (1, 8), (("a", (10.0, 10.0)), ("b", (5.0, 20.0))))
    found = expected(row, ((None, "b"),), ["a"], (1, 8))
    assert found.mean_regret == pytest.approx(2**0.5 - 1) and found.worst_tokens == 8
