"""Decisions are shown whole: as JSON both ways, as text, as a page, and as differences."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import DEVICES, LIBS, ask, linear, moe, parse_device, timed
from selection_strategies import models, problems, some_libs, wishes

from vllm.errors import ConfigError
from vllm.kernels.evidence.tables import TOKENS
from vllm.kernels.report import diff, text_report
from vllm.kernels.report.json_report import parse_report, report
from vllm.kernels.report.layer_groups import by_outcome, compress
from vllm.kernels.report.ledger import Entry, Ledger
from vllm.kernels.report.report import Report
from vllm.machine import Libs

texts = st.text(max_size=20)
errors = st.floats(0, 10, allow_nan=False)
ledgers = st.none() | st.builds(
    Ledger, st.lists(st.builds(Entry, texts, texts, errors, errors, st.booleans()), max_size=3)
)
counts = st.dictionaries(st.sampled_from(TOKENS), st.integers(1, 10**9), max_size=4)
calls = st.none() | st.dictionaries(st.sampled_from(("linear", "moe", "lm_head")), counts)


@st.composite
def reports(draw) -> Report:
    """Some layers of a model on some machine under some wishes."""
    device, libs = draw(st.sampled_from(DEVICES)), draw(some_libs())
    wish, model = draw(wishes), draw(models)
    asked = draw(
        st.lists(
            st.tuples(texts, problems),
            max_size=6,
            unique_by=lambda pair: (pair[0], pair[1].family),  # a layer asks once per family
        )
    )
    records = [(layer, ask(p, device, libs, wish, model, layer)) for layer, p in asked]
    env = draw(st.dictionaries(texts, texts, max_size=2))
    return Report(parse_device(device), libs, env, records, draw(ledgers), None, draw(calls))


def one_report(*problems_asked, device="100", libs="all", wish="-", model="llama") -> Report:
    records = [
        (f"model.layers.{i}.proj", ask(p, device, libs, wish, model))
        for i, p in enumerate(problems_asked)
    ]
    return Report(parse_device(device), LIBS[libs], {}, records)


def as_json(values: Report) -> dict:
    return json.loads(json.dumps(report(*values)))


# ---------------------------------------------------------------- JSON


@settings(max_examples=200, deadline=None)
@given(reports())
def test_json_comes_back_as_the_same_values_and_the_same_json(values):
    content = as_json(values)
    parsed = parse_report(content)
    assert report(*parsed) == content
    assert (parsed.device, parsed.libs, parsed.env) == values[:3]
    assert parsed.ledger == values.ledger
    assert sorted(parsed.records, key=repr) == sorted(values.records, key=repr)


def test_equal_decisions_stand_once_with_all_their_layers():
    content = as_json(one_report(linear(), moe(), linear()))
    assert [d["layers"] for d in content["decisions"]] == [
        ["model.layers.0.proj", "model.layers.2.proj"],
        ["model.layers.1.proj"],
    ]


def test_switches_among_the_variables_are_written_as_users_write_them():
    values = one_report()._replace(env={"VLLM_USE_DEEP_GEMM": True, "VLLM_LINEAR_BACKEND": "cpu"})
    assert as_json(values)["env"] == {"VLLM_USE_DEEP_GEMM": "1", "VLLM_LINEAR_BACKEND": "cpu"}


def put(path: str, value):
    """A change of the JSON at a place such as `decisions.0.chosen`."""

    def change(content):
        *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
        for key in parents:
            content = content[key]
        if value is KeyError:
            del content[last]
        else:
            content[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("device", "sm_x", "device 'sm_x' unknown device"),
        ("libs", "torch", "libs 'torch' is not a list"),
        ("libs.0", 3, "libs[0] 3 is not a text"),
        ("env", {"A": 1}, "env.A 1 is not a text"),
        ("decisions", KeyError, "lacks 'decisions'"),
        ("decision", [], "unknown field 'decision'; did you mean decisions?"),
        ("decisions.0.chosen", "cutlas", "decisions[0].chosen 'cutlas' is none of the candidates"),
        ("decisions.0.origin.rank", True, "decisions[0].origin.rank True is not a whole number"),
        ("decisions.0.problem.family", "conv", "problem.family 'conv' is unknown"),
        ("decisions.0.problem.n", "4096", "decisions[0].problem.n '4096' is not a whole number"),
        ("decisions.0.problem.n", KeyError, "decisions[0].problem lacks 'n'"),
        ("decisions.0.problem.weight", "fp9", "problem.weight 'fp9' unknown weight format"),
        ("decisions.0.problem.act.0", "always", "problem.act[0] 'always' is not valid"),
        ("decisions.0.problem.m_range", [1], "problem.m_range is not a list of 2"),
        ("decisions.0.problem.requant_error", float("nan"), "is not a finite number"),
        ("decisions.0.candidates.1.reasons.0.why", "fate", "candidates[1].reasons[0].why 'fate'"),
        ("decisions.0.candidates.0.parts", [[1]], "parts[0] is not [largest M or null, backend]"),
        ("decisions.0.candidates.0.fit", {}, "candidates[0].fit lacks 'how'"),
        ("calls", {"linear": {"x": 1}}, "calls.linear 'x' is not valid"),
        ("calls", {"linear": {"0": 1}}, "calls.linear '0' is not valid: less than 1"),
        ("calls", {"linear": {"8": 1.5}}, "calls.linear.8 1.5 is not a whole number"),
        ("calls", {"linear": {"8": -1}}, "calls.linear.8 -1 is less than 1"),
        ("calls", [], "calls is not an object"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(path, value, message):
    content = as_json(one_report(linear()))
    put(path, value)(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse_report(content, "a.json")
    assert str(error.value).startswith("a.json: ")


@pytest.mark.parametrize("content", [None, [], "text", 3])
def test_what_is_no_object_is_refused(content):
    with pytest.raises(ConfigError, match=r"a\.json: the whole"):
        parse_report(content, "a.json")


# ---------------------------------------------------------------- names


def expand(pattern: str) -> list[str]:
    """The names a pattern stands for; written apart from what is tested."""
    found = re.search(r"\{([^}]*)\}", pattern)
    if not found:
        return [pattern]
    items = []
    for item in found[1].split(","):
        start, _, last = item.partition("..")
        items.append(start)
        if last:
            firsts = [int(i.partition("-")[0]) for i in items[-2:]]
            step, length = firsts[1] - firsts[0], start.partition("-")[2]
            width = int(length) - firsts[1] if length else 0
            first = firsts[1]
            while first != int(last.partition("-")[0]):
                first += step
                items.append(f"{first}-{first + width}" if length else str(first))
    numbers = []
    for item in items:
        first, _, last = item.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [name for number in numbers for name in expand(f"{head}{number}{tail}")]


layer_names = st.builds(
    "model.layers.{}.{}.{}".format,
    st.integers(0, 30),
    st.sampled_from(["mlp", "experts"]),
    st.sampled_from(["up", "0", "1", "2", "01"]),
)


@given(st.lists(layer_names | st.sampled_from(["lm_head", "a", "a.b", "a.b.3", "a.3"])))
def test_patterns_stand_for_exactly_the_names_they_were_made_of(names):
    expanded = [name for pattern in compress(names) for name in expand(pattern)]
    assert sorted(expanded) == sorted(set(names))


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        ([7], "layers.7.up"),
        (range(40), "layers.{0-39}.up"),
        ([0, 1, 2, 4, 5, 6], "layers.{0-2,4-6}.up"),
        (range(3, 40, 4), "layers.{3,7..39}.up"),
        ([i for i in range(12) if i % 4 != 3], "layers.{0-2,4-6..8-10}.up"),
        ([1, 5], "layers.{1,5}.up"),
    ],
)
def test_numbers_are_written_as_short_ranges(numbers, pattern):
    assert compress([f"layers.{number}.up" for number in numbers]) == [pattern]


def test_a_pattern_goes_over_two_numbers():
    names = [f"layers.{i}.experts.{j}.up" for i in range(3) for j in range(8)]
    assert compress(names) == ["layers.{0-2}.experts.{0-7}.up"]


# ---------------------------------------------------------------- text


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@settings(max_examples=50, deadline=None)
@given(reports(), st.sampled_from([72, 100, 120]))
def test_a_page_names_every_choice_and_no_line_is_wider_than_the_terminal(values, width):
    records = [(f"model.layers.{i}.x", d) for i, (_, d) in enumerate(values.records)]
    page = text_report.page(values._replace(records=records, env={}), width)
    assert all(len(line) <= width for line in page.splitlines())
    for outcome in by_outcome(records):
        assert f"{outcome.chosen or 'NO KERNEL'} for {outcome.num_layers} {outcome.family}" in page
        assert outcome.origin.text in unwrapped(page)
        for candidate in outcome.candidates:
            for reason in candidate.reasons:
                assert len(reason.text) > 60 or reason.text in unwrapped(page)


def test_a_page_tells_who_decided_what_stood_before_and_what_a_cut_costs():
    cut = linear(n=576, cut_n=32, m_range=(1, 64), requant_error=0.0266)
    page = text_report.page(one_report(cut, cut, device="121", libs="deep_gemm"))
    assert "cutlass for 2 linear layers" in page
    assert "default order (rank 7 of 7): deep_gemm before it cannot run" in page
    assert "carries no sm120 kernels" in page
    fit = ask(cut, "121", "deep_gemm").winner.fit
    assert f"{2 * fit.extra_bytes / 1024:.1f} KiB a rank in all 2 layers" in page
    assert "rows over 32 ranks, M = 1 to 64" in unwrapped(page)
    assert "relative error 2.66%" in unwrapped(page)


def test_a_page_says_what_the_model_rule_is_about_only_where_it_decided():
    listed = {"model": "qwen3_5_moe_text"}
    about = "VLLM_USE_DEEP_GEMM=1 or --requant allow lifts the model rule"
    assert about in unwrapped(text_report.page(one_report(linear(), **listed)))
    for unaffected in (
        one_report(linear(), device="90", **listed),
        one_report(linear(), libs="flashinfer", **listed),
        one_report(linear(), model="llama"),
    ):
        assert about not in unwrapped(text_report.page(unaffected))


def test_layers_that_differ_in_sizes_alone_are_one_outcome():
    outcomes = by_outcome(one_report(linear(), linear(n=8192), linear("bf16")).records)
    assert [len(outcome.groups) for outcome in outcomes] == [2, 1]


def test_a_table_shows_all_reasons_against_every_candidate():
    decision = ask(linear("bf16", n=100, bias=True), "100", "none")
    table = unwrapped(text_report.table(decision))
    for candidate in decision.candidates:
        assert candidate.backend in table
        assert all(unwrapped(reason.text) in table for reason in candidate.reasons)


def test_the_log_has_one_line_per_distinct_decision():
    records = [(f"model.layers.{i}.up", ask(linear())) for i in range(4)]
    records.append(("lm_head", ask(linear("bf16"))))
    lines = text_report.log_lines(records)
    assert len(lines) == 2
    assert lines[0].startswith("model.layers.{0-3}.up: linear fp8-block[128x128]:4096x4096 bf16 ->")


# ---------------------------------------------------------------- differences


def changes(before: Report, after: Report) -> list[diff.Change]:
    return diff.changes(before, after, ("a.json", "b.json"))


@settings(max_examples=50, deadline=None)
@given(reports())
def test_a_report_does_not_differ_from_itself(values):
    assert changes(values, parse_report(as_json(values))) == []
    assert diff.page(values, values, [], 100) == ""


def test_a_change_names_the_layers_the_kernels_and_what_spoke_before():
    before = one_report(linear(), linear(n=8192), linear("bf16"), model="qwen3_5_text")
    after = one_report(linear(), linear(n=8192), linear("bf16"), wish="VLLM_USE_DEEP_GEMM=1")
    change = changes(before, after)[0]
    assert change.layers == ("model.layers.0.proj", "model.layers.1.proj")
    assert change.title == "cutlass -> deep_gemm"
    what = {row[0]: row[1:] for row in change.details}
    assert what["decided by"][1] == "VLLM_USE_DEEP_GEMM=1"
    assert "model rule" in what["deep_gemm"][0] and what["deep_gemm"][1].startswith("chosen")
    assert "triton" not in what  # that another is asked for stands under "decided by"


def test_a_reason_that_changed_is_a_change_though_the_kernel_is_the_same():
    before = one_report(linear(), libs="flashinfer")
    after = one_report(linear(), libs="all", wish="VLLM_USE_DEEP_GEMM=0")
    (change,) = changes(before, after)
    assert change.title == "cutlass, as before"
    assert "deep_gemm is not installed" in next(b for w, b, a in change.details if w == "deep_gemm")


def test_layers_in_one_report_only_are_listed():
    before, after = one_report(linear(), linear()), one_report(linear())
    (change,) = changes(before, after)
    assert (change.title, change.layers) == ("only in a.json", ("model.layers.1.proj",))
    (change,) = changes(after, before)
    assert change.title == "only in b.json"


def test_a_changed_problem_is_a_change():
    (change,) = changes(one_report(linear()), one_report(linear(cut_k=2)))
    assert change.details[0][0] == "problem"
    assert "columns over 2 ranks" in change.details[0][2]


def test_other_libraries_are_told_but_are_no_change_of_a_layer():
    before = one_report(linear("bf16"))
    after = before._replace(libs=Libs(before.libs.libs - {before.libs.get("deep_gemm")}))
    assert changes(before, after) == []
    assert "no deep_gemm" in diff.page(before, after, [], 100)


def test_what_was_measured_and_what_was_not_are_two_outcomes():
    timings = timed(deep_gemm=(1, 8192), cutlass=(1, 0))
    measured, other = ask(linear(), "90", timings=timings), ask(linear(n=8192), "90")
    reasons = [[c.reasons for c in one.candidates] for one in (measured, other)]
    assert reasons[0] == reasons[1]
    assert [s.origin.rank for s in by_outcome([("a", measured), ("b", other)])] == [6, 7]
