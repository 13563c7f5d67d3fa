"""Noise of measurements, errors and skewed routing: what tables keep of them, and what decides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selection_cases import LIBS, ask, linear, moe

from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import Chip, Entry, Table, read_table, timings_of, write_table
from vllm.kernels.report import json_report
from vllm.machine import Device

H100 = Chip(Device.parse("sm_90"), 132, 3352)
EARLIER, FASTER = "deep_gemm", "cutlass"
TOKENS = (1, 512, 4096)


def timed(us: float, noise: float | None) -> Entry:
    noises = () if noise is None else tuple((m, noise) for m in TOKENS)
    return Entry("", "2026-11-24", tuple((m, us) for m in TOKENS), noise=noises)


def chosen(earlier_us: float, faster_us: float, noise: float | None) -> str:
    row = {EARLIER: timed(earlier_us, noise), FASTER: timed(faster_us, noise)}
    timings = Table(H100, "", {linear().size_key: row}).timings(linear())
    ((_, backend),) = timings.best_split(((EARLIER, None), (FASTER, None)), (1, 8192))
    return backend


@pytest.mark.parametrize(
    ("ratio", "noise", "wins"),
    [
        (1.02, None, EARLIER),
        (1.06, None, FASTER),
        (1.06, 0.01, FASTER),
        (1.06, 0.04, EARLIER),  # each may be 4 % off
        (1.06, 0.0, FASTER),
        (1.30, 0.10, FASTER),
        (1.15, 0.10, EARLIER),
    ],
)
def test_a_kernel_replaces_an_earlier_one_only_for_more_than_the_noise(ratio, noise, wins):
    assert chosen(100.0 * ratio, 100.0, noise) == wins


@given(st.floats(0.0, 0.1), st.floats(-1, 1), st.floats(-1, 1))
def test_noise_never_chooses_between_kernels_that_are_as_fast(noise, first, second):
    """Their medians are anywhere in intervals that hold the true one: the earlier stays."""
    own = (100 * (1 + noise * error) for error in (first, second))
    assert chosen(*own, noise / (1 - noise)) == EARLIER


def skewed(us: float, skewed_us: float | None) -> Entry:
    own = () if skewed_us is None else tuple((m, skewed_us) for m in TOKENS)
    return Entry("", "2026-11-24", tuple((m, us) for m in TOKENS), skewed_us=own)


def test_of_experts_the_mean_of_even_and_skewed_routing_counts():
    table = Table(H100, "", {moe().size_key: {"a": skewed(10, 30), "b": skewed(16, 20)}})
    assert dict(table.timings(moe()).us) == {"a": (20,) * 3, "b": (18,) * 3}


def test_where_one_kernel_lacks_skewed_times_even_ones_are_compared():
    old = Table(H100, "old", {moe().size_key: {"a": skewed(10, None), "b": skewed(16, None)}})
    assert dict(old.timings(moe()).us) == {"a": (10,) * 3, "b": (16,) * 3}
    mine = Table(H100, "mine", {moe().size_key: {"b": skewed(14, 5)}})
    assert dict(timings_of([mine, old], moe()).us) == {"a": (10,) * 3, "b": (14,) * 3}
    row = {"a": skewed(10, 30), "b": replace(skewed(16, 20), skewed_us=((1, 20.0),))}
    mixed = Table(H100, "", {moe().size_key: row}).timings(moe())
    assert dict(mixed.us) == {"a": (20, 10, 10), "b": (18, 16, 16)}


def test_skewed_times_of_quantised_tokens_go_with_even_ones():
    times = {"us": 10.0, "quantised_us": 8.0, "skewed_us": 20.0, "skewed_quantised_us": 12.0}
    entry = Entry("", "2026-11-24", **{name: ((1, us),) for name, us in times.items()})
    whole = moe(intermediate=256)
    table = Table(H100, "", {whole.size_key: {"triton": entry}})
    assert table.timings(whole).us == (("triton", (10.0,)),)
    assert table.timings(replace(whole, cut=2)).us == (("triton", (15.0,)),)


@pytest.mark.parametrize("error", [None, 0.0, 0.00213])
def test_a_file_keeps_noise_error_and_skewed_times(tmp_path, error):
    entry = Entry("lib 1", "2026-11-24", ((1, 5.25), (8, 7.5)), (), ((1, 9.0),), (),
                  ((1, 0.0), (8, 0.012)), error)  # fmt: skip
    path = tmp_path / "t.json"
    write_table(path, Table(H100, "", {moe().size_key: {"triton": entry}}))
    again = read_table(path).rows[moe().size_key]["triton"]
    assert replace(again, error=None) == replace(entry, error=None)
    assert again.error == (None if error is None else pytest.approx(error, rel=0.02))
    assert ("error" in path.read_text()) == (error is not None)


def test_a_later_measurement_keeps_other_token_counts_of_every_kind():
    old = Entry("lib 1", "2026-11-23", ((1, 5.0), (8, 6.0)), skewed_us=((8, 7.0),), error=0.1)
    new = Entry("lib 1", "2026-11-24", ((8, 5.5),), noise=((8, 0.01),), error=0.2)
    both = old.updated(new)
    assert (both.us, both.skewed_us, both.noise) == (((1, 5.0), (8, 5.5)), ((8, 7.0),),
                                                     ((8, 0.01),))  # fmt: skip
    assert (both.date, both.error) == ("2026-11-24", 0.2)


def test_noise_is_in_the_json_of_a_decision_and_comes_back():
    row = {name: timed(100.0, 0.02) for name in (EARLIER, FASTER)}
    timings = Table(H100, "", {linear().size_key: row}).timings(linear())
    decision = ask(linear(), "90", LIBS["deep_gemm"], timings=timings)
    content = json_report.report(decision.device, LIBS["deep_gemm"], {}, [("layer", decision)])
    assert content["decisions"][0]["timings"]["noise"] == {name: [0.02] * 3 for name in row}
    assert json_report.parse_report(content).records == [("layer", decision)]
    del content["decisions"][0]["timings"]["noise"]  # of an earlier version
    (record,) = json_report.parse_report(content).records
    assert isinstance(record[1].timings, Timings) and record[1].timings.noise == ()


# ---------------------------------------------------------------- what was chosen before


ABLE = (("deep_gemm", None), ("cutlass", None))


def row_of(source: str, *, deep_gemm: float, cutlass: float) -> Table:
    row = {"deep_gemm": timed(deep_gemm, 0.002), "cutlass": timed(cutlass, 0.002)}
    return Table(H100, "", {linear().size_key: row}, source)


def chosen_over(committed: Table | None, own: Table) -> str:
    tables = (own,) if committed is None else (own, committed)
    timings = Known(tables).evidence(linear())
    ((_, backend),) = timings.best_split(ABLE, (1, 8192))
    return backend


@pytest.mark.parametrize(
    ("deep_gemm", "cutlass", "alone", "stays"),
    [
        (100.0, 96.0, "cutlass", True),
        (100.0, 95.0, "cutlass", False),
        (101.0, 100.0, "deep_gemm", True),
    ],
)
def test_a_users_times_replace_a_committed_choice_only_for_more_than_runs_differ(
    deep_gemm, cutlass, alone, stays
):
    own = row_of("mine.json", deep_gemm=deep_gemm, cutlass=cutlass)
    committed = row_of("tuned/t.json", deep_gemm=100.0, cutlass=120.0)
    assert chosen_over(None, own) == alone
    assert chosen_over(committed, own) == ("deep_gemm" if stays else alone)
    theirs = row_of("theirs.json", deep_gemm=100.0, cutlass=120.0)
    assert chosen_over(theirs, own) == alone  # another of the user's is no choice of this build


@pytest.mark.parametrize(("gain", "stays"), [(1.14, True), (1.16, False)])
def test_a_committed_choice_without_compilation_stays_for_longer(gain, stays):
    tokens = (1, 64, 512, 2048, 4096)
    before = Timings("", tokens, (("deep_gemm", (10.0,) * 5), ("cutlass", (10.0,) * 5)))
    us = (("deep_gemm", (10.0,) * 5), ("cutlass", (10.0, 10.0, 10.0 * gain, 10.0, 10.0)))
    alone, over = (
        Timings("", tokens, us, before=one).best_split(ABLE, (1, 8192), ("deep_gemm",))
        for one in (None, before)
    )
    assert alone == ((None, "deep_gemm"),)
    assert over == (((None, "cutlass"),) if stays else alone)


def test_a_committed_choice_that_was_not_timed_by_the_user_does_not_stay():
    own = row_of("mine.json", deep_gemm=100.0, cutlass=96.0)
    timings = own.timings(linear())
    before = Timings("", TOKENS, (("triton", (90.0,) * 3), ("deep_gemm", (100.0,) * 3)))
    able = (("triton", None), *ABLE)
    found = replace(timings, before=before).best_split(able, (1, 8192))
    assert found == ((None, "cutlass"),)


def test_a_gain_over_one_range_is_enough():
    before = Timings("", TOKENS, (("deep_gemm", (10.0,) * 3), ("cutlass", (20.0,) * 3)))
    us = (("deep_gemm", (10.0, 10.0, 10.8)), ("cutlass", (20.0, 20.0, 10.0)))
    found = Timings("", TOKENS, us, before=before).best_split(ABLE, (1, 8192))
    assert found == ((512, "deep_gemm"), (None, "cutlass"))
    less = (("deep_gemm", (10.0, 10.0, 10.4)), ("cutlass", (20.0, 20.0, 10.0)))
    assert Timings("", TOKENS, less, before=before).best_split(ABLE, (1, 8192)) == (
        (None, "deep_gemm"),
    )
