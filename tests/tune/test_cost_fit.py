"""The fit of the cost model: what it finds, how well it chooses, and that the files are its own."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from selection_cases import linear, moe

from vllm.entrypoints.cli.main import main
from vllm.kernels.evidence.cost_model import (
    FITTED,
    RANGES,
    TERMS,
    KindCost,
    kind_of,
    kind_of_problem,
    path_of_fitted,
    read_fitted,
    terms,
    text_of_fitted,
)
from vllm.kernels.evidence.tables import SHIPPED, TOKENS, Entry, Table, read_table, write_table
from vllm.kernels.report.question import GPUS, libs_of
from vllm.kernels.tuning.fit import MIN_SIZES, TILES, KindFit, fitted_of, kinds_of
from vllm.kernels.tuning.held_out import EVERY_KIND, Summary, cases_of, problems_of, summaries, text
from vllm.machine import Libs

H100 = GPUS["h100"]
FILES = sorted(SHIPPED.glob("*.json"))
# Numbers of rows of which tiles of 128 and of 256 leave different rests.
SIZES = ((1152, 2048), (2176, 512), (2688, 4096), (4224, 1024), (6272, 4096), (24704, 4096))
EXPERTS = ((128, 768, 2048, 8), (256, 512, 2048, 8), (128, 256, 4096, 4), (64, 1536, 1024, 2))
NUMBERS = dict(zip(TERMS, (3.0, 0.3, 2.0, 1.0, 0.4, 1.5)))


def made_table(sizes, tile=(128, 128), numbers=NUMBERS, backend="cutlass") -> Table:
    """What a kernel would take that is as the model says."""
    rows = {}
    for one in sizes:
        problem = linear(n=one[0], k=one[1]) if len(one) == 2 else moe_of(one)
        _, of_terms = kind_of(problem.size_key)
        us = tuple(
            (m, sum(n * v for n, v in zip(numbers.values(), terms(of_terms, m, tile, 132))))
            for m in TOKENS
        )
        rows[problem.size_key] = {backend: Entry("1", "2026-11-23", us)}
    return Table(H100, "made", rows)


def fit(table: Table) -> dict[str, KindCost]:
    return {kind: one.cost() for kind, one in kinds_of(table).items()}


def moe_of(sizes):
    return moe(**dict(zip(("num_experts", "intermediate", "hidden", "top_k"), sizes)))


# What is lost at most: over all layers and numbers of tokens, in one layer, and by the layers of
# one kind. Where four sizes are known of a kind, an error is one of three, two of them outermost.
_MEAN, _LAYER, _MEAN_OF_KIND = 0.03, 0.12, 0.035
_WITHOUT = {"all": (), "no deep_gemm": ("deep_gemm",)}
_BLOCKS = "linear fp8-block[128x128] bf16 dynamic-group128,none"


@cache
def fits_of(path: Path) -> dict[str, KindFit]:
    return kinds_of(read_table(path))


def found_of(path: Path, without: str, kinds: Collection[str]) -> list[Summary]:
    table = read_table(path)
    every = libs_of("all", table.chip.device).libs
    libs = Libs.of([lib for lib in every if lib.name not in _WITHOUT[without]])
    fits = {kind: fits_of(path)[kind] for kind in kinds}
    return summaries(cases_of(table, fits, libs))


@pytest.mark.parametrize("sizes", [SIZES, EXPERTS])
@pytest.mark.parametrize("tile", [(128, 128), (64, 64)])
def test_the_numbers_of_a_kernel_that_is_as_the_model_says_are_found(sizes, tile):
    (cost,) = fit(made_table(sizes, tile)).values()
    (kernel,) = cost.kernels
    assert [one.max_tokens for one in kernel.ranges] == list(RANGES)
    last = kernel.ranges[-1]
    assert last.tile == tile
    assert last.numbers == pytest.approx(tuple(NUMBERS.values()), rel=1e-2)
    assert last.error < 1e-6
    # Few tokens tell tiles apart by the largest size alone, which is left out once.
    assert all(one.error < 0.1 for one in kernel.ranges)


def test_the_error_is_that_of_sizes_left_out_and_larger_beyond_the_others():
    table = made_table(SIZES)
    odd = linear(n=24704, k=4096).size_key
    slow = {odd: {"cutlass": Entry("1", "2026-11-23", tuple((m, 900.0) for m in TOKENS))}}
    (cost,) = fit(replace(table, rows={**table.rows, **slow})).values()
    for one in cost.kernels[0].ranges:
        assert 0.1 < one.error <= one.error_beyond / 2


def test_two_sizes_that_are_alike_do_not_make_an_estimate_exact():
    alike = fit(made_table(((1152, 2048), (1280, 2048))))
    for one in next(iter(alike.values())).kernels[0].ranges:
        assert (one.error, one.error_beyond) == (0.1, 0.2)


def test_numbers_are_not_negative_and_a_kernel_never_takes_no_time():
    for path in FILES:
        for kind in read_fitted(path_of_fitted(path)).kinds.values():
            for kernel in kind.kernels:
                assert all(min(one.numbers) >= 0 < max(one.numbers) for one in kernel.ranges)


def test_a_kernel_of_too_few_sizes_is_not_fitted_nor_a_row_of_other_code():
    assert MIN_SIZES == 2 and not fit(made_table(SIZES[:1]))
    table = made_table(SIZES)
    key = linear(n=1152, k=2048).size_key
    other = Entry("GEMM alone", "2026-11-24", ((1, 9.0), (64, 9.0)))
    mixed = table.with_entry(key, "cutlass", other)
    without = {k: row for k, row in table.rows.items() if k != key}
    assert fit(mixed) == fit(replace(table, rows=without))


def test_sizes_that_kernels_pad_are_not_fitted():
    table = made_table(EXPERTS)
    partial = moe(intermediate=64, cut=8).size_key, moe(intermediate=96, cut=8).size_key
    row = next(iter(table.rows.values()))
    assert fit(replace(table, rows={**table.rows, **dict.fromkeys(partial, row)})) == fit(table)


def test_a_kernel_for_few_tokens_has_the_ranges_it_takes():
    table = made_table(SIZES, backend="skinny")
    few = {
        key: {"skinny": replace(row["skinny"], us=row["skinny"].us[:5])}
        for key, row in table.rows.items()
    }
    (cost,) = fit(replace(table, rows=few)).values()
    assert [one.max_tokens for one in cost.kernels[0].ranges] == [16]
    assert cost.kernels[0].max_tokens == 16 and cost.tokens == TOKENS[:5]


def test_deep_gemm_takes_several_times_as_long_where_one_wave_of_large_tiles_serves():
    """As its choice of tiles says, and nowhere else; beside CUTLASS's GEMM of the same inputs."""
    for path in FILES:
        table = read_table(path)
        (kind,) = [c for k, c in fits_of(path).items() if k.startswith("linear fp8-block")]
        slow = next(k.cost(frozenset()).slow_wave for k in kind.kernels if k.backend == "deep_gemm")
        seen = {True: [], False: []}
        for size_key, row in table.rows.items():
            _, (n, *_) = kind_of(size_key)
            if not {"deep_gemm", "cutlass"} <= row.keys() or size_key.count("x") > 2:
                continue
            others = dict(row["cutlass"].quantised_us)
            for m, us in row["deep_gemm"].quantised_us:
                if m in others and m > 64:
                    seen[slow.takes(m, n, 132)].append(us / others[m])
        assert len(seen[True]) >= 10 and min(seen[True]) > 1.4, path
        assert max(seen[False]) < 1.4, path


def test_tiles_are_those_that_kernels_have():
    assert len(set(TILES)) == len(TILES) and all(m * n <= 256 * 128 for m, n in TILES)


# ---------------------------------------------------------------- how well it chooses


def check_goals(found: list[Summary]) -> None:
    for one in found:
        mean, layer, _ = one.choice
        limit = _MEAN if one.kind == EVERY_KIND else _MEAN_OF_KIND
        assert mean <= limit and layer <= _LAYER, text(found)
        # Estimates gain on the default order, or change nothing.
        assert mean <= one.default[0] + 0.001, text(found)


@pytest.mark.parametrize("without", _WITHOUT)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_choice_for_sizes_left_out_loses_little(path, without):
    """Of the kinds that are quick to fit; the other is in the slow test below."""
    check_goals(found_of(path, without, fits_of(path).keys() - {_BLOCKS}))


@pytest.mark.slow
@pytest.mark.parametrize("without", _WITHOUT)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_choice_for_sizes_left_out_loses_3_percent_and_12_in_the_worst_layer(path, without):
    found = found_of(path, without, fits_of(path))
    check_goals(found)
    assert {one.kind.split()[0] for one in found} == {EVERY_KIND, "linear", "moe"}
    blocks = next(one for one in found if one.kind == _BLOCKS)
    # Else estimates would gain nothing here.
    assert blocks.default[0] > 0.05 and blocks.num_cases >= 40


def test_every_row_of_a_table_is_a_problem_with_its_key():
    for path in FILES:
        for size_key in read_table(path).rows:
            if "padded to" in size_key:  # its problem has more sizes than the key tells
                continue
            for problem in problems_of(size_key):
                assert problem.size_key == size_key
                assert kind_of_problem(problem) == kind_of(size_key)[0]
    key = moe(activation="gelu").size_key
    assert problems_of(key)[0].size_key == key
    assert kind_of_problem(moe(activation="gelu")) == kind_of(key)[0] != kind_of_problem(moe())


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_of_fitted_numbers_is_what_its_table_gives(path):
    """So a number or a time that was changed by hand is noticed."""
    fitted = fitted_of(path, read_table(path), fits_of(path))
    assert path_of_fitted(path).read_text() == text_of_fitted(fitted)


def test_there_is_a_file_of_fitted_numbers_for_every_table_and_no_other():
    assert [path.name for path in sorted(FITTED.glob("*"))] == [path.name for path in FILES]


def test_a_file_comes_back_as_it_was_written():
    for path in sorted(FITTED.glob("*")):
        assert text_of_fitted(read_fitted(path)) == path.read_text()


@pytest.fixture
def own_table(tmp_path):
    path = tmp_path / "kernel_tables" / H100.file_name
    write_table(path, made_table(SIZES))
    return path


def run(*words: object) -> int:
    return main(["kernels", "fit", *map(str, words)])


def test_the_command_fits_a_table_and_checks_it(own_table, capsys):
    assert run(own_table) == 0
    assert "6 sizes" in capsys.readouterr().out
    assert run("--check", own_table) == 0
    target = path_of_fitted(own_table)
    assert target.parent.name == "fitted" and target.parent.parent == own_table.parent.parent


@pytest.mark.parametrize("is_time", [True, False])
def test_a_number_changed_by_hand_fails_the_check(own_table, capsys, is_time):
    run(own_table)
    changed = own_table if is_time else path_of_fitted(own_table)
    number = r'"512": ([\d.]+)' if is_time else r'"waves": ([\d.]+)'
    before = changed.read_text()
    found = re.search(number, before)
    value = f"{float(found[1]) * 1.01:.4g}"
    changed.write_text(before[: found.start(1)] + value + before[found.end(1) :])
    assert json.loads(changed.read_text()) != json.loads(before)
    assert run("--check", own_table) == 1
    assert "run vllm kernels fit" in capsys.readouterr().out
    assert run(own_table) == 0 and run("--check", own_table) == 0


def test_the_command_without_a_table_says_where_it_looked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert run() != 0
    assert str(tmp_path) in capsys.readouterr().err
