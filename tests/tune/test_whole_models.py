"""Whole models: the kernels that are chosen by the committed tables, beside the fastest of them."""

from functools import cache
from pathlib import Path

import pytest

from vllm.kernels.evidence.tables import SHIPPED, TOKENS, Entry, Table, read_table
from vllm.kernels.report.question import GPUS
from vllm.kernels.tuning import whole_models
from vllm.kernels.tuning.whole_models import MODELS, RANKS, WholeModel

H100, H200 = GPUS["h100"], GPUS["h200"]
DOCS = Path(__file__).parents[2] / "docs" / "tuning.md"
SIZES = ("6144x4096", "4096x4096", "24576x4096", "4096x12288")  # of Qwen3-8B on one rank


@cache
def of_committed_tables() -> tuple[WholeModel, ...]:
    tables = map(read_table, sorted(SHIPPED.glob("*.json")))
    return tuple(found for table in tables for found in whole_models.whole_models(table))


def made_table(deep_gemm: dict[str, float], cutlass: dict[str, float]) -> Table:
    """Of the layers of Qwen3-8B, by size, the same microseconds for any number of tokens."""
    rows = {}
    for size in deep_gemm:
        key = f"fp8-block[128x128]:{size} bf16 dynamic-group128,none"
        times = {"deep_gemm": deep_gemm[size], "cutlass": cutlass[size]}
        rows[key] = {
            name: Entry("", "2026-11-24", tuple((m, us) for m in TOKENS))
            for name, us in times.items()
        }
    return Table(H100, "made", rows)


def test_no_whole_model_takes_more_than_3_percent_over_the_fastest():
    found = of_committed_tables()
    assert all(len(one.ratios) == len(whole_models.TOKENS) for one in found)
    worst = max(found, key=lambda one: max(one.ratios))
    assert max(worst.ratios) <= 1.03, whole_models.text([worst])
    assert min(min(one.ratios) for one in found) >= 1.0


def test_the_h100_has_every_model_on_1_to_8_ranks_for_the_most_part():
    found = [one for one in of_committed_tables() if one.chip.is_like(H100)]
    assert [(one.model, one.tp) for one in found] == [(m, tp) for m in MODELS for tp in RANKS]
    assert all(one.share > 0.8 for one in found)
    own = {one.model for one in of_committed_tables() if one.chip.is_like(H200)}
    assert "Qwen3-8B-FP8" in own


def test_the_page_has_these_figures():
    """So a time that is changed by hand and moves a figure is noticed here, and any other by the
    numbers that are fitted (test_cost_fit.py)."""
    assert whole_models.text(of_committed_tables()) in DOCS.read_text()


@pytest.mark.parametrize(("gain", "ratio"), [(1.02, 1.02), (1.2, 1.0)])
def test_a_ratio_is_that_of_sums_over_layers(gain, ratio):
    """DeepGEMM is faster by `gain`: not enough to compile it at the start, or enough."""
    times = dict.fromkeys(SIZES, 10.0)
    table = made_table({size: us / gain for size, us in times.items()}, times)
    found = next(whole_models.whole_models(table))
    assert (found.model, found.tp, found.num_measured, found.num_layers) == (MODELS[0], 1, 144, 145)
    assert found.ratios == pytest.approx((ratio,) * len(whole_models.TOKENS), rel=1e-9)


def test_large_layers_count_more():
    times = dict(zip(SIZES, (10.0, 20.0, 70.0, 100.0)))
    table = made_table({**times, "4096x12288": 98.0}, times)
    found = next(whole_models.whole_models(table))
    assert found.ratios[0] == pytest.approx(200 / 198, rel=1e-9)


def test_a_model_of_which_few_weights_were_measured_is_left_out():
    table = made_table({SIZES[0]: 10.0}, {SIZES[0]: 10.0})
    assert not list(whole_models.whole_models(table))


def test_what_lacks_a_number_of_tokens_is_not_measured():
    times = dict.fromkeys(SIZES, 10.0)
    table = made_table(times, times)
    cut = {
        key: {
            name: Entry("", "", entry.us[:-2] if SIZES[3] in key else entry.us)
            for name, entry in row.items()
        }
        for key, row in table.rows.items()
    }
    found = next(whole_models.whole_models(Table(H100, "made", cut)))
    assert found.num_measured == 108
