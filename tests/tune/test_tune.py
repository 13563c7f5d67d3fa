"""Measuring: what is planned, what is done already, and what becomes of kernels that fail."""

import io
import logging
import multiprocessing
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from selection_cases import LIBS, ask, linear, moe
from slow import quick

from vllm.formats.act_scheme import ActScheme
from vllm.kernels import registry
from vllm.kernels.evidence.quarantine import (
    Failure,
    add_failure,
    path_of_file,
    read_failures,
    with_quarantine,
    write_failures,
)
from vllm.kernels.evidence.tables import TOKENS, Chip, Table, read_table
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.select.decision import Candidate
from vllm.kernels.tuning import trials, tune
from vllm.kernels.tuning.jobs import Job
from vllm.kernels.tuning.plan import plan, without_done
from vllm.kernels.tuning.progress import Progress
from vllm.kernels.tuning.tune import Limits, Run
from vllm.kernels.tuning.workers import MACHINE, JobError, StoppedError, Worker
from vllm.machine import Device, Lib, Libs
from vllm.platforms.installed import installed_device
from vllm.platforms.probe import installed_kernel_libs
from vllm.worker.cuda_graph import bucket_sizes

H100, CPU = Device.parse("sm_90"), Device.parse("cpu")
BROKEN = "broken_trials:serve"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(__file__), "..", "stand_ins"))


def job(backend: str = "works", **changes) -> Job:
    candidate = Candidate(backend, ActScheme.NONE)
    return replace(Job(linear(), candidate, (1, 8), (1, 2), "lib 1"), **changes)


# ---------------------------------------------------------------- what is planned


def test_every_kernel_that_can_run_here_is_planned_for_the_tokens_it_takes():
    libs = Libs.of([*LIBS["all"].libs])
    planned = plan([linear()], H100, libs).jobs
    tokens = {j.candidate.backend: j.tokens for j in planned}
    assert list(tokens) == ["deep_gemm", "cutlass", "skinny", "flashinfer-deepgemm", "triton",
                            "scaled_mm-blockwise", "marlin", "humming", "torch"]  # fmt: skip
    assert tokens["skinny"] == tuple(m for m in TOKENS if m <= 16)
    assert all(own == TOKENS for name, own in tokens.items() if name != "skinny")


def test_the_gate_has_the_sizes_around_tiles_and_the_largest():
    gates = {j.candidate.backend: j.gate for j in plan([linear()], H100, LIBS["all"]).jobs}
    assert gates["deep_gemm"] == (1, 2, 31, 32, 33, 128, max(TOKENS))
    assert gates["skinny"] == (1, 2, 16)


def test_token_counts_up_to_512_are_sizes_of_captured_graphs():
    assert {m for m in TOKENS if m <= 512} <= set(bucket_sizes(512))


def test_one_problem_is_measured_once_and_what_offers_no_choice_is_told():
    merged = linear(parts=(2048, 2048), bias=True)
    partial = linear(parts=(4000, 96))  # padding makes it another size
    planned = plan([linear(), merged, linear("bf16", n=8192, k=8192), partial], H100, LIBS["all"])
    assert {str(j.problem) for j in planned.jobs} == {str(linear()), str(partial)}
    assert any("torch alone" in note for note in planned.notes)


def test_what_is_broken_or_quarantined_is_not_planned():
    names = {j.candidate.backend for j in plan([linear()], H100, LIBS["broken"]).jobs}
    assert "deep_gemm" not in names
    add_failure(failure(backend="cutlass", version="native 0.1.0"))
    libs = with_quarantine(LIBS["all"], H100)
    assert "cutlass" not in {j.candidate.backend for j in plan([linear()], H100, libs).jobs}


def _enter_some(first: int) -> None:
    for i in range(6):
        add_failure(failure(backend=f"kernel{first + i}"))


@pytest.mark.slow
def test_processes_that_enter_failures_at_once_lose_none():
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_enter_some, args=(first,)) for first in (0, 10, 20, 30)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(read_failures()) == 24


def test_a_failure_of_another_release_is_tried_again():
    add_failure(failure(backend="cutlass", version="native 0.1.0"))
    assert with_quarantine(LIBS["all"], H100).quarantined
    write_failures([replace(found, release="0.0.9") for found in read_failures()])
    assert not with_quarantine(LIBS["all"], H100).quarantined


def test_what_the_table_holds_is_done_until_the_library_changes():
    jobs = plan([linear()], H100, LIBS["all"]).jobs
    own = Table(Chip(H100, 132), "")
    for done in jobs:
        own = own.with_entry(done.problem.size_key, done.candidate.backend,
                             tune.Entry(done.version, "2026-11-22",
                                        tuple((m, 1.0) for m in done.tokens)))  # fmt: skip
    assert not without_done(jobs, own)
    newer = Libs.of([*(lib for lib in LIBS["all"].libs if lib.name != "deep_gemm"),
                     Lib("deep_gemm", "9.9")])  # fmt: skip
    left = without_done(plan([linear()], H100, newer).jobs, own)
    assert [j.candidate.backend for j in left] == ["deep_gemm"]


def test_a_later_run_measures_the_token_counts_that_are_missing_and_keeps_the_others(tmp_path):
    wanted = replace(job("torch"), problem=linear("fp8-block", n=128, k=128, dtype="fp32"),
                     tokens=(1, 2, 40), gate=(1, 2, 31))  # fmt: skip
    first, _, _ = carry_out([replace(wanted, tokens=(2,))], tmp_path, tune.TRIALS)
    (left,) = without_done([wanted], first.table)
    assert left.tokens == (1, 40)
    old = first.table.rows[wanted.problem.size_key]["torch"]
    run = Run(CPU, first.table, tmp_path / "t.json", Limits(hang=60), Progress(io.StringIO()))
    assert not run.carry_out([left])
    entry = run.table.rows[wanted.problem.size_key]["torch"]
    assert [m for m, _ in entry.us] == [1, 2, 40] and dict(entry.us)[2] == dict(old.us)[2]
    assert not without_done([wanted], run.table)


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("backend", "why", "text"),
    [
        ("faults", "library", "its process was killed by SIGSEGV, after M = 1"),
        ("exits", "library", "its process ended with exit code 3, after M = 1"),
        ("hangs", "library", "hung for 2 s, after M = 1"),
        ("is wrong", "numerics", "relative error 1.00e-01"),
        ("is killed", "machine", "its process was killed by SIGKILL, after M = 1"),
        ("is full", "machine", "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_a_kernel_that_fails_in_any_way_is_an_error_and_the_next_runs(backend, why, text):
    worker = Worker(BROKEN, "cpu", timeout=2)
    try:
        with pytest.raises(JobError) as error:
            worker.run(job(backend))
        assert (error.value.why, str(error.value)) == (why, text)
        assert worker.run(job()) == [(1, 1e-3)]
    finally:
        worker.stop()


def test_a_process_that_never_begins_says_nothing_against_its_kernel():
    worker = Worker("broken_trials:serve_nothing", "cpu", timeout=60)
    try:
        with pytest.raises(JobError, match="exit code 1") as error:
            worker.run(job())
    finally:
        worker.stop()
    assert error.value.why == MACHINE


@pytest.mark.skipif(torch.cuda.is_available(), reason="this device can be used")
def test_a_device_that_cannot_be_used_says_nothing_against_kernels():
    worker = Worker(tune.TRIALS, "cuda", timeout=60)  # with a torch that knows no GPU
    try:
        with pytest.raises(JobError) as error:
            worker.run(job("torch"))
    finally:
        worker.stop()
    assert error.value.why == MACHINE


def test_memory_that_a_kernel_does_not_get_is_the_machines():
    def want_memory(size: int) -> None:
        raise RuntimeError(f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED for {size}")

    assert kinds_of_failure(want_memory) == [MACHINE]
    assert kinds_of_failure(lambda size: 1 / 0) == ["library"]


def kinds_of_failure(act) -> list[str]:
    """What `trials.serve` tells when measuring ends with the error of `act`."""
    wanted = [replace(job("torch"), problem=linear("bf16", n=32, k=32, dtype="fp32"))]
    told = []

    class Channel:
        def recv(self):
            if not wanted:
                raise EOFError
            return wanted.pop()

        def send(self, message):
            kind, first, _ = message
            if kind == "at":
                act(first)
            elif kind == "failed":
                told.append(first)

    trials.serve(Channel(), "cpu")
    return told


def test_a_worker_that_is_stopped_says_nothing_against_its_kernel():
    worker = Worker(BROKEN, "cpu", timeout=60)
    threading.Timer(1, worker.stop).start()
    with pytest.raises(StoppedError):
        worker.run(job("hangs"))
    with pytest.raises(StoppedError):
        worker.run(job())


def test_a_stopped_worker_takes_what_its_kernel_started_along():
    worker = Worker(BROKEN, "cpu", timeout=2)
    with pytest.raises(JobError):
        worker.run(job("hangs"))
    end = time.monotonic() + 20  # a killed process needs its turn to go
    while mine := [pid for pid in os.listdir("/proc") if pid.isdigit() and _starts_sleep(pid)]:
        assert time.monotonic() < end, mine
        time.sleep(0.1)


def _starts_sleep(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"time.sleep(1000)" in file.read()
    except OSError:
        return False


# ---------------------------------------------------------------- runs


def carry_out(wanted, tmp_path, trials=BROKEN, **limits):
    out = io.StringIO()
    table, path = Table(Chip(CPU, 2), "CPU"), tmp_path / "t.json"
    run = Run(CPU, table, path, Limits(hang=5, **limits), Progress(out), trials)
    return run, run.carry_out(wanted), out.getvalue().splitlines()


def test_a_failing_kernel_is_quarantined_with_its_reason_and_the_others_are_timed(tmp_path):
    _, left, lines = carry_out([job("faults"), job(), job("is wrong")], tmp_path, jobs=2)
    assert not left and list(read_table(tmp_path / "t.json").rows[linear().size_key]) == ["works"]
    assert {(f.backend, f.why) for f in read_failures()} == {
        ("faults", "library"), ("is wrong", "numerics"),
    }  # fmt: skip
    assert any("REJECTED" in line and "SIGSEGV" in line for line in lines)


def test_what_the_machine_has_no_room_for_is_tried_alone_and_then_left_out(tmp_path):
    jobs = [job("is full beside others"), job("is full"), job()]
    run, left, lines = carry_out(jobs, tmp_path, jobs=3)
    assert left == [job("is full")] and not run.failures and not read_failures()
    assert run.table.rows[linear().size_key].keys() == {"is full beside others", "works"}
    assert any("LEFT OUT" in line and "out of memory" in line for line in lines)


def test_as_many_kernels_are_checked_at_once_as_fit_the_machine_and_its_gpu():
    gib = 1 << 30
    assert tune.num_checkers(64, 512 * gib, None) == 1
    assert tune.num_checkers(16, 512 * gib, 80 * gib) == 8
    assert tune.num_checkers(64, 512 * gib, 80 * gib) == 32
    assert tune.num_checkers(64, 16 * gib, 80 * gib) == 4
    assert tune.num_checkers(64, 512 * gib, 4 * gib) == 1


def test_checks_wait_for_memory_of_the_gpu():
    room, begun, may_end = tune.Room(10), [], threading.Event()

    def take(size: int) -> None:
        with room.taken(size):
            begun.append(size)
            may_end.wait(20)

    first = [threading.Thread(target=take, args=(size,)) for size in (6, 4)]
    for thread in first:
        thread.start()
    waiting = threading.Thread(target=take, args=(100,))  # more than there is: alone
    while len(begun) < 2:
        time.sleep(0.01)
    waiting.start()
    waiting.join(0.2)
    assert sorted(begun) == [4, 6] and waiting.is_alive()
    may_end.set()
    waiting.join(20)
    assert begun[2] == 100


def test_a_check_of_experts_needs_what_its_rank_holds():
    whole, of_eight = (
        tune.bytes_of_check(job(problem=moe(cut_experts=ranks), tokens=(8192,))) for ranks in (1, 8)
    )
    assert 3 * 256 * 3 * 512 * 2048 < whole < 20 << 30
    assert whole / 9 < of_eight < whole / 4


def test_what_no_time_is_left_for_is_returned(tmp_path):
    jobs = [job(), job("exits")]
    run, left, _ = carry_out(jobs, tmp_path, total=1e-9)
    assert left == jobs and not run.failures and not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("total", [None, 600.0])
def test_what_compiles_begins_first_unless_time_is_limited(total, tmp_path):
    slow, quick = job("exits", compiles=True), job("is wrong")
    run, _, _ = carry_out([quick, slow], tmp_path, jobs=1, total=total)
    first = "exits" if total is None else "is wrong"
    assert len(run.failures) == 2 and run.failures[0].backend == first


def test_a_kernel_is_timed_for_as_long_as_it_may_take(tmp_path):
    problem = linear("fp8-block", n=128, k=128, dtype="fp32")
    one = replace(job("torch"), problem=problem, tokens=(1, 2, 4), gate=(1, 2))
    run, left, lines = carry_out([one], tmp_path, tune.TRIALS, per_kernel=1e-9)
    assert not left and not run.failures
    assert [m for m, _ in run.table.rows[problem.size_key]["torch"].us] == [1]
    assert any("token counts were left out" in line for line in lines)


@pytest.fixture(scope="module")
def trying():
    """A worker for kernels of this machine, whose process imports torch."""
    worker = Worker(tune.TRIALS, "cpu", timeout=60)
    yield worker
    worker.stop()


@pytest.mark.parametrize("weight", quick(
    ["fp8-block", "fp8-tensor", "fp8-channel", "nvfp4", "bf16", "int4-group[128]"],
    ["fp8-block", "nvfp4"],
))  # fmt: skip
@pytest.mark.parametrize("backend", quick(["cpu", "torch"], ["cpu"]))
def test_our_cpu_kernels_pass_the_gate(weight, backend, trying):
    problem = linear(weight, n=160, k=256, dtype="fp32")
    one = replace(job(backend), problem=problem, tokens=(1, 40), gate=(1, 2, 31, 32, 33, 40))
    errors = trying.run(one)
    assert [m for m, _ in errors] == list(one.gate)
    assert all(0 <= error < 2e-4 for _, error in errors)


def test_a_kernel_that_rounds_to_nvfp4_passes_the_gate_and_one_that_does_not_fails(trying):
    one = replace(job("cutlass"), problem=linear("nvfp4", n=160, k=256, dtype="bf16"))
    native = replace(one, candidate=Candidate("cutlass", ActScheme.NVFP4_GROUP16))
    assert all(error < 6e-3 for _, error in trying.run(native))
    widened = replace(one, candidate=Candidate("torch", ActScheme.NVFP4_GROUP16))
    with pytest.raises(JobError, match="relative error"):
        trying.run(widened)


def test_a_kernel_that_does_not_round_where_the_reference_does_fails_the_gate(trying):
    exact = replace(job("torch"), problem=linear(n=256, k=256, dtype="bf16"))
    assert trying.run(exact)
    claims = Candidate("torch", ActScheme.DYNAMIC_GROUP128, scales="float32")
    with pytest.raises(JobError, match="relative error") as error:
        trying.run(replace(exact, candidate=claims))
    assert error.value.why == "numerics"


# ---------------------------------------------------------------- quarantine


def failure(
    backend="deep_gemm", version="deep_gemm 2.6", device="cuda:sm_90", **changes
) -> Failure:
    return replace(
        Failure(backend, version, device, linear().size_key, "library", "hung", "2026-11-22"),
        **changes,
    )


def test_a_failure_holds_for_its_problem_chip_and_version():
    add_failure(failure())
    assert ask(linear(), "90", with_quarantine(LIBS["deep_gemm"], H100)).chosen == "cutlass"
    for libs, device in (
        (with_quarantine(LIBS["deep_gemm"], Device.parse("sm_100")), "100"),
        (with_quarantine(Libs.of([Lib("deep_gemm", "2.7")]), H100), "90"),
    ):
        assert not libs.quarantined
        assert ask(linear(), device, libs).chosen == "deep_gemm"


def test_a_failure_that_was_entered_without_schemes_holds_for_all_of_them():
    add_failure(failure(size_key=linear().size_key.rpartition(" ")[0]))
    libs = with_quarantine(LIBS["deep_gemm"], H100)
    assert ask(linear(), "90", libs).chosen == "cutlass"
    assert ask(linear(n=8192), "90", libs).chosen == "deep_gemm"


def test_the_reason_tells_when_what_and_how_to_lift_it():
    add_failure(failure())
    decision = ask(linear(), "90", with_quarantine(LIBS["deep_gemm"], H100))
    reason = next(c for c in decision.candidates if c.backend == "deep_gemm").reasons[0]
    assert "2026-11-22" in reason.text and "hung" in reason.text
    assert "vllm kernels quarantine --clear" in reason.text


def test_a_second_failure_of_the_same_replaces_the_first():
    add_failure(failure())
    add_failure(failure(reason="killed by SIGSEGV"))
    add_failure(failure(backend="cutlass"))
    assert [(f.backend, f.reason) for f in read_failures()] == [
        ("deep_gemm", "killed by SIGSEGV"), ("cutlass", "hung"),
    ]  # fmt: skip
    write_failures([])
    assert read_failures() == []


@pytest.mark.parametrize("text", ["{", '[{"backend": "x"}]', "[3]", "3"])
def test_a_broken_file_is_set_aside_with_its_name(text, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    path_of_file().parent.mkdir(parents=True)
    path_of_file().write_text(text)
    assert read_failures() == []
    assert f"{path_of_file()} is broken" in caplog.text
    assert path_of_file().with_name("quarantine.json.broken").read_text() == text
    add_failure(failure())
    assert read_failures() == [failure()]


# ---------------------------------------------------------------- quarantine


def test_failures_of_two_chips_stand_beside_each_other():
    add_failure(failure())
    add_failure(failure(device="cuda:sm_100"))
    assert [f.device for f in read_failures()] == ["cuda:sm_90", "cuda:sm_100"]


def test_a_failure_speaks_against_no_other_chip_of_its_family():
    add_failure(failure(device="cuda:sm_120"))
    libs = LIBS["deep_gemm+sm120"]
    assert with_quarantine(libs, Device.parse("sm_120")).quarantined
    assert not with_quarantine(libs, Device.parse("sm_121")).quarantined


def test_a_failure_of_an_unknown_kind_counts_as_none():
    write_failures([failure(why="fate")])
    assert read_failures() == []


def test_what_is_in_quarantine_here_is_explained_so():
    device = installed_device()
    libs = installed_kernel_libs(device)
    (spec,) = (s for s in registry.specs("linear") if s.backend == "cpu")
    version = version_of(spec, libs, device)
    add_failure(failure(backend="cpu", device=str(device), version=version))
    (found,) = installed_kernel_libs(device).quarantined
    assert not libs.quarantined and found.backend == "cpu"
