"""`vllm kernels tune`: plans measurements, carries them out and writes the table.

Every kernel that can run a layer here is first compared with a reference (the gate), in parallel
because first calls may compile, and then timed alone. The table is rewritten after each.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from vllm.kernels import registry
from vllm.kernels.evidence.quarantine import Failure, add_failure
from vllm.kernels.evidence.tables import TOKENS, Entry, Table, write_table
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.select import select
from vllm.kernels.select.spec import KernelSpec
from vllm.kernels.tuning.workers import MACHINE, Job, JobError, StoppedError, Worker
from vllm.machine import Device, Libs

GATE_TOKENS = (1, 2, 31, 32, 33, 128)
_CHECKS_SHARE = 0.5
_GPU_SHARE, _BYTES_OF_CONTEXT, _BYTES_OF_PROCESS = 0.8, 1 << 30, 4 << 30
TRIALS = "vllm.kernels.tuning.trials:serve"


@dataclass(frozen=True)
class Plan:
    """notes: what is not measured, and why."""

    jobs: tuple[Job, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """Seconds: for timing one kernel for one problem, for everything (half of it for checks), and
    without a sign of life. jobs: processes that check at once."""

    per_kernel: float = 10.0
    total: float | None = None
    hang: float = 300.0
    jobs: int = 1


# ---------------------------------------------------------------- what to measure


def plan(
    problems: Iterable[LinearProblem],
    device: Device,
    libs: Libs,
    tokens: Sequence[int] = TOKENS,
    backends: Sequence[str] = (),
) -> Plan:
    """A job for each kernel but emulations that can run here; backends: only these, () for all."""
    jobs: list[Job] = []
    notes: list[str] = []
    specs = registry.specs("linear", device.family)
    measurable: dict[str, LinearProblem] = {}
    for problem in dict.fromkeys(problems):
        plain = replace(problem, bias=False)
        if plain.block_fit(takes_any_block=False) is None:
            plain = replace(plain, parts=(), cut_n=1, cut_k=1)
        measurable.setdefault(problem.size_key, plain)
    for problem in measurable.values():
        own = list(_jobs_of(problem, device, libs, specs, tokens))
        if len(own) < 2:
            names = ", ".join(job.candidate.backend for job in own) or "nothing"
            notes.append(f"{problem}: {names} alone can run it, so there is no choice")
            continue
        jobs += [job for job in own if not backends or job.candidate.backend in backends]
    return Plan(tuple(jobs), tuple(notes))


def _jobs_of(
    problem: LinearProblem,
    device: Device,
    libs: Libs,
    specs: Sequence[KernelSpec],
    tokens: Sequence[int],
) -> Iterator[Job]:
    by_name = {
        spec.backend: spec
        for spec in specs
        if not spec.is_emulation and problem.format in spec.formats
    }
    taken: dict[str, list[int]] = {}
    candidates = {}
    for num_tokens in tokens:
        asked = replace(problem, m_range=(num_tokens, num_tokens))
        for candidate in select(asked, device, libs, Policy(), specs).candidates:
            if not candidate.reasons and candidate.backend in by_name:
                taken.setdefault(candidate.backend, []).append(num_tokens)
                candidates[candidate.backend] = candidate
    for backend, own in taken.items():
        gate = sorted({m for m in (*GATE_TOKENS, own[-1]) if m <= own[-1]})
        spec = by_name[backend]
        yield Job(
            problem,
            candidates[backend],
            tokens=tuple(own),
            gate=tuple(gate),
            version=version_of(spec, libs, device),
            compiles=bool(spec.compiles),
        )


def without_done(jobs: Iterable[Job], table: Table) -> list[Job]:
    """Those with token counts that the table lacks of this version, and of these such counts."""
    left = []
    for job in jobs:
        entry = table.entry(job.problem.size_key, job.candidate.backend, job.version)
        known = dict(entry.us) if entry is not None else {}
        if tokens := tuple(m for m in job.tokens if m not in known):
            left.append(replace(job, tokens=tokens))
    return left


def num_checkers(jobs: Sequence[Job], num_cores: int, memory: int, gpu_memory: int | None) -> int:
    """Memory in bytes, of the machine and the GPU; None for CPU kernels, which use all cores."""
    if gpu_memory is None:
        return 1
    fits = int(_GPU_SHARE * gpu_memory) // max(map(_bytes_of_check, jobs), default=1)
    return max(1, min(num_cores // 2, memory // _BYTES_OF_PROCESS, fits))


def _bytes_of_check(job: Job) -> int:
    """On the GPU: input, output, reference and weight in float32, and the CUDA context."""
    m, n, k = max(*job.tokens, *job.gate), job.problem.n, job.problem.k
    return 16 * m * (n + k) + 12 * n * k + _BYTES_OF_CONTEXT


# ---------------------------------------------------------------- measuring


@dataclass
class Run:
    """Carries out jobs. say: gets a line for each step."""

    device: Device
    table: Table
    path: Path
    limits: Limits
    say: Callable[[str], object]
    trials: str = TRIALS
    failures: list[Failure] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def carry_out(self, jobs: Sequence[Job]) -> list[Job]:
        """Checks and times `jobs`; returns those for which no time or no memory was left.

        An interrupt at the keyboard stops the processes; what was measured is in the file.
        """
        try:
            passed, left = self._check(jobs)
            for worker in self.workers[1:]:
                worker.stop()
            for number, job in enumerate(passed, 1):
                if self._is_late():
                    return [*left, *passed[number - 1 :]]
                if not self._time(job, f"[{number}/{len(passed)}]"):
                    left.append(job)
            return left
        finally:
            for worker in self.workers:
                worker.stop()

    def _is_late(self, share: float = 1.0) -> bool:
        """Whether this share of the time for everything is over."""
        total = self.limits.total
        return total is not None and time.monotonic() - self.start > total * share

    def _check(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """Jobs that passed the gate, and jobs for which no time or memory was left, in order.

        A job that ran out of memory beside others is checked again alone.
        """
        count = max(1, min(self.limits.jobs, len(jobs)))
        process = self.trials, self.device.kind, self.limits.hang
        self.workers += [Worker(*process) for _ in range(count)]
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            idle.put(worker)
        failures: dict[Job, JobError | None] = {}  # of jobs that were checked

        def check(job: Job) -> None:
            if self._is_late(_CHECKS_SHARE):
                return
            worker = idle.get()
            try:
                with suppress(StoppedError):
                    failures[job] = self._failure_of(worker, job)
            finally:
                idle.put(worker)

        # Slow compilations start first; with a time limit last, as they could use it up.
        is_limited = self.limits.total is not None
        pool = ThreadPoolExecutor(count)  # not awaited: an interrupt stops the workers first
        list(pool.map(check, sorted(jobs, key=lambda job: job.compiles == is_limited)))
        starved = [job for job, error in failures.items() if error and error.why == MACHINE]
        for worker in self.workers[1:] if starved else ():
            worker.stop()
        for job in starved:
            del failures[job]
            if self._is_late(_CHECKS_SHARE):
                continue
            error = self._failure_of(self.workers[0], job)
            if error is not None and error.why == MACHINE:
                self._leave_out(job, error)
            else:
                failures[job] = error
        passed = [job for job in jobs if job in failures and failures[job] is None]
        return passed, [job for job in jobs if job not in failures]

    def _failure_of(self, worker: Worker, job: Job) -> JobError | None:
        start = time.monotonic()
        try:
            errors = worker.run(job)[: len(job.gate)]
        except JobError as error:
            if error.why != MACHINE:
                self._reject(job, error)
            return error
        worst = max(error for _, error in errors)
        seconds = time.monotonic() - start
        self.say(f"checked  {job}  relative error {worst:.1e} at most ({seconds:.1f} s)")
        return None

    def _time(self, job: Job, number: str) -> bool:
        """Whether the machine had room for it."""
        job = replace(job, is_timed=True, seconds=self.limits.per_kernel)
        start = time.monotonic()
        try:
            reports = self.workers[0].run(job)
        except JobError as error:
            if error.why == MACHINE:
                self._leave_out(job, error)
                return False
            self._reject(job, error)
            return True
        us = tuple((m, us) for m, us in reports if m > 0)
        quantised = tuple((-m, us) for m, us in reports if m < 0)
        self._keep(job, Entry(job.version, _today(), us, quantised))
        shown = ", ".join(f"{time_us:.4g} us for M = {m}" for m, time_us in (us[0], us[-1]))
        cut = "" if len(us) == len(job.tokens) else f", {len(job.tokens) - len(us)} counts left out"
        self.say(f"{number}  {job}  {shown}{cut} ({time.monotonic() - start:.1f} s)")
        return True

    def _leave_out(self, job: Job, error: JobError) -> None:
        self.say(f"LEFT OUT {job}  this machine could not run the trial: {error}")

    def _keep(self, job: Job, entry: Entry) -> None:
        """With what is known already of other token counts."""
        place = job.problem.size_key, job.candidate.backend
        known = self.table.entry(*place, entry.version)
        if known is not None:
            us = dict(known.us) | dict(entry.us)
            quantised = dict(known.quantised_us) | dict(entry.quantised_us)
            entry = replace(
                entry, us=tuple(sorted(us.items())), quantised_us=tuple(sorted(quantised.items()))
            )
        self.table = self.table.with_entry(*place, entry)
        write_table(self.path, self.table)

    def _reject(self, job: Job, error: JobError) -> None:
        place = job.candidate.backend, job.version, str(self.device), job.problem.size_key
        failure = Failure(*place, error.why, str(error), _today())
        with self.lock:
            add_failure(failure)
            self.failures.append(failure)
            self.say(f"REJECTED {job}  {error.why}: {error}")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
