"""Steps of a server by number of tokens: what a measurement chose for, and what to tune first."""

from dataclasses import replace

import pytest
from selection_cases import LIBS, ask, linear, moe, parse_device, timed

from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import TOKENS
from vllm.kernels.report.calls import CallCounter, measured_calls, measured_size, steps_text
from vllm.kernels.report.html_report import html_page
from vllm.kernels.report.json_report import report, with_calls
from vllm.kernels.report.report import Report
from vllm.kernels.select.grade import Grade
from vllm.kernels.tuning.plan import in_turns, plan
from vllm.kernels.tuning.traffic import traffic_of

H100 = parse_device("90")
SMALL, LARGE = linear(n=1024), linear(n=8192)
LAYERS = ["model.layers.0.proj", "model.layers.1.proj"]
SPLIT = timed(skinny=(1, 8), deep_gemm=(64, 4096))


def decide(problem=SMALL, timings=SPLIT, wishes="-", device="90"):
    return ask(problem, device, "all", wishes, timings=timings)


def report_of(calls, *decisions, device=H100) -> Report:
    """A layer for each decision."""
    records = [(f"model.layers.{i}.proj", decision) for i, decision in enumerate(decisions)]
    return Report(device, LIBS["all"], {}, records, calls=calls)


# ---------------------------------------------------------------- counting


def test_a_call_counts_as_the_measured_size_that_holds_it():
    for num_tokens in range(1, 9000):
        size = measured_size(num_tokens)
        assert size == min((m for m in TOKENS if m >= num_tokens), default=TOKENS[-1])


def test_kinds_are_counted_apart_and_what_was_taken_is_not_taken_again():
    one, all_engines = CallCounter(), CallCounter()
    for rows in ({"linear": 1, "lm_head": 1}, {"linear": 33, "lm_head": 0}, {"linear": 40}):
        one.add(rows)
    all_engines.update(one.take())
    one.add({"linear": 48})
    all_engines.update(one.take())
    assert not one.take()
    assert all_engines.counts == {"linear": {1: 1, 48: 3}, "lm_head": {1: 1}}
    assert steps_text(all_engines.counts) == "4: 1 with M = 1, 3 with 48"
    assert steps_text({}) == "0"


# ---------------------------------------------------------------- hits and misses


def test_a_hit_was_measured_for_that_size():
    decision = decide()
    assert decision.winner.parts
    calls = {"linear": {1: 5, 64: 7, 96: 2}, "lm_head": {8: 9}}
    assert measured_calls(decision, LAYERS, calls) == ({1: 5, 64: 7}, {96: 2})


def test_the_head_computes_sampled_rows_alone_and_experts_their_own_number():
    calls = {"linear": {512: 1}, "lm_head": {8: 9}, "moe": {4096: 4}}
    assert measured_calls(decide(), ["lm_head"], calls) == ({8: 9}, {})
    assert measured_calls(decide(), ["lm_head", "other"], calls) == ({512: 1}, {})
    experts = decide(moe(), timed(deep_gemm=(1, 4096), triton=(1, 1)))
    assert measured_calls(experts, ["mlp.experts"], calls) == ({4096: 4}, {})


def test_what_nobody_measured_here_is_a_miss():
    calls = {"linear": {64: 7}}
    stale = replace_timings(stale=(("deep_gemm", "1", "2"),))
    estimated = replace_timings(grade=Grade.ESTIMATED)
    another = timed(cutlass=(1, 4096))  # not the one that the default order takes
    for timings in (None, stale, estimated, another):
        decision = decide(timings=timings)
        assert measured_calls(decision, LAYERS, calls) == ({}, {64: 7}), decision.chosen


def replace_timings(**changes) -> Timings:
    names = ("source", "tokens", "us", "stale", "grade", "error", "noise")
    return Timings(**{name: getattr(SPLIT, name) for name in names} | changes)


def test_where_no_measurement_can_choose_nothing_is_counted():
    calls = {"linear": {64: 7}}
    alone = decide(linear("bf16", k=4095), None)
    for decision in (
        decide(wishes="--linear-backend triton"), replace(decide(), is_emulated=True),
        alone, decide(linear("bf16"), None, device="75"),
    ):  # fmt: skip
        assert measured_calls(decision, LAYERS, calls) is None, decision.chosen
    experts = decide(moe("nvfp4"), None)  # torch is never measured there
    assert measured_calls(experts, LAYERS, {"moe": {64: 7}}) is None


def test_a_kernel_for_few_tokens_is_a_choice():
    calls, problem = {"linear": {1: 2, 64: 7}}, linear("bf16", n=64)
    assert measured_calls(decide(problem, None), LAYERS, calls) == ({}, calls["linear"])
    split = decide(problem, timed(torch=(64, 4096), skinny=(1, 8)))
    assert split.winner.parts
    assert measured_calls(split, LAYERS, calls) == (calls["linear"], {})


@pytest.mark.parametrize("device", ["cpu", "75", "80", "90", "100", "120"])
@pytest.mark.parametrize("weight", ["bf16", "fp8-block", "fp8-tensor", "nvfp4", "int4-group[128]"])
def test_there_is_a_choice_where_tune_measures_more_than_one(device, weight):
    for problem in (linear(weight), linear(weight, n=4096 + 64, k=4096 + 32), moe(weight)):
        for libs in ("none", "all"):
            decision = ask(problem, device, libs)
            planned = plan([problem], parse_device(device), LIBS[libs]).jobs
            found = measured_calls(decision, LAYERS, {})
            assert (found is not None) == bool(planned), (problem, libs, decision.chosen)


# ---------------------------------------------------------------- what reports show


def test_a_report_shows_calls_of_the_kinds_it_has_and_hits_of_each_decision():
    content = report(*report_of(None, decide(), decide(LARGE, None)))
    assert "calls" not in content and "calls" not in content["decisions"][0]
    calls = {"linear": {64: 7, 1: 2, 96: 1}, "moe": {64: 7}}
    shown = with_calls(content, calls)
    assert shown["calls"] == {"linear": {"1": 2, "64": 7, "96": 1}}
    first, second = (decision["calls"] for decision in shown["decisions"])
    assert first == {"hits": {"1": 2, "64": 7}, "misses": {"96": 1}}
    assert second == {"hits": {}, "misses": {"1": 2, "64": 7, "96": 1}}


def test_a_page_has_the_steps_in_one_line():
    page = html_page(report_of({"linear": {1: 1200, 64: 3}}, decide()), "x")
    assert "1,203: 1,200 with M = 1, 3 with 64" in page
    assert "with M = 1" not in html_page(report_of(None, decide()), "x")


# ---------------------------------------------------------------- order


def ordered(traffic, tokens=None):
    problems = traffic.layers.elements()
    jobs = plan(problems, H100, LIBS["deep_gemm"], tokens or traffic.tokens or TOKENS).jobs
    return traffic.ordered(jobs)


def order(jobs):
    return list(dict.fromkeys(job.problem.n for job in jobs))


def test_sizes_with_most_time_in_misses_come_first():
    calls = {"linear": {64: 100, 512: 1}}
    unmeasured, measured = decide(SMALL, None), decide(LARGE)
    traffic = traffic_of(report_of(calls, measured, unmeasured), is_same_chip=True)
    assert order(ordered(traffic)) == [SMALL.n, LARGE.n]
    assert traffic.share(SMALL.size_key) == 1 and traffic.share(LARGE.size_key) == 0
    nothing_measured = report_of(calls, decide(SMALL, None), decide(LARGE, None))
    traffic = traffic_of(nothing_measured, is_same_chip=True)
    assert order(ordered(traffic)) == [LARGE.n, SMALL.n]
    assert traffic.share(LARGE.size_key) > traffic.share(SMALL.size_key) > 0
    many = report_of(calls, *[decide(SMALL, None)] * 20, decide(LARGE, None))
    assert order(ordered(traffic_of(many, is_same_chip=True))) == [SMALL.n, LARGE.n]


def test_numbers_of_tokens_come_by_the_time_spent_in_them_misses_first():
    calls = {"linear": {1: 1000, 64: 10, 512: 3000, 96: 1, 2: 5}}
    traffic = traffic_of(report_of(calls, decide()), is_same_chip=True)
    assert traffic.misses[SMALL.size_key] == {2, 96}
    assert traffic.tokens == (1, 2, 16, 64, 96, 512, 4096)
    job = next(job for job in ordered(traffic) if job.backend == "deep_gemm")
    assert job.tokens == (2, 96, 512, 1, 64, 16, 4096)
    unmeasured = traffic_of(report_of(calls, decide(SMALL, None)), is_same_chip=True)
    job = next(job for job in ordered(unmeasured) if job.backend == "deep_gemm")
    assert job.tokens == (512, 1, 64, 2, 96, 16, 4096) and job.first == job.tokens[:5]


def test_a_size_on_which_no_choice_could_rest_takes_one_more_along():
    """A table that ends below a 32nd of the tokens a step can have changes nothing."""
    traffic = traffic_of(report_of({"linear": {1: 9}}, decide(SMALL, None)), is_same_chip=True)
    assert {job.first for job in ordered(traffic)} == {(1, 512), (1,)}  # skinny takes few tokens
    assert all(job.first == (1,) for job in ordered(traffic, tokens=(1, 2)))


def test_misses_of_all_sizes_are_timed_before_the_rest():
    calls = {"linear": {64: 100, 512: 1}}
    report_ = report_of(calls, decide(SMALL, None), decide(LARGE, None), decide(linear(n=2048)))
    jobs = ordered(traffic_of(report_, is_same_chip=True))
    for is_limited in (False, True):
        groups = in_turns(jobs, is_limited)
        found = [
            (group[0].problem.n, max((one.tokens for one in group), key=len)) for group in groups
        ]
        assert found == [
            (LARGE.n, (64, 512)), (SMALL.n, (64, 512)),
            (LARGE.n, (1, 16, 4096)), (SMALL.n, (1, 16, 4096)), (2048, (64, 512, 1, 16, 4096)),
        ]  # fmt: skip


def test_on_another_chip_nothing_of_the_server_is_measured():
    traffic = traffic_of(report_of({"linear": {64: 1}}, decide()), is_same_chip=False)
    assert traffic.misses == {SMALL.size_key: {64}}
    assert traffic_of(report_of({"linear": {64: 1}}, decide()), True).misses == {
        SMALL.size_key: frozenset()
    }


@pytest.mark.parametrize("calls", [None, {}, {"moe": {1: 1}}])
def test_without_steps_the_order_is_the_usual_one(calls):
    traffic = traffic_of(report_of(calls, decide(SMALL, None), decide(LARGE, None)), True)
    assert not traffic.tokens and traffic.share(SMALL.size_key) == 0
    jobs = ordered(traffic)
    assert order(jobs) == [LARGE.n, SMALL.n] and all(job.first is None for job in jobs)


def test_layers_of_equal_size_and_emulated_ones():
    biased = decide(linear(n=1024, bias=True), None)
    calls = {"linear": {64: 1}}
    both = traffic_of(report_of(calls, decide(SMALL, None), biased), True)
    one = traffic_of(report_of(calls, decide(SMALL, None)), True)
    key = SMALL.size_key
    assert both.us[key][64] == pytest.approx(2 * one.us[key][64], rel=2e-3)  # the bias counts
    assert sum(both.layers.values()) == 2
    assert not traffic_of(report_of(calls, replace(biased, is_emulated=True)), True).layers


def test_experts_that_no_token_chooses_are_not_read():
    problem = moe()
    few = traffic_of(report_of({"moe": {1: 1}}, decide(problem, None)), True)
    many = traffic_of(report_of({"moe": {512: 1}}, decide(problem, None)), True)
    key, share = problem.size_key, problem.top_k / problem.num_experts
    assert few.us[key][1] == pytest.approx(share * many.us[key][512], rel=0.1)
