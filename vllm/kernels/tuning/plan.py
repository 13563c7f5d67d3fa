"""What `vllm kernels tune` measures, and in which order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from vllm.kernels import registry
from vllm.kernels.evidence.steps import MAIN_STEPS, TYPICAL, fitting
from vllm.kernels.evidence.tables import (
    NEVER_MEASURED,
    TOKENS,
    Column,
    Entry,
    Table,
    is_measurable,
)
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import (
    AttentionProblem,
    LinearProblem,
    Measurable,
    MoEProblem,
)
from vllm.kernels.select.select import select
from vllm.kernels.select.spec import KernelSpec
from vllm.kernels.step_bytes import weight_bytes
from vllm.kernels.tuning.jobs import Job
from vllm.machine import Device, Libs

GATE_TOKENS = (1, 2, 31, 32, 33, 128)
# Where time is limited these come first: decoding alone, for many users, and prompts.
MAIN_TOKENS = (1, 16, 64, 512, 4096)
# For the keys and values of a step of attention, where nobody says how much memory there is.
CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Plan:
    """jobs: the most important problem's first. notes: what is not measured, and why."""

    jobs: tuple[Job, ...]
    notes: tuple[str, ...]


def plan(
    problems: Iterable[Measurable],
    device: Device,
    libs: Libs,
    tokens: Sequence[int] = TOKENS,
    backends: Sequence[str] = (),
    cache_bytes: int = CACHE_BYTES,
) -> Plan:
    """A job for each kernel but emulations that can run here. problems: one for each layer; what
    reads most bytes in all its layers comes first (`bytes_read`). backends: only these, () for all.
    cache_bytes: for the keys and values of a step of attention."""
    jobs: list[Job] = []
    notes: list[str] = []
    bytes_of: dict[str, int] = {}
    measurable: dict[str, Measurable] = {}
    for problem in problems:
        if not is_measurable(problem):
            notes.append(f"{problem}: no table holds times of a batched layout")
            continue
        measurable.setdefault(problem.size_key, _measured(problem))
        bytes_of[problem.size_key] = bytes_of.get(problem.size_key, 0) + bytes_read(problem)
    for size_key in sorted(measurable, key=lambda key: -bytes_of[key]):
        problem = measurable[size_key]
        columns: Sequence[Column] = tokens
        if isinstance(problem, AttentionProblem):
            columns = fitting(problem, device.kind, cache_bytes)
        own = list(_jobs_of(problem, device, libs, columns))
        if len(own) < 2:
            names = ", ".join(job.backend for job in own) or "nothing"
            notes.append(f"{problem}: {names} alone can run it, so there is no choice")
            continue
        jobs += [job for job in own if not backends or job.backend in backends]
    return Plan(tuple(jobs), tuple(dict.fromkeys(notes)))


def _measured(problem: Measurable) -> Measurable:
    """What is measured for all problems of its size key."""
    if isinstance(problem, AttentionProblem):
        return problem
    is_regular = problem.block_fit(takes_any_block=False) is None
    if isinstance(problem, MoEProblem):
        return replace(problem, cut=1) if is_regular else problem
    whole = replace(problem, bias=False)
    return replace(whole, parts=(), cut_n=1, cut_k=1) if is_regular else whole


def bytes_read(problem: Measurable) -> int:
    """By one step: the weights of a layer, of attention the keys and values of the step TYPICAL."""
    if isinstance(problem, AttentionProblem):
        return TYPICAL.bytes_of_cache(problem)
    return weight_bytes(problem)


def _jobs_of(
    problem: Measurable, device: Device, libs: Libs, tokens: Sequence[Column]
) -> Iterator[Job]:
    specs = registry.specs(problem.family, device.family)
    left_out = NEVER_MEASURED.get((device.kind, problem.family), ())
    by_name = {
        spec.backend: spec
        for spec in specs
        if not spec.is_emulation and problem.format in spec.formats and spec.backend not in left_out
    }
    taken: dict[str, list[Column]] = {}
    candidates = {}
    for num_tokens, asked in _asked(problem, tokens):
        for candidate in select(asked, device, libs, Policy(), specs).candidates:
            if not candidate.reasons and candidate.backend in by_name:
                taken.setdefault(candidate.backend, []).append(num_tokens)
                candidates[candidate.backend] = candidate
    for backend, own in taken.items():
        most = own[-1]
        gate = {m for m in (*GATE_TOKENS, most) if m <= most} if isinstance(most, int) else set()
        spec: KernelSpec = by_name[backend]
        yield Job(
            problem,
            candidates[backend],
            tokens=tuple(own),
            gate=tuple(sorted(gate)),
            version=version_of(spec, libs, device),
            compiles=bool(spec.compiles),
        )


def _asked(problem: Measurable, tokens: Sequence[Column]) -> Iterator[tuple[Column, Measurable]]:
    """Kernels of experts take any number of tokens, and those of attention any step."""
    for num_tokens in tokens:
        if isinstance(problem, LinearProblem) and isinstance(num_tokens, int):
            yield num_tokens, replace(problem, m_range=(num_tokens, num_tokens))
        else:
            yield num_tokens, problem


# ---------------------------------------------------------------- what is done already


def without_done(jobs: Iterable[Job], table: Table) -> list[Job]:
    """Those with token counts that the table lacks of this version, and of these such counts."""
    left = []
    for job in jobs:
        entry = table.entry(job.problem.size_key, job.backend, job.version)
        known = _known(entry, job.problem) if entry is not None else set()
        if tokens := tuple(m for m in job.tokens if m not in known):
            left.append(replace(job, tokens=tokens))
    return left


def _known(entry: Entry, problem: Measurable) -> set[Column]:
    even = {m for m, _ in entry.us}
    is_routed = isinstance(problem, MoEProblem)
    return even & {m for m, _ in entry.skewed_us} if is_routed else even


def stale_notes(jobs: Iterable[Job], table: Table) -> list[str]:
    """Whose times in the table are of other code than is here, and so count for nothing."""
    found: dict[str, None] = {}
    for job in jobs:
        known = table.rows.get(job.problem.size_key, {}).get(job.backend)
        if known is not None and known.version != job.version:
            old = known.version or "an unknown version"
            text = f"{job.backend}: the table's times are of {old}, and {job.version} is here"
            found[text] = None
    return list(found)


# ---------------------------------------------------------------- in which order


def in_turns(jobs: Iterable[Job], is_limited: bool) -> list[tuple[Job, ...]]:
    """Kernels that are timed together, those of one problem: first what a job says, or where it
    says nothing and time is limited the MAIN_TOKENS and MAIN_STEPS, then what is left."""
    by_problem: dict[Measurable, list[Job]] = {}
    for job in jobs:
        by_problem.setdefault(job.problem, []).append(job)
    found = []
    main: tuple[Column, ...] = (*MAIN_TOKENS, *MAIN_STEPS)
    for is_first in (True, False):
        for own in by_problem.values():
            due = [_part(job, is_first, main if is_limited else job.tokens) for job in own]
            if group := tuple(job for job in due if job.tokens):
                found.append(group)
    return found


def _part(job: Job, is_first: bool, otherwise: Sequence[Column]) -> Job:
    """What is due first, or what is left. otherwise: what is first where the job says nothing."""
    first = otherwise if job.first is None else job.first
    return replace(job, tokens=tuple(m for m in job.tokens if (m in first) == is_first))
