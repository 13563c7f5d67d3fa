"""`select`: the one place where a kernel is chosen. Pure: no torch, environment, clock, globals."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import lcm
from operator import attrgetter
from typing import NamedTuple

from vllm.formats.partial_blocks import Fit
from vllm.formats.scales import Requant
from vllm.kernels.select import eligibility
from vllm.kernels.select.decision import Candidate, Decision, Evidence, Layouts, Parts, Roundings
from vllm.kernels.select.eligibility import names
from vllm.kernels.select.grade import Grade, least, ran_on
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.problem import Problem, Traits, WeightProblem, traits_of
from vllm.kernels.select.reason import DEFAULT_ORDER, RANK_FLAG, RANK_MEASURED, Origin, Reason, Why
from vllm.kernels.select.spec import COMPILERS, STORED, KernelSpec
from vllm.machine import Device, Libs
from vllm.utils.dataclasses import replace


def select(
    problem: Problem,
    device: Device,
    libs: Libs,
    policy: Policy,
    specs: Sequence[KernelSpec],
    layer: str = "",
    evidence: Evidence | None = None,
) -> Decision:
    """Chooses the first candidate without a reason against it; keeps all with all reasons.

    Order: what `evidence` of this problem on this chip shows to be fastest of what can run here,
    then what the policy prefers, then the order of `specs`. The backend of an override is chosen,
    or the decision has `chosen=None`, unless the policy falls back: to the next strongest override,
    if there is one. ConfigError where two overrides of one rank disagree.
    """
    kernels = _kernels(tuple(specs), traits_of(problem), device, libs, policy.e8m0)
    override = policy.override_of(layer, problem, specs) if policy.overrides else None
    padded = problem.block_fit(False)
    fits = padded, None if padded is None else problem.block_fit(True)
    grades = _grades(evidence) if evidence else {}
    case = _Case(problem, fits, device, libs, policy, override, grades)
    candidates = _candidates(kernels, case)
    if preferred := {p.backend for p in policy.preferred if p.family == problem.family}:
        candidates.sort(key=lambda candidate: candidate.backend not in preferred)
    if override is None:
        return _best(case, candidates, kernels, evidence)
    if _is_final(override, policy, candidates):
        return _overridden(case, override, candidates, evidence)
    weaker = replace(policy, overrides=tuple(o for o in policy.overrides if o is not override))
    decision = select(problem, device, libs, weaker, specs, layer, evidence)
    if any(other.origin == decision.origin for other in weaker.overrides):
        return decision
    text = f"{override.origin.text} cannot run here, fell back"
    return replace(decision, origin=Origin(override.origin.rank, text))


_NATIVE = Origin(RANK_FLAG, "--require-native")


class _Case(NamedTuple):
    """What every candidate is judged by; what is the same for all is computed once.

    fits: how partial scale blocks are taken by a kernel of fixed blocks, and by one of any blocks.
    grades: by backend, where there are times.
    """

    problem: Problem
    fits: tuple[Fit | None, Fit | None]
    device: Device
    libs: Libs
    policy: Policy
    override: Override | None
    grades: Mapping[str, Grade]


class _Kernel(NamedTuple):
    """A backend's kernel for a format, and what speaks against it whatever the sizes.

    plain: the candidate that it is where sizes and policy add no reason and nothing is known of its
    times. graded: the same by what is known; empty where it does not run on the chip or does not
    take the format, since nothing else matters then.
    """

    spec: KernelSpec
    plain: Candidate
    graded: Mapping[Grade, Candidate]


class _Kernels(NamedTuple):
    """plain: of every kernel, in order. able: by backend, the place and the kernel of those that
    take the format on this chip. multiple: any multiples of it are sizes that these take, but for
    `by_problem`: those that each problem is asked about. limited: of those that take fewer tokens
    than the problem has, the kernel as judged for so few, and how many. compiling: backends that
    compile at run time, the dearest first. layouts: of the weight, of backends that do not take the
    stored one alone."""

    plain: tuple[Candidate, ...]
    able: Mapping[str, tuple[int, _Kernel]]
    multiple: int
    by_problem: tuple[str, ...]
    limited: Mapping[str, tuple[_Kernel, int]]
    compiling: tuple[str, ...]
    layouts: Layouts


@lru_cache(maxsize=1024)
def _kernels(
    specs: tuple[KernelSpec, ...], traits: Traits, device: Device, libs: Libs, e8m0: bool | None
) -> _Kernels:
    """Of each backend the kernel that takes the format; its first where none does."""
    by_backend: dict[str, list[KernelSpec]] = {}
    for spec in specs:
        if spec.family == traits.family:
            by_backend.setdefault(spec.backend, []).append(spec)
    every = [_kernel(own, traits, device, libs, e8m0) for own in by_backend.values()]
    able = {one.spec.backend: (i, one) for i, one in enumerate(every) if one.graded}
    specs_of_able = [kernel.spec for _, kernel in able.values()]
    multiple = lcm(*[align for s in specs_of_able for align in (s.n_align, s.k_align)])
    by_problem = [
        kernel.spec.backend
        for _, kernel in able.values()
        if kernel.spec.check is not None or kernel.plain.rescales or traits.scale == "group"
    ]
    limited = {}
    for backend in able:
        own = by_backend[backend]
        limits = [s.max_tokens for s in own if s.max_tokens and traits.format in s.formats]
        if limits and limits[0] < traits.most_tokens:
            few = traits._replace(most_tokens=limits[0])
            limited[backend] = _kernel(own, few, device, libs, e8m0), limits[0]
    used = [kernel.spec for kernel in every]
    costs = {spec.backend: COMPILERS.index(spec.compiles) for spec in used if spec.compiles}
    return _Kernels(
        tuple(kernel.plain for kernel in every),
        able,
        multiple,
        tuple(by_problem),
        limited,
        tuple(sorted(costs, key=costs.__getitem__)),
        tuple((s.backend, s.weight_layouts) for s in used if s.weight_layouts != (STORED,)),
    )


def _kernel(
    own: Sequence[KernelSpec], traits: Traits, device: Device, libs: Libs, e8m0: bool | None
) -> _Kernel:
    """own: of one backend."""
    able = [spec for spec in own if traits.format in spec.formats]
    spec = able[0] if able else own[0]
    act = next((scheme for scheme in traits.act if scheme in spec.act), None)
    is_out = not able or not eligibility.is_meant(spec, device)
    reasons = eligibility.machine_reasons(spec, device, libs)
    if traits.dtype not in spec.dtypes:
        text = f"computes in {names(spec.dtypes)}, not {traits.dtype}"
        reasons.append(Reason(Why.DTYPE, text))
    if act is None:
        text = f"quantises activations as {names(spec.act)}; allowed: {names(traits.act)}"
        reasons.append(Reason(Why.NUMERICS, text))
    if not able:
        taken = frozenset().union(*(other.formats for other in own))
        reasons.append(Reason(Why.FORMAT, f"takes {names(taken)}, not {traits.format}"))
    if not is_out:
        reasons += eligibility.trait_reasons(spec, traits)
    grade = Grade.RUN if ran_on(device, traits.format) in spec.ran_on else Grade.COMPILED
    scales = "" if is_out else eligibility.scale_form(spec, device, e8m0)
    known = spec.backend, act, scales, None, (), None, tuple(reasons)
    plain = Candidate(*known, grade)
    graded = {} if is_out else {one: Candidate(*known, one) for one in Grade}
    return _Kernel(spec, plain, graded)


def _candidates(kernels: _Kernels, case: _Case) -> list[Candidate]:
    """Most kernels are judged by what the problem shares with others (`_Kernel`)."""
    found, able, policy = [*kernels.plain], kernels.able, case.policy
    for backend, grade in case.grades.items():
        if backend in able:
            place, kernel = able[backend]
            found[place] = kernel.graded[grade]
    rows, columns = case.problem.sizes
    each = case.fits[0] or case.libs.quarantined or policy.judges
    judged: Iterable[str] = kernels.by_problem
    if each or rows % kernels.multiple or columns % kernels.multiple:
        judged = able
    elif policy.excluded:
        judged = {*judged, *policy.excluded.intersection(able)}
    for backend in judged:
        place, kernel = able[backend]
        found[place] = _judged(kernel, case)
    return found


def _judged(kernel: _Kernel, case: _Case) -> Candidate:
    """By everything that may speak against it."""
    problem, fits, device, libs, policy, _, grades = case
    spec, plain, requant = kernel.spec, kernel.plain, None
    fit, scales, grade = fits[spec.refines], plain.scales, grades.get(spec.backend, plain.grade)
    reasons = eligibility.size_reasons(spec, problem, fit)
    if libs.quarantined:
        reasons += eligibility.quarantine_reasons(spec, problem, libs)
    if plain.rescales:
        assert isinstance(problem, WeightProblem)
        requant = eligibility.requant_of(problem, scales)
        reasons += eligibility.requant_reasons(spec, device, policy, scales, requant)
    if policy.judges or spec.backend in policy.excluded:
        reasons += _policy_reasons(spec, plain, case, requant, grade)
    if not (reasons or fit or requant):
        return kernel.graded[grade]
    own = (*plain.reasons, *reasons)
    return Candidate(spec.backend, plain.act, scales, fit, (), requant, own, grade)


def _policy_reasons(
    spec: KernelSpec, plain: Candidate, case: _Case, requant: Requant | None, grade: Grade
) -> Iterator[Reason]:
    """What the policy says against a kernel that does not depend on sizes or scales."""
    problem, policy, override = case.problem, case.policy, case.override
    if policy.requires_native and not eligibility.is_native(spec, problem, plain.act):
        how = "an emulation" if spec.is_emulation else "weight-only"
        yield Reason(Why.POLICY, f"{_NATIVE.text}, and this is {how}", _NATIVE)
    if override is None or override.backend != spec.backend:  # it outranks exclusions
        is_exact = requant is None or requant.error == 0
        exclusion = policy.exclusion_of(spec.backend, problem.family, is_exact)
        if exclusion is not None:
            yield Reason(Why.POLICY, exclusion.origin.text, exclusion.origin)
    # What others timed never ran here.
    never_ran = grade is Grade.IMPORTED and plain.grade is Grade.COMPILED
    if not (Grade.COMPILED if never_ran else grade).reaches(policy.least_grade):
        origin = Origin(RANK_FLAG, f"--require-evidence {policy.least_grade}")
        text = f"{origin.text}, and it is only {grade} on {case.device.arch}"
        yield Reason(Why.POLICY, text, origin)


def _grades(evidence: Evidence) -> dict[str, Grade]:
    """What times are worth: those of another version or chip are estimates."""
    found = {name: evidence.grade for name, us in evidence.us if any(us)}
    for name, *_ in evidence.stale:
        if name in found:
            found[name] = least([evidence.grade, Grade.ESTIMATED])
    return found


def _best(
    case: _Case,
    candidates: Sequence[Candidate],
    kernels: _Kernels,
    evidence: Evidence | None,
) -> Decision:
    """Where no override speaks: the first that can run, the fastest of those measured first."""
    measured = _measured(evidence, candidates, kernels, case) if evidence else []
    rest = candidates
    for fastest in measured:
        if not fastest.parts:
            rest = [candidate for candidate in rest if candidate is not fastest]
    ordered = (*measured, *rest)
    winner = next((c for c in ordered if not c.reasons), None)
    chosen = winner.backend if winner else None
    origin = _excluding_origin(chosen, ordered)
    if origin is None and evidence and winner in measured:
        origin = Origin(RANK_MEASURED, f"{evidence.grade}: {evidence.source}")
    if origin is None and chosen is not None and case.policy.preferred:
        preference = case.policy.preference_of(chosen, case.problem.family)
        origin = preference.origin if preference else None
    return Decision(case.problem, case.device, chosen, origin or DEFAULT_ORDER, ordered, evidence)


def _is_final(override: Override, policy: Policy, candidates: Sequence[Candidate]) -> bool:
    """False where the override's backend cannot run, and the next may be taken for it."""
    wanted = next((c for c in candidates if c.backend == override.backend), None)
    return not policy.falls_back or (wanted is not None and not wanted.reasons)


def _overridden(
    case: _Case, override: Override, candidates: Sequence[Candidate], evidence: Evidence | None
) -> Decision:
    """The override's backend, or nothing where it cannot run; all others are out."""
    reason = Reason(Why.POLICY, f"{override.origin.text} asks for {override.backend}")
    judged = tuple(
        c if c.backend == override.backend else replace(c, reasons=(*c.reasons, reason))
        for c in candidates
    )
    chosen = next((c.backend for c in judged if not c.reasons), None)
    return Decision(case.problem, case.device, chosen, override.origin, judged, evidence)


def _measured(
    evidence: Evidence,
    candidates: Sequence[Candidate],
    kernels: _Kernels,
    case: _Case,
) -> list[Candidate]:
    """The fastest split of what could run but for what was asked, then that of what may run.

    Empty where the first in the default order was not measured: nothing is known to beat it.
    """
    timed = {backend for backend, _ in evidence.us}
    could: list[tuple[Candidate, int | None]] = []
    for candidate in candidates:
        limit = None
        if candidate.reasons:
            if candidate.backend in kernels.limited and candidate.backend in timed:
                kernel, limit = kernels.limited[candidate.backend]
                candidate = _judged(kernel, case)
            if not all(map(_ORIGIN, candidate.reasons)):
                continue
        could.append((candidate, limit))
    may = [one for one in could if not one[0].reasons]
    judged = {one.backend: one for one, _ in could if one.backend in timed}
    roundings = _roundings(evidence, judged.values())
    found: dict[Parts, Candidate] = {}
    for able in (could, may) if len(may) < len(could) else (may,):
        first = next((candidate.backend for candidate, limit in able if limit is None), None)
        if first in timed:
            own = tuple([(one.backend, limit) for one, limit in able if one.backend in timed])
            m_range = case.problem.m_range
            parts = evidence.best_split(own, m_range, kernels.compiling, kernels.layouts, roundings)
            if parts:
                found[parts] = _split(parts, judged)
    return [*found.values()]


_ORIGIN = attrgetter("origin")


def _roundings(evidence: Evidence, candidates: Iterable[Candidate]) -> Roundings:
    """By backend, of those that round: of equally fast ones that which rounds least is to serve.
    Empty where times are not measured here, since those know nothing of equals."""
    if evidence.grade is not Grade.MEASURED:
        return ()
    return tuple([(one.backend, count) for one in candidates if (count := one.roundings)])


def _split(parts: Parts, judged: Mapping[str, Candidate]) -> Candidate:
    """One of several kernels, as judged for the tokens of each: `skinny<=16|deep_gemm`."""
    last = judged[parts[-1][1]]
    if len(parts) == 1:
        return last
    name = "|".join([b if limit is None else f"{b}<={limit}" for limit, b in parts])
    kernels = [judged[backend] for backend in dict.fromkeys([backend for _, backend in parts])]
    reasons = [
        Reason(reason.why, f"{kernel.backend}: {reason.text}", reason.origin)
        for kernel in kernels
        for reason in kernel.reasons
    ]
    own = ([kernel for kernel in kernels if kernel.requant] or [last])[0]
    grade = least([kernel.grade for kernel in kernels])
    act, fit, requant = last.act, last.fit, own.requant
    return Candidate(name, act, own.scales, fit, parts, requant, tuple(reasons), grade)


def _excluding_origin(chosen: str | None, candidates: Sequence[Candidate]) -> Origin | None:
    """Of the strongest preference that alone kept a kernel from running that comes before the
    chosen one; None where the choice is not due to any."""
    deciders: list[Origin] = []
    for candidate in candidates:
        if candidate.backend == chosen:
            break
        origins = [reason.origin for reason in candidate.reasons]
        deciders += [origin for origin in origins if origin and None not in origins]
    return min(deciders, key=lambda origin: origin.rank, default=None)
