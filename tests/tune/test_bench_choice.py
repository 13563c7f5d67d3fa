"""benchmarks/kernels/bench_choice.py, on the CPU and on times that are made up."""

import json
import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from selection_cases import ask, linear, moe

from vllm.kernels.evidence.tables import Entry, Table, write_table
from vllm.kernels.report.question import GPUS, libs_of
from vllm.kernels.tuning.clocks import median_and_noise

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "kernels"
sys.path.insert(0, str(SCRIPTS))

import bench_choice  # noqa: E402
import choice_simulated  # noqa: E402
from bench_choice import agreement, compared, noisy_choices, summary_of  # noqa: E402
from choice_models import Rank, text_of_wholes, wholes  # noqa: E402
from choice_samples import Series, table_of  # noqa: E402

H100 = GPUS["h100"]
TOKENS = (1, 16, 64, 512, 4096)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


def series_of(problem, spread=0.002, seed=1, **us: float) -> list[Series]:
    """Twenty replays by backend, which take as long for any number of tokens."""
    draw = random.Random(seed)
    return [
        Series(problem.size_key, name, "us", m, tuple(time * draw.gauss(1, spread)
                                                      for _ in range(20)))
        for name, time in us.items()
        for m in TOKENS
    ]  # fmt: skip


def table(problem, noise=0.001, **us: float) -> Table:
    noises = tuple((m, noise) for m in TOKENS)
    row = {
        name: Entry("", "", tuple((m, time) for m in TOKENS), noise=noises)
        for name, time in us.items()
    }
    return Table(H100, "made", {problem.size_key: row}, source="made.json")


# ---------------------------------------------------------------- on this machine


@pytest.mark.slow
def test_on_this_machine_choices_are_compared_with_fresh_times(tmp_path):
    words = ["choice", "--layer", "fp8-block:128x128", "--tokens", "1,2",
             "--seconds-per-kernel", "2", "--seconds", "60", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_choice.py", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "choice.json").read_text())
    assert [(row["tokens"], row["chosen"]) for row in content["rows"]] == [(1, "cpu"), (2, "cpu")]
    assert {one["backend"] for one in content["noisy"]} == {"cpu", "torch"}
    assert content["summary"]["rows"] == 2 and all(row["us"] > 0 for row in content["rows"])
    assert "choices with the replays of one kernel times 0.9 to 1.1" in done.stdout


# ---------------------------------------------------------------- fresh times


def test_regret_is_that_of_the_chosen_kernel_by_the_fresh_times():
    problem = linear()
    decision = ask(
        problem, "90", timings=table(problem, deep_gemm=5.0, cutlass=10.0).timings(problem)
    )
    assert decision.chosen == "deep_gemm"
    fresh = table_of(series_of(problem, deep_gemm=11.0, cutlass=10.0), H100, "fresh")
    rows = list(compared({problem: (3, decision)}, fresh, TOKENS))
    assert [row.tokens for row in rows] == list(TOKENS)
    for row in rows:
        assert (row.chosen, row.fastest, row.count) == ("deep_gemm", "cutlass", 3)
        assert row.regret == pytest.approx(0.1, abs=0.01) and 0 < row.noise < 0.01
    summary = summary_of(rows)
    assert summary["geometric mean of regret"] == pytest.approx(0.1, abs=0.01)
    assert summary["rows within 3 % or noise"] == 0


def test_sums_of_a_whole_model_count_layers():
    many, few, untimed = linear(n=1024), linear(n=2048), linear(n=3072)
    times = {(many, 64): (11.0, 10.0), (few, 64): (20.0, 20.0)}
    rank = Rank("M", 4, 1, Counter({many: 9, few: 1, untimed: 2}))
    (whole,) = wholes([rank], times, (1, 64))
    assert (whole.tokens, whole.timed, whole.layers) == (64, 10, 12)
    assert whole.ratio == pytest.approx((9 * 11 + 20) / (9 * 10 + 20))
    assert "10 of 12   1.082" in text_of_wholes([whole])


def test_the_committed_choices_hold_by_times_that_an_h100_measured_again(tmp_path):
    """By the same command on a GPU, and without one by the times that it wrote."""
    words = ["Qwen3.5-35B-A3B-FP8", "Qwen3-8B-FP8", "--tp", "4", "--fresh",
             SCRIPTS.parent / "results" / "h100" / "choice_a.json", "--out", tmp_path]  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_choice.py", "choice", *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "choice.json").read_text())
    own = [one for one in content["whole_models"] if one["model"] == "Qwen3.5-35B-A3B-FP8"]
    assert [one["tokens"] for one in own] == list(TOKENS)
    assert all(1.0 <= one["ratio"] <= 1.03 and one["timed"] > 100 for one in own)


def test_a_table_of_samples_is_that_of_the_tuner():
    (one, *_) = series = series_of(moe(), spread=0.05, triton=10.0)
    skewed = [
        s._replace(field="skewed_us", samples=tuple(2 * us for us in s.samples)) for s in series
    ]
    entry = table_of([*series, *skewed], H100, "x").rows[moe().size_key]["triton"]
    median, noise = median_and_noise(one.samples)
    assert entry.us[0] == (1, median) and entry.skewed_us[0] == (1, pytest.approx(2 * median))
    assert entry.noise[0] == (1, pytest.approx(noise)) and len(entry.us) == len(TOKENS)


# ---------------------------------------------------------------- a noisy kernel


def noisy(**us: float):
    problem = linear()
    layers = {problem: (1, ask(problem, "90"))}
    libs = libs_of("all", H100.device)
    return {one.backend: one for one in noisy_choices(layers, series_of(problem, **us), H100, libs)}


def test_a_noisy_kernel_changes_no_choice_that_is_clear():
    found = noisy(deep_gemm=10.0, cutlass=14.0)
    num = len(TOKENS) * len(bench_choice.SEEDS)
    assert {(one.choices, one.changed) for one in found.values()} == {(num, 0)}


def test_a_choice_that_noise_can_change_is_counted():
    """Where DeepGEMM saves 3 % it is worth a compilation, where less not."""
    found = noisy(deep_gemm=10.0, cutlass=10.31)
    assert found["cutlass"].changed > 0 and found["cutlass"].worst == pytest.approx(0.03, abs=0.01)


# ---------------------------------------------------------------- two tables


def test_equal_tables_agree():
    one = table(linear(), deep_gemm=10.0, cutlass=14.0)
    found, left_out = agreement(one, one)
    assert found["choices"] == 2 * len(TOKENS) == found["same kernel"] and not left_out
    assert found["share of the same kernel"] == 1.0 and found["different"] == []


@pytest.mark.parametrize(("noise", "is_close"), [(0.001, False), (0.06, True)])
def test_different_kernels_agree_where_noise_is_larger_than_their_difference(noise, is_close):
    a, b = (table(linear(), deep_gemm=us, cutlass=10.0, noise=noise) for us in (9.3, 10.2))
    found, _ = agreement(a, b)
    assert (found["choices"], found["same kernel"]) == (10, 0)
    assert found["share with those"] == float(is_close)
    assert len(found["different"]) == (0 if is_close else 10)
    assert found["worst gain of one choice over the other"] == pytest.approx(0.0753, abs=1e-3)


def test_partial_blocks_are_those_of_built_in_models_and_others_are_told():
    known = moe(intermediate=64, cut=8)
    unknown = moe(num_experts=3, intermediate=64, cut=8)
    tables = [table(problem, triton=1.0, cutlass=2.0) for problem in (known, unknown)]
    both = Table(H100, "made", {**tables[0].rows, **tables[1].rows})
    found, left_out = agreement(both, both)
    assert left_out == [unknown.size_key] and found["choices"] == len(TOKENS)


def test_agreement_reads_two_files_and_writes_the_result(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, us in zip(paths, (14.0, 15.0)):
        write_table(path, table(linear(), deep_gemm=10.0, cutlass=us))
    words = ["bench_choice.py", "agreement", *map(str, paths), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert bench_choice.main() == 0
    assert "share of the same kernel: 1.0" in capsys.readouterr().out
    content = json.loads((tmp_path / "agreement.json").read_text())
    assert content["tables"] == list(map(str, paths)) and content["goal"] == 0.98


# ---------------------------------------------------------------- simulated tunings


def test_two_tunings_over_a_committed_table_differ_less_than_alone():
    """DeepGEMM saves 3 %, the limit of what compiling is worth, and runs differ by up to 2 %."""
    whole = table(linear(), deep_gemm=10.0, cutlass=10.31)
    differences = [-0.02, -0.01, 0.0, 0.01, 0.02]
    alone, over = (
        choice_simulated.two_tunings(whole, differences, random.Random(1), 10, is_over)
        for is_over in (False, True)
    )
    assert alone.total == over.total == 2 * 10 * len(TOKENS)
    assert alone.same < 0.9 * alone.total and over.same > alone.same
    assert all(0 <= one < 0.04 for share in (alone, over) for one in share.logs)


def test_differences_of_one_run_are_those_of_two_without_what_is_common():
    pairs = choice_simulated.pairs_of(
        table(linear(), a=10.0, b=20.0, c=30.0), table(linear(), a=11.0, b=22.0, c=34.0)
    )
    differences = choice_simulated.differences_of([one for one, _ in pairs])
    assert len(pairs) == 3 * len(TOKENS) and {noise for _, noise in pairs} == {0.002}
    assert sum(abs(one) > 1e-9 for one in differences) == len(TOKENS)
    assert min(differences) == pytest.approx(math.log(33 / 34) / math.sqrt(2))
