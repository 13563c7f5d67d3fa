"""What `vllm kernels tune` asks a child process for, and what it hears from it."""

from dataclasses import dataclass
from typing import NamedTuple

from vllm.kernels.evidence.tables import Column
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import Measurable


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel for one problem: as a request, to check it. gate: token counts that its results
    are compared for; () of attention, which has one comparison. tokens: those it is timed for, in
    order, of attention the names of steps. compiles: whether its first calls compile. first: of
    `tokens`, those that are timed before other problems have all of theirs; None for no
    preference."""

    problem: Measurable
    candidate: Candidate
    tokens: tuple[Column, ...]
    gate: tuple[int, ...]
    version: str
    compiles: bool = False
    first: tuple[int, ...] | None = None

    @property
    def backend(self) -> str:
        return self.candidate.backend

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of tokens that it is timed for."""
        return tuple(m for m in self.tokens if isinstance(m, int))

    @property
    def max_tokens(self) -> int:
        return max(*self.counts, *self.gate)

    def __str__(self) -> str:
        return f"{self.problem.size_key}  {self.backend}"


@dataclass(frozen=True, slots=True)
class Turns:
    """Kernels of one problem, to be timed in turns. seconds: after so many no further token count
    is begun."""

    jobs: tuple[Job, ...]
    seconds: float = 10.0

    @property
    def problem(self) -> Measurable:
        return self.jobs[0].problem

    @property
    def tokens(self) -> tuple[Column, ...]:
        """What any of the jobs is timed for."""
        return tuple(dict.fromkeys(column for job in self.jobs for column in job.tokens))

    def __str__(self) -> str:
        return f"{self.problem.size_key}  {', '.join(job.backend for job in self.jobs)}"


class Measured(NamedTuple):
    """A kernel for a number of tokens or a step. us: medians in microseconds by the field of
    `Entry` that keeps them. noise: the widest of their intervals, as of `Entry`."""

    backend: str
    us: dict[str, float]
    noise: float
