"""The pages for a browser say what the decisions say, in one file that needs nothing else."""

import json
import re
from html import unescape

import pages
import pytest
from hypothesis import given, settings
from selection_cases import LIBS, ask, linear, moe, parse_device, timed
from test_explain import as_json, one_report, reports

from vllm.kernels import registry
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.report import diff
from vllm.kernels.report.html_diff import html_diff
from vllm.kernels.report.html_report import html_page
from vllm.kernels.report.ledger import Entry, Ledger
from vllm.kernels.report.page_style import COLOURS, MARKS, STYLE
from vllm.kernels.report.report import Report
from vllm.kernels.report.text_report import GRADES, KINDS
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.reason import Why

HOSTILE = "</script><script>alert(1)</script><!-- <script> & \"'"
SPLIT = timed(skinny=(1, 8), deep_gemm=(64, 4096))


def report_of(*decisions, device="90") -> Report:
    records = [(f"model.layers.{i}.proj", decision) for i, decision in enumerate(decisions)]
    return Report(parse_device(device), LIBS["all"], {}, records)


def split_decision(wishes: str = "-", device: str = "90"):
    return ask(linear(), device, "all", wishes, timings=SPLIT)


# ---------------------------------------------------------------- what it says


@settings(max_examples=30, deadline=None)
@given(reports())
def test_a_page_shows_every_reason_and_needs_nothing_else(values):
    page = html_page(values, HOSTILE)
    assert "<script>alert" not in page
    pages.check_alone(page)
    shown = pages.parse(page).one("body").text
    for _, decision in values.records:
        for candidate in decision.candidates:
            assert all(reason.text in shown for reason in candidate.reasons)


@settings(max_examples=30, deadline=None)
@given(reports())
def test_a_page_carries_the_json_of_the_report(values):
    assert pages.embedded(html_page(values, "x")) == as_json(values)


def test_no_text_ends_the_json_of_a_page_early():
    values = Report(parse_device("90"), LIBS["all"], {HOSTILE: HOSTILE}, [])
    page = html_page(values, HOSTILE)
    assert pages.embedded(page)["env"] == {HOSTILE: HOSTILE}
    assert page.count("<script") == 2 and "<!--" not in page


@settings(max_examples=30, deadline=None)
@given(reports())
def test_each_cell_says_what_the_json_says_of_its_candidate(values):
    root = pages.parse(html_page(values, "x"))
    decisions = as_json(values)["decisions"]
    details = {item.attributes["id"]: item.text for item in root.all("li") if item.attributes}
    num_rows = 0
    for table in root.all("table", role="grid"):
        heads = [head.text for head in table.one("thead").all("th")][2:]
        for row in table.one("tbody").all("tr"):
            decision = decisions[int(row.attributes["data-d"])]
            candidates = {c["backend"]: c for c in decision["candidates"]}
            kernel, *cells = row.all("td")
            assert kernel.text.startswith(decision["chosen"] or "NO KERNEL")
            assert dict(zip(heads, cells)).keys() == candidates.keys()
            for name, cell in zip(heads, cells):
                check_cell(cell, candidates[name], name == decision["chosen"], details)
            num_rows += 1
    assert num_rows == len(decisions)


def check_cell(cell: pages.Element, candidate: dict, is_chosen: bool, details: dict) -> None:
    kinds = [reason["why"] for reason in candidate["reasons"]]
    kinds = kinds or ["chosen" if is_chosen else "could run"]
    link = cell.one("a")
    kind = link.attributes["class"].removeprefix("is-").replace("-", " ")
    assert kind in kinds and link.text.startswith(kind)
    assert (f"+{len(kinds) - 1}" in link.text) == (len(kinds) > 1)
    assert link.one("i").attributes["class"] == f"grade-{candidate['grade']}"
    told = details[link.attributes["href"][1:]]
    assert told.startswith(candidate["backend"]) and all(kind in told for kind in kinds)
    assert f"{candidate['grade']}: {GRADES[Grade(candidate['grade'])]}" in told
    requant = candidate["requant"]
    if requant and requant["error"]:
        assert f"{requant['error']:.2%}" in link.text and f"{requant['error']:.2%}" in told


def test_a_format_that_a_kernel_does_not_take_comes_before_all_else_about_it():
    decision = ask(linear("bf16"), "90")
    root = pages.parse(html_page(report_of(decision), "x"))
    (row,) = root.one("tbody").all("tr")
    marlin = next(c for c in decision.candidates if c.backend == "marlin-w4a8")
    assert marlin.reasons[0].why is not Why.FORMAT
    heads = [head.text for head in root.one("thead").all("th")]
    cell = dict(zip(heads[1:], row.all("td")))["marlin-w4a8"]
    assert cell.text.startswith("format +")


def test_the_table_has_a_row_per_decision_and_kernels_in_default_order():
    page = html_page(one_report(linear(), linear(), moe()), "x")
    tables = pages.parse(page).all("table", role="grid")
    assert [len(table.one("tbody").all("tr")) for table in tables] == [1, 1]
    for table, family in zip(tables, ("linear", "moe")):
        heads = [head.text for head in table.one("thead").all("th")]
        assert heads == ["layers", "kernel", *registry.backend_names(family, "sm_10x")]


def test_what_was_requantised_at_load_is_told():
    entry = Entry("lm_head", "fp8-block float32 -> ue8m0", 0.0266, 0.1, False)
    values = report_of(ask(linear(), "100"), device="100")._replace(ledger=Ledger([entry]))
    assert "worst 2.66% (lm_head)" in html_page(values, "x")


def test_the_decision_names_what_decided_and_what_is_expected():
    item = pages.parse(html_page(report_of(split_decision()), "x")).one("li", id="d0")
    facts = dict(zip((e.text for e in item.all("dt")), (e.text for e in item.all("dd"))))
    assert facts["decided by"] == "measured: tuned/example.json (rank 6 of 7)"
    assert facts["expected"].startswith("10 us for M = 1")


# ---------------------------------------------------------------- splits


def test_a_split_is_drawn_as_ranges_of_m_in_the_cell_of_its_kernel():
    decision = split_decision()
    assert decision.chosen == "skinny<=8|deep_gemm"
    root = pages.parse(html_page(report_of(decision), "x"))
    assert decision.chosen not in [head.text for head in root.all("th")]
    kernel, *cells = root.one("tbody").all("td")
    parts = kernel.all("span", class_="part")
    assert [part.text for part in parts] == ["1\N{EN DASH}8 skinny", "9+ deep_gemm"]
    bars = [list(map(int, re.findall(r"\d+", part.one("s").attributes["style"]))) for part in parts]
    assert bars[0][0] == 0 and bars[1][1] == 0 and sum(bars[0]) > 50
    assert abs(bars[0][1] + bars[1][0] - 100) <= 1, "one range begins where the other ends"
    serving = {cell.text for cell in cells if cell.all("small", class_="is-chosen")}
    assert len(serving) == 2
    assert any("shape" in text and "M 1\N{EN DASH}8" in text for text in serving)
    assert any("could run" in text and "M 9+" in text for text in serving)


def test_a_split_that_policy_keeps_away_has_a_cell_of_its_own():
    decision = split_decision("VLLM_USE_DEEP_GEMM=0")
    rejected = [c for c in decision.candidates if c.parts and c.reasons]
    assert len(rejected) == 1 and decision.chosen != rejected[0].backend
    root = pages.parse(html_page(report_of(decision), "x"))
    assert root.one("thead").all("th")[2].text == "other split"
    link = root.one("tbody").all("td")[1].one("a")
    assert link.attributes["class"] == "split is-policy"
    assert [part.text for part in link.all("span", class_="part")][-1] == "9+ deep_gemm"


# ---------------------------------------------------------------- size and style


def test_a_page_of_100_distinct_layers_is_less_than_1_mb():
    tokens = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
    candidates = ask(linear(), "90").candidates
    able = [c.backend for c in candidates if all(r.why is Why.SHAPE for r in c.reasons)]
    us = tuple(
        (backend, tuple(10.17 + i + 1.37 * m for m in range(len(tokens))))
        for i, backend in enumerate(able)
    )
    timings = Timings("tuned/example.json (NVIDIA H100 80GB HBM3, 2026-11-23)", tokens, us)
    problems = [linear(n=1024 + 64 * i) for i in range(100)]
    decisions = [ask(problem, "90", timings=timings) for problem in problems]
    page = html_page(report_of(*decisions), "x")
    assert page.count('<tr data-d="') == 100
    assert len(page.encode()) < 1_000_000


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_its_ground(scheme):
    shown = [(name, f"{name}-text") for name in COLOURS if f"{name}-text" in COLOURS]
    for ground, text in [*shown, ("page", "text"), ("page", "soft"), ("raised", "soft")]:
        low, high = sorted(luminance(COLOURS[name][scheme]) for name in (ground, text))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{text} on {ground}"


def test_every_verdict_has_a_colour_of_its_own_and_every_grade_a_mark():
    names = [kind.replace(" ", "-") for kind in KINDS]
    for scheme in (0, 1):
        assert len({COLOURS[name][scheme] for name in names}) == len(names)
    assert all(f".is-{name} " in STYLE for name in names)
    assert len(set(MARKS.values())) == len(Grade) and all(f".grade-{g}:" in STYLE for g in Grade)


# ---------------------------------------------------------------- differences


def difference(before: Report, after: Report) -> tuple[list[diff.Change], str]:
    names = ("a.json", f"{HOSTILE}.json")
    found = diff.changes(before, after, names)
    return found, html_diff(before, after, found, names)


@settings(max_examples=30, deadline=None)
@given(reports(), reports())
def test_the_page_of_a_difference_has_every_change_and_needs_nothing_else(before, after):
    found, page = difference(before, after)
    pages.check_alone(page)
    assert "<script>alert" not in page
    assert pages.embedded(page) == json.loads(json.dumps([change.to_json() for change in found]))
    articles = pages.parse(page).all("article")
    assert len(articles) == len(found)
    for change, article in zip(found, articles):
        rows = [row for body in article.all("tbody") for row in body.all("tr")]
        assert [plain(row.one("th").text) for row in rows] == [
            plain(d.what) for d in change.details
        ]
        for detail, row in zip(change.details, rows):
            before_cell, after_cell = row.all("td")
            assert words(before_cell.text) == words(detail.before or "\N{EM DASH}")
            assert words(after_cell.text) == words(detail.after or "\N{EM DASH}")


def plain(text: str) -> str:
    """Without how the name of a split is shown."""
    return unescape(text).replace(" | ", "|").replace(" \N{LESS-THAN OR EQUAL TO} ", "<=")


def words(text: str) -> str:
    return re.sub(r"[:;\s]", "", text)


def test_a_change_shows_the_kernels_and_the_kind_of_each_reason():
    model = "qwen3_5_moe_text"
    rule = one_report(linear(), model=model)
    lifted = one_report(linear(), model=model, wish="VLLM_USE_DEEP_GEMM=1")
    _, page = difference(rule, lifted)
    article = pages.parse(page).one("article")
    assert article.one("h2").text == "cutlass \N{RIGHTWARDS ARROW} deep_gemm 1 linear layer"
    assert article.one("div", class_="names").text == "model.layers.0.proj"
    rows = {row.one("th").text: row.all("td") for row in article.one("tbody").all("tr")}
    before, after = rows["deep_gemm"]
    assert before.one("b").attributes["class"] == "is-policy"
    assert after.one("b").attributes["class"] == "is-chosen"


def test_equal_reports_have_a_page_that_says_so():
    values = one_report(linear(), moe())
    found, page = difference(values, values)
    assert not found and "No layer differs." in page and "0 of 2 layers" in page
    assert not pages.parse(page).all("form")
