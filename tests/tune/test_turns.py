"""Kernels of one problem are timed in turns: samples, isolation of failures, order, progress."""

import io
import os
import random
import time
from dataclasses import replace

import pytest
from selection_cases import LIBS, linear, moe

from vllm.formats.act_scheme import ActScheme
from vllm.kernels.evidence.quarantine import read_failures
from vllm.kernels.evidence.tables import Chip, Table, read_table
from vllm.kernels.select.decision import Candidate
from vllm.kernels.tuning.clocks import median_and_noise, sample_in_turns
from vllm.kernels.tuning.jobs import Job, Turns
from vllm.kernels.tuning.plan import in_turns, plan, without_done
from vllm.kernels.tuning.progress import Progress
from vllm.kernels.tuning.tune import Limits, Run
from vllm.machine import Device

CPU = Device.parse("cpu")
SIZE = linear().size_key


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(__file__), "..", "stand_ins"))


def job(backend: str = "works", **changes) -> Job:
    candidate = Candidate(backend, ActScheme.NONE)
    return replace(Job(linear(), candidate, (1, 8), (1, 2), "lib 1"), **changes)


def carry_out(wanted, tmp_path, **limits):
    out = io.StringIO()
    limits = Limits(hang=3, **limits)
    table, path = Table(Chip(CPU, 2), "CPU"), tmp_path / "t.json"
    run = Run(CPU, table, path, limits, Progress(out), "broken_trials:serve")
    return run, run.carry_out(wanted), out.getvalue().splitlines()


# ---------------------------------------------------------------- samples


def test_clocks_are_sampled_in_turns_until_each_has_enough():
    order = []

    def clock(name: str, seconds: float):
        def sample() -> float:
            order.append(name)
            time.sleep(seconds)
            return seconds

        return sample

    samples: dict[str, list[float]] = {}
    rounds = list(
        sample_in_turns({"slow": clock("slow", 0.005), "fast": clock("fast", 0)}, samples)
    )
    assert order[:6] == ["slow", "fast"] * 3
    assert 9 <= len(samples["slow"]) < len(samples["fast"]) == len(rounds) == 40


def test_the_interval_of_a_median_holds_the_true_one_19_times_in_20():
    draw, held = random.Random(1), 0
    for _ in range(1000):
        samples = [draw.lognormvariate(0, 0.1) for _ in range(20)]
        median, noise = median_and_noise(samples)
        held += abs(median - 1) <= 1.3 * noise  # the interval is not symmetric
    assert held > 950
    assert median_and_noise([2.0] * 9) == (2.0, 0.0)


def test_more_samples_and_steadier_ones_have_less_noise():
    draw = random.Random(2)

    def noise(count: int, spread: float) -> float:
        found = (median_and_noise([draw.gauss(1, spread) for _ in range(count)])[1]
                 for _ in range(200))  # fmt: skip
        return sum(found) / 200

    assert noise(40, 0.1) < noise(10, 0.1) and noise(20, 0.01) < noise(20, 0.1) / 5


# ---------------------------------------------------------------- failures


def test_in_turns_is_timed_what_any_of_the_kernels_lacks():
    """As left by runs for different backends and numbers of tokens."""
    turns = Turns((job("a", tokens=(64, 4096)), job("b", tokens=(1, 16, 4096))))
    assert sorted(turns.tokens) == [1, 16, 64, 4096]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("faults", "SIGSEGV"), ("exits", "exit code 3"), ("hangs", "hung for 3 s")],
)
def test_a_kernel_that_fails_between_others_is_rejected_alone(tmp_path, how, reason):
    wanted = [job("first"), job(f"late {how}"), job("last")]
    _, left, lines = carry_out(wanted, tmp_path)
    assert not left
    (failure,) = read_failures()
    assert failure.backend == f"late {how}" and reason in failure.reason
    assert read_table(tmp_path / "t.json").rows[SIZE].keys() == {"first", "last"}
    assert any("each is timed alone" in line for line in lines)


def test_a_kernel_that_has_no_room_beside_others_is_left_out_and_they_are_not(tmp_path):
    wanted = [job("first"), job("late is full"), job("last")]
    run, left, lines = carry_out(wanted, tmp_path)
    assert left == [job("late is full")] and not read_failures()
    assert run.table.rows[SIZE].keys() == {"first", "last"}
    assert any("LEFT OUT" in line and "out of memory" in line for line in lines)


def test_a_rejected_kernel_is_not_tried_again_for_other_token_counts(tmp_path):
    wanted = [job("first", tokens=(1, 8)), job("late faults", tokens=(1, 8))]
    run, left, _ = carry_out(wanted, tmp_path, total=600.0)
    assert not left and len(run.failures) == 1
    (entry,) = run.table.rows[SIZE].values()
    assert [m for m, _ in entry.us] == [1, 8]


def test_an_entry_has_noise_error_and_skewed_times(tmp_path):
    experts = moe()
    run, _, _ = carry_out([job("first", problem=experts), job("last", problem=experts)], tmp_path)
    entry = read_table(tmp_path / "t.json").rows[experts.size_key]["last"]
    assert (entry.us, entry.skewed_us) == (((1, 2.0), (8, 2.0)), ((1, 3.0), (8, 3.0)))
    assert (entry.noise, entry.error) == (((1, 0.01), (8, 0.01)), 1e-3)
    assert not without_done([job("last", problem=experts)], run.table)


# ---------------------------------------------------------------- order


def test_without_a_limit_each_problem_is_timed_once():
    small, large = linear(n=1024), linear(n=8192)
    jobs = plan([small, large], Device.parse("sm_90"), LIBS["deep_gemm"]).jobs
    groups = in_turns(jobs, is_limited=False)
    assert [group[0].problem for group in groups] == [large, small]
    assert [one for group in groups for one in group] == list(jobs)


def test_with_a_limit_main_token_counts_of_all_problems_come_first():
    small, large = linear(n=1024), linear(n=8192)
    jobs = plan([small, large], Device.parse("sm_90"), LIBS["deep_gemm"]).jobs
    groups = in_turns(jobs, is_limited=True)
    assert [group[0].problem for group in groups] == [large, small] * 2
    assert [max(one.tokens for one in group) for group in groups[:2]] == [
        (1, 16, 64, 512, 4096)
    ] * 2
    assert 4096 not in groups[2][0].tokens and 8192 in groups[2][0].tokens
    tokens = {m for group in groups for one in group for m in one.tokens}
    assert tokens == {m for one in jobs for m in one.tokens}


def test_a_limit_that_ends_a_run_keeps_what_matters_most(tmp_path):
    problems = [linear(n=512 * i) for i in range(9, 0, -1)]
    wanted = [job(problem=problem, tokens=(1,)) for problem in problems]

    class Ends(Progress):
        """The time is over after three problems were timed."""

        def step(self, line: str) -> None:
            super().step(line)
            if line.startswith("timed") and self.done == 3:
                run.limits = replace(run.limits, total=1e-9)

    table, limits = Table(Chip(CPU, 2), "CPU"), Limits(hang=20, total=600.0)
    path = tmp_path / "t.json"
    run = Run(CPU, table, path, limits, Ends(io.StringIO()), "broken_trials:serve")
    assert run.carry_out(wanted) == wanted[3:]
    assert run.table.rows.keys() == {problem.size_key for problem in problems[:3]}


# ---------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_how_far_the_run_is_and_what_is_left():
    out = io.StringIO()
    progress = Progress(out)
    progress.begin(4)
    progress.start -= 60
    progress.step("checked  a")
    progress.say("a note")
    progress.end()
    assert out.getvalue() == "[1/4, 3:00 left]  checked  a\na note\n"


def test_no_more_is_left_than_the_limit_allows():
    progress = Progress(io.StringIO(), deadline=time.monotonic() + 62)
    progress.begin(4)
    progress.start -= 1000
    progress.step("timed  a")
    assert "[1/4, 1:02 left]" in progress.stream.getvalue()


def test_on_a_terminal_a_bar_stays_below_the_lines():
    out = Terminal()
    progress = Progress(out)
    progress.begin(2)
    progress.step("timed  a")
    assert out.getvalue().endswith(f"timed  a\n{'#' * 12}{'.' * 12} 1/2, 0:00 left")
    progress.end()
    assert out.getvalue().endswith("\r\x1b[K")
