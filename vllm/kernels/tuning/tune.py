"""`vllm kernels tune`: carries out a plan and writes the table.

Every kernel that can run a problem here is first compared with a reference (the gate), in parallel
because first calls may compile. Then those of one problem are timed in turns, with nothing beside
them. The table is rewritten after each problem.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from vllm.kernels.evidence.quarantine import Failure, add_failure
from vllm.kernels.evidence.steps import Step
from vllm.kernels.evidence.tables import (
    Entry,
    Table,
    column_text,
    in_order,
    times_of,
    write_table,
)
from vllm.kernels.select.problem import AttentionProblem, LinearProblem
from vllm.kernels.step_bytes import weight_bytes
from vllm.kernels.tuning.jobs import Job, Measured, Turns
from vllm.kernels.tuning.plan import in_turns
from vllm.kernels.tuning.progress import Progress
from vllm.kernels.tuning.workers import MACHINE, JobError, Reports, StoppedError, Worker
from vllm.machine import Device

_CHECKS_SHARE = 0.5
_GPU_SHARE, _BYTES_OF_CONTEXT, _BYTES_OF_PROCESS = 0.8, 1 << 30, 4 << 30
TRIALS = "vllm.kernels.tuning.trials:serve"


@dataclass(frozen=True)
class Limits:
    """Seconds: for timing one kernel for one problem, for everything (half of it for checks), and
    without a sign of life. jobs: processes that check at once. gpu_bytes: memory that they share,
    None for any."""

    per_kernel: float = 10.0
    total: float | None = None
    hang: float = 300.0
    jobs: int = 1
    gpu_bytes: int | None = None


def num_checkers(num_cores: int, memory: int, gpu_memory: int | None) -> int:
    """Memory in bytes, of the machine and the GPU; None for CPU kernels, which use all cores."""
    if gpu_memory is None:
        return 1
    fits = int(_GPU_SHARE * gpu_memory) // (2 * _BYTES_OF_CONTEXT)
    return max(1, min(num_cores // 2, memory // _BYTES_OF_PROCESS, fits))


def bytes_of_check(job: Job) -> int:
    """On a GPU, without the CUDA context: inputs, outputs and what is between them, the weight as
    it is stored and as the kernel lays it out, and as floats what the reference multiplies with. Of
    attention the keys and values of the largest step."""
    problem = job.problem
    if isinstance(problem, AttentionProblem):
        return max(Step.parse(str(name)).bytes_of_cache(problem) for name in job.tokens)
    m, stored = job.max_tokens, weight_bytes(problem)
    if isinstance(problem, LinearProblem):
        n, k = problem.n, problem.k
        return 16 * m * (n + k) + 12 * n * k + 3 * stored
    hidden, inner = problem.hidden, problem.intermediate
    rows = m * problem.top_k // problem.cut_experts + m
    return 16 * rows * (hidden + 3 * inner) + 40 * hidden * inner + 3 * stored


class Room:
    """Bytes of memory that several share."""

    def __init__(self, total: int):
        self._total = self._left = total
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Waits until there are so many; until all are left for more than there are."""
        size = min(size, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= size)
            self._left -= size
        try:
            yield
        finally:
            with self._changed:
                self._left += size
                self._changed.notify_all()


@dataclass
class Run:
    """Carries out jobs. rejected: keys of those whose kernel failed (`str` of a job). errors: the
    largest against the reference, of those that passed."""

    device: Device
    table: Table
    path: Path
    limits: Limits
    progress: Progress
    trials: str = TRIALS
    failures: list[Failure] = field(default_factory=list)
    rejected: set[str] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def carry_out(self, jobs: Sequence[Job]) -> list[Job]:
        """Checks and times `jobs`, in order of importance; returns those for which no time or no
        memory was left.

        An interrupt at the keyboard stops the processes; what was measured is in the file.
        """
        try:
            passed = self._check(jobs)
            for worker in self.workers[1:]:
                worker.stop()
            left = {str(job) for job in jobs} - {str(job) for job in passed}
            groups = in_turns(passed, is_limited=self.limits.total is not None)
            self.progress.begin(len(groups))
            for group in groups:
                due = [job for job in group if str(job) not in self.rejected]
                if self._is_late():
                    left |= set(map(str, due))
                elif due:
                    left |= self._time(due)
            return [job for job in jobs if str(job) in left - self.rejected]
        finally:
            for worker in self.workers:
                worker.stop()
            self.progress.end()

    def _seconds_left(self, share: float = 1.0) -> float:
        """Of this share of the time for everything."""
        total = self.limits.total
        return float("inf") if total is None else self.start + total * share - time.monotonic()

    def _is_late(self, share: float = 1.0) -> bool:
        return self._seconds_left(share) < 0

    # ------------------------------------------------------------ checks

    def _check(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs that passed the gate, in order.

        A job that ran out of memory beside others is checked again alone.
        """
        count = max(1, min(self.limits.jobs, len(jobs)))
        process = self.trials, self.device.kind, self.limits.hang
        self.workers += [Worker(*process) for _ in range(count)]
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            idle.put(worker)
        gpu_bytes = self.limits.gpu_bytes or 0
        room = Room(max(1, int(_GPU_SHARE * gpu_bytes) - count * _BYTES_OF_CONTEXT))
        failures: dict[Job, JobError | None] = {}  # of jobs that were checked

        def check(job: Job) -> None:
            if self._is_late(_CHECKS_SHARE):
                return
            with room.taken(bytes_of_check(job) if gpu_bytes else 0):
                worker = idle.get()
                try:
                    with suppress(StoppedError):
                        failures[job] = self._failure_of(worker, job)
                finally:
                    idle.put(worker)

        # Slow compilations start first, as they end last; with a time limit what matters most.
        is_limited = self.limits.total is not None
        ordered = list(jobs) if is_limited else sorted(jobs, key=lambda job: not job.compiles)
        self.progress.begin(len(jobs))
        pool = ThreadPoolExecutor(count)  # not awaited: an interrupt stops the workers first
        list(pool.map(check, ordered))
        starved = [job for job, error in failures.items() if error and error.why == MACHINE]
        for worker in self.workers[1:] if starved else ():
            worker.stop()
        for job in starved:
            if not self._is_late(_CHECKS_SHARE):
                failures[job] = error = self._failure_of(self.workers[0], job)
                if error is not None and error.why == MACHINE:
                    self._leave_out(job, error)
        return [job for job in jobs if job in failures and failures[job] is None]

    def _failure_of(self, worker: Worker, job: Job) -> JobError | None:
        start = time.monotonic()
        try:
            errors = worker.run(job)
        except JobError as error:
            if error.why != MACHINE:
                self._reject(job, error)
            return error
        worst = self.errors[str(job)] = max(error for _, error in errors)
        seconds = time.monotonic() - start
        text = f"relative error {worst:.1e} at most ({seconds:.1f} s)"
        self.progress.step(f"checked  {job}  {text}")
        return None

    # ------------------------------------------------------------ times

    def _time(self, jobs: Sequence[Job]) -> set[str]:
        """Keys of those that the machine had no room or time for.

        What fails in turns with others is timed alone: it then says which kernel failed, and
        others are not lost.
        """
        per_kernel = min(self.limits.per_kernel, max(self._seconds_left(), 0.0) / len(jobs))
        start = time.monotonic()
        try:
            reports = self.workers[0].run(Turns(tuple(jobs), per_kernel * len(jobs)))
        except JobError as error:
            if len(jobs) > 1:
                names = ", ".join(job.backend for job in jobs)
                self.progress.say(f"one of {names} failed ({error}): each is timed alone")
                self.progress.total += len(jobs) - 1
                return set().union(*(self._time([job]) for job in jobs))
            if error.why != MACHINE:
                self._reject(jobs[0], error)
                return set()
            self._leave_out(jobs[0], error)
            return {str(jobs[0])}
        for job in jobs:
            self._keep(job, reports)
        write_table(self.path, self.table)
        size_key, times = jobs[0].problem.size_key, _shown(reports)
        cut = {str(job) for job in jobs if not _has_all(job, reports)}
        text = f"timed  {size_key}  {times} ({time.monotonic() - start:.1f} s)"
        what = "steps" if isinstance(jobs[0].problem, AttentionProblem) else "token counts"
        self.progress.step(text + f"; {what} were left out for want of time" * bool(cut))
        return cut if self._is_late() else set()

    def _keep(self, job: Job, reports: Reports) -> None:
        """With what is known already of other token counts."""
        own = [(m, found) for m, found in reports if found.backend == job.backend]
        if not own:
            return
        fields = dict.fromkeys(name for _, found in own for name in found.us)
        times = {
            name: times_of({m: found.us[name] for m, found in own if name in found.us})
            for name in fields
        }
        noise = times_of({m: found.noise for m, found in own})
        error = self.errors.get(str(job))
        entry = Entry(job.version, _today(), noise=noise, error=error, **times)
        place = job.problem.size_key, job.backend
        known = self.table.entry(*place, entry.version)
        self.table = self.table.with_entry(*place, known.updated(entry) if known else entry)

    # ------------------------------------------------------------ failures

    def _leave_out(self, job: Job, error: JobError) -> None:
        self.progress.step(f"LEFT OUT {job}  this machine could not run the trial: {error}")

    def _reject(self, job: Job, error: JobError) -> None:
        place = job.backend, job.version, str(self.device), job.problem.size_key
        failure = Failure(*place, error.why, str(error), _today())
        with self.lock:
            add_failure(failure)
            self.failures.append(failure)
            self.rejected.add(str(job))
            self.progress.step(f"REJECTED {job}  {error.why}: {error}")


def _has_all(job: Job, reports: Reports) -> bool:
    return set(job.tokens) <= {m for m, found in reports if found.backend == job.backend}


def _shown(reports: Reports) -> str:
    """`M = 1: cpu 8.21, torch 35.1 us; M = 256: ...` of the least and the most tokens."""
    counts = in_order({m for m, _ in reports})
    texts = []
    for num_tokens in dict.fromkeys((counts[0], counts[-1])):
        found: list[Measured] = [one for m, one in reports if m == num_tokens]
        times = ", ".join(f"{one.backend} {_counting(one):.4g}" for one in found)
        texts.append(f"{column_text(num_tokens)}: {times} us")
    return "; ".join(texts)


def _counting(measured: Measured) -> float:
    return measured.us.get("quantised_us", measured.us["us"])


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
