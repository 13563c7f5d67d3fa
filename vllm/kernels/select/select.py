"""`select`: the one place where a kernel is chosen. Pure: no torch, environment, clock, globals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from vllm.errors import ConfigError
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.kernels.evidence.splits import best_split
from vllm.kernels.select.fit import Fit, linear_fit, moe_fit
from vllm.kernels.select.problem import LinearProblem, MoEProblem, Problem
from vllm.kernels.select.spec import (
    BUILD,
    COMPILERS,
    DEFAULT_ORDER,
    NATIVE,
    RANK_MEASURED,
    Candidate,
    Decision,
    Device,
    Exclusion,
    KernelSpec,
    Libs,
    Measured,
    Origin,
    Override,
    Parts,
    Policy,
    Reason,
    Scales,
    Timings,
    Why,
    missing_code,
    serves,
)


def select(
    problem: Problem,
    device: Device,
    libs: Libs,
    policy: Policy,
    specs: Sequence[KernelSpec],
    layer: str = "",
    timings: Timings | None = None,
) -> Decision:
    """Chooses the first candidate that nothing speaks against; keeps all with all reasons.

    Order: what `timings` of this problem on this chip show to be fastest of what can run here,
    then the order of `specs`. A forced backend is chosen, or the decision has `chosen=None`,
    unless the policy lets it fall back: to the next strongest wish, if there is one. ConfigError
    where two wishes of one rank disagree.
    """
    of_format = problem.family, problem.format, problem.dtype, problem.act
    kernels = _kernels(tuple(specs), *of_format, device, libs, policy.e8m0)
    forced = _forced(problem, policy, layer, specs) if policy.overrides else None
    fits = (_fit_of(problem, False), _fit_of(problem, True))
    case = _Case(problem, fits, device, libs, policy, forced)
    candidates = [_candidate(kernel, case) for kernel in kernels.values()]
    if forced is None:
        measured = _measured(timings, candidates, kernels, case) if timings else []
        if measured:
            first = [candidate for _, candidate in measured]
            moved = set(map(id, first))
            candidates = [*first, *(c for c in candidates if id(c) not in moved)]
        chosen = _first_free(candidates)
        origin = _origin_of(chosen, candidates, policy, problem, [m for m, _ in measured])
        return Decision(problem, device, chosen, origin, tuple(candidates), timings)
    if _must_obey(forced, policy, candidates):
        return replace(_obeyed(problem, device, forced, candidates), timings=timings)
    weaker = replace(policy, overrides=tuple(o for o in policy.overrides if o is not forced))
    decision = select(problem, device, libs, weaker, specs, layer, timings)
    if any(override.origin == decision.origin for override in weaker.overrides):
        return decision
    origin = Origin(forced.origin.rank, f"{forced.origin.text} cannot run here, fell back")
    return replace(decision, origin=origin)


# ---------------------------------------------------------------- candidates


class _Case(NamedTuple):
    """What every candidate is judged by; what is the same for all is worked out once.

    fits: how cut scale blocks are taken by a kernel of fixed blocks, and by one of any blocks.
    """

    problem: Problem
    fits: tuple[Fit | None, Fit | None]
    device: Device
    libs: Libs
    policy: Policy
    forced: Override | None


class _Kernel(NamedTuple):
    """A backend's kernel for a format, and what speaks against it whatever the sizes.

    specs: all of the backend. scales: the form of scales that it would take. Reasons come in
    one order: `before` those of sizes, then these, then `after`.
    """

    spec: KernelSpec
    specs: Sequence[KernelSpec]
    act: ActScheme | None
    scales: str
    before: tuple[Reason, ...]
    after: tuple[Reason, ...]


@lru_cache(maxsize=1024)
def _kernels(
    specs: tuple[KernelSpec, ...],
    family: str,
    weight_format: str,
    dtype: str,
    acts: tuple[ActScheme, ...],
    device: Device,
    libs: Libs,
    e8m0: bool | None,
) -> dict[str, _Kernel]:
    """By backend the kernel that takes the format; its first where none does."""
    by_backend: dict[str, list[KernelSpec]] = {}
    for spec in specs:
        if spec.family == family:
            by_backend.setdefault(spec.backend, []).append(spec)
    found = {}
    for backend, own in by_backend.items():
        spec = next((other for other in own if weight_format in other.formats), own[0])
        act = next((scheme for scheme in acts if scheme in spec.act), None)
        before = list(_machine_reasons(spec, device, libs))
        if dtype not in spec.dtypes:
            before.append(Reason(Why.DTYPE, f"computes in {_names(spec.dtypes)}, not {dtype}"))
        if act is None:
            text = f"quantises activations as {_names(spec.act)}; allowed: {_names(acts)}"
            before.append(Reason(Why.NUMERICS, text))
        after: tuple[Reason, ...] = ()
        if weight_format not in spec.formats:
            taken = frozenset().union(*(other.formats for other in own))
            after = (Reason(Why.FORMAT, f"takes {_names(taken)}, not {weight_format}"),)
        scales = _scale_form(spec, device, e8m0) if weight_format in spec.formats else ""
        found[backend] = _Kernel(spec, own, act, scales, tuple(before), after)
    return found


def _candidate(kernel: _Kernel, case: _Case) -> Candidate:
    problem, policy, forced, spec = case.problem, case.policy, case.forced, kernel.spec
    fit = case.fits[not spec.blocks]
    reasons = [*kernel.before, *_size_reasons(spec, problem, fit), *kernel.after]
    if case.libs.quarantined:
        reasons += _quarantine_reasons(spec, problem, case.libs)
    if kernel.scales not in ("", Scales.FLOAT32):
        reasons += _requant_reasons(spec, problem, case.device, policy, kernel.scales)
    if policy.requires_native and _is_not_native(spec, problem, kernel.act):
        how = "an emulation" if spec.is_emulation else "weight-only"
        reasons.append(Reason(Why.POLICY, f"--require-native, and this is {how}"))
    if forced is None or forced.backend != spec.backend:  # what is forced outranks exclusions
        exclusion = _exclusion(spec, problem, policy) if policy.exclusions else None
        if exclusion is not None:
            reasons.append(Reason(Why.POLICY, exclusion.origin.text))
    return Candidate(spec.backend, kernel.act, tuple(reasons), kernel.scales, fit)


def _size_reasons(spec: KernelSpec, problem: Problem, fit: Fit | None) -> list[Reason]:
    """Every requirement of `spec` on sizes that the problem does not meet."""
    reasons = []
    if isinstance(problem, LinearProblem):
        reasons = _linear_reasons(spec, problem, fit)
    elif isinstance(problem, MoEProblem):
        reasons = _moe_reasons(spec, problem, fit)
    if spec.check is not None:
        reasons += spec.check(problem)
    return reasons


def _machine_reasons(spec: KernelSpec, device: Device, libs: Libs) -> tuple[Reason, ...]:
    """What the chip and the libraries say against `spec`, whatever the problem."""
    reasons = []
    if device.family not in spec.devices and device.arch not in spec.devices:
        reasons.append(Reason(Why.DEVICE, f"runs on {_names(spec.devices)}, not on {device}"))
    build = libs.get(BUILD)
    made = {f"{spec.family}/{spec.backend}/{weight_format}" for weight_format in spec.formats}
    if build is not None and made.isdisjoint(build.archs):
        reasons.append(Reason(Why.LIBRARY, "backend not in this build"))
    for name, minimum in spec.libs:
        reasons += _lib_reasons(name, minimum, libs)
    reasons += missing_code(spec, device, libs)
    if spec.native_archs and not reasons:
        reasons += _native_reasons(spec, device, libs)
    return tuple(reasons)


def _lib_reasons(name: str, minimum: str, libs: Libs) -> list[Reason]:
    lib = libs.get(name)
    if lib is None:
        return [Reason(Why.LIBRARY, f"{name} is not installed")]
    if lib.broken:
        return [Reason(Why.LIBRARY, f"{name} is broken: {lib.broken}")]
    if minimum and lib.version and version_key(lib.version) < version_key(minimum):
        return [Reason(Why.LIBRARY, f"{name} {lib.version} is older than {minimum}")]
    return []


def _native_reasons(spec: KernelSpec, device: Device, libs: Libs) -> list[Reason]:
    """Our own CUDA kernel must have been compiled for an architecture that runs on the chip."""
    native = libs.get(NATIVE)
    if native is None or native.broken:
        return _lib_reasons(NATIVE, "", libs)
    wanted = [arch for arch in sorted(spec.native_archs) if serves(arch, device)]
    carried = {f"{kernel}/{arch}" for kernel in spec.native for arch in wanted}
    if not carried.isdisjoint(native.archs) or not set(wanted).isdisjoint(native.archs):
        return []
    text = f"this build has no {' or '.join(wanted)} code of {' or '.join(spec.native)}"
    return [Reason(Why.LIBRARY, text if wanted else f"has no code for {device}")]


def _quarantine_reasons(spec: KernelSpec, problem: Problem, libs: Libs) -> list[Reason]:
    """How this kernel failed here before, for this very problem."""
    keys = [problem.size_key]
    if isinstance(problem, LinearProblem):
        # What was entered before schemes of activations were in the key holds for all of them.
        keys.append(problem.size_key.rpartition(" ")[0])
    return [q.reason for q in libs.quarantined if q.backend == spec.backend and q.size_key in keys]


def _linear_reasons(spec: KernelSpec, problem: LinearProblem, fit: Fit | None) -> list[Reason]:
    reasons = []
    if problem.bias and not spec.takes_bias:
        reasons.append(Reason(Why.SHAPE, "takes no bias"))
    if spec.max_tokens is not None and problem.m_range[1] > spec.max_tokens:
        text = f"serves up to {spec.max_tokens} tokens, not {problem.m_range[1]}"
        reasons.append(Reason(Why.SHAPE, text))
    takes_groups = problem.weight.scale == "group" and problem.format in spec.formats
    if takes_groups and problem.k % problem.weight.block[1]:
        text = f"K = {problem.k} is not whole groups of {problem.weight.block[1]}"
        reasons.append(Reason(Why.SHAPE, text))
    if spec.blocks:
        reasons += _block_reasons(spec, problem.weight)
    n, k = fit.sizes if fit is not None else (problem.n, problem.k)
    for axis, size, align in (("N", n, spec.n_align), ("K", k, spec.k_align)):
        if size % align:
            reasons.append(Reason(Why.SHAPE, f"{axis} = {size} is not a multiple of {align}"))
    return reasons


def _moe_reasons(spec: KernelSpec, problem: MoEProblem, fit: Fit | None) -> list[Reason]:
    reasons = []
    if problem.layout not in spec.layouts:
        text = f"takes {_names(spec.layouts)} activations, not {problem.layout}"
        reasons.append(Reason(Why.SHAPE, text))
    if spec.blocks:
        reasons += _block_reasons(spec, problem.weight)
    inner, hidden = fit.sizes if fit is not None else (problem.intermediate, problem.hidden)
    for name, size in (("hidden", hidden), ("intermediate", inner)):
        if size % spec.k_align:
            text = f"{name} = {size} is not a multiple of {spec.k_align}"
            reasons.append(Reason(Why.SHAPE, text))
    return reasons


def _block_reasons(spec: KernelSpec, weight: WeightFormat) -> list[Reason]:
    if weight.scale != "block" or weight.block in spec.blocks:
        return []
    accepted = ", ".join(f"{rows}x{columns}" for rows, columns in sorted(spec.blocks))
    text = f"takes blocks of {accepted}, not {weight.block[0]}x{weight.block[1]}"
    return [Reason(Why.FORMAT, text)]


def _fit_of(problem: Problem, takes_any_block: bool) -> Fit | None:
    if isinstance(problem, LinearProblem) and problem.weight.scale == "block":
        return linear_fit(problem, takes_any_block)
    if isinstance(problem, MoEProblem) and problem.weight.scale == "block":
        return moe_fit(problem, takes_any_block)
    return None


def _is_not_native(spec: KernelSpec, problem: Problem, act: ActScheme | None) -> bool:
    wants_quantised = problem.act[0] is not ActScheme.NONE
    return spec.is_emulation or (wants_quantised and act is ActScheme.NONE)


# ---------------------------------------------------------------- numerics


def _scale_form(spec: KernelSpec, device: Device, e8m0: bool | None) -> str:
    """The form of scales this kernel would take on this chip under this policy."""
    forms = dict(spec.scales)
    form = forms.get(device.family) or forms.get("*") or ""
    if form == Scales.FLOAT32 and e8m0 and _depends_on_chip(spec):
        return Scales.FLOAT32_CEIL_UE8M0
    return form


def _depends_on_chip(spec: KernelSpec) -> bool:
    """Whether VLLM_USE_DEEP_GEMM_E8M0 speaks to this kernel: its scale form depends on the chip."""
    return "*" not in dict(spec.scales)


def _requant_reasons(
    spec: KernelSpec, problem: Problem, device: Device, policy: Policy, scales: str
) -> list[Reason]:
    """What speaks against re-quantising the weight to scales of the form `scales`."""
    if scales == Scales.UE8M0 and policy.e8m0 is False and _depends_on_chip(spec):
        text = f"takes UE8M0 scales only on {device.family}, and VLLM_USE_DEEP_GEMM_E8M0=0"
        return [Reason(Why.NUMERICS, text)]
    assert isinstance(problem, LinearProblem | MoEProblem)
    limit, error = policy.max_requant_error, problem.requant_error
    if limit is None or error is None or error <= limit:
        return []
    form = "scales of the activations' type" if scales == Scales.ACTIVATION else "UE8M0"
    text = f"re-quantising to {form} costs {error:.2%}, more than --max-requant-error {limit:.2%}"
    return [Reason(Why.NUMERICS, text)]


# ---------------------------------------------------------------- what was asked for


def is_meant(override: Override, layer: str, problem: Problem, specs: Iterable[KernelSpec]) -> bool:
    """Whether `override` speaks of this layer; `specs` are those of the problem's family.

    One that names a whole family means the formats its backend has a kernel for: forcing an FP8
    backend says nothing about an output projection in bf16.
    """
    if override.family != problem.family or not override.matches(layer):
        return False
    if override.pattern != "*":
        return True
    if override.formats:
        return problem.format in override.formats
    return any(problem.format in spec.formats for spec in specs if spec.backend == override.backend)


def _forced(
    problem: Problem, policy: Policy, layer: str, specs: Iterable[KernelSpec]
) -> Override | None:
    """The strongest override that means this layer."""
    matching = [o for o in policy.overrides if is_meant(o, layer, problem, specs)]
    strongest = min(matching, key=lambda override: override.origin.rank, default=None)
    for other in matching:
        assert strongest is not None
        if other.origin.rank == strongest.origin.rank and other.backend != strongest.backend:
            raise ConfigError(
                f"{strongest.origin.text} and {other.origin.text} both mean {layer}: narrow one"
            )
    return strongest


def _exclusion(spec: KernelSpec, problem: Problem, policy: Policy) -> Exclusion | None:
    """The strongest exclusion of this backend from this family."""
    matching = [
        exclusion
        for exclusion in policy.exclusions
        if exclusion.backend == spec.backend and exclusion.family == problem.family
    ]
    return min(matching, key=lambda exclusion: exclusion.origin.rank, default=None)


def _must_obey(forced: Override, policy: Policy, candidates: Sequence[Candidate]) -> bool:
    """False where the backend that is asked for cannot run, and the next may be taken for it."""
    wanted = next((c for c in candidates if c.backend == forced.backend), None)
    if wanted is None:
        return not policy.falls_back
    may_yield = policy.falls_back or all(r.why in forced.yields_to for r in wanted.reasons)
    return not (wanted.reasons and may_yield)


def _obeyed(
    problem: Problem, device: Device, forced: Override, candidates: Sequence[Candidate]
) -> Decision:
    """The forced backend, or nothing where it cannot run; all others are out."""
    reason = Reason(Why.POLICY, f"{forced.origin.text} asks for {forced.backend}")
    judged = tuple(
        c
        if c.backend == forced.backend
        else Candidate(c.backend, c.act, (*c.reasons, reason), c.scales, c.fit, c.parts)
        for c in candidates
    )
    can_run = any(c.backend == forced.backend and not c.reasons for c in candidates)
    chosen = forced.backend if can_run else None
    return Decision(problem, device, chosen, forced.origin, judged)


# ---------------------------------------------------------------- the decision


def _measured(
    timings: Timings,
    candidates: Sequence[Candidate],
    kernels: Mapping[str, _Kernel],
    case: _Case,
) -> list[tuple[Measured, Candidate]]:
    """The fastest split of what could run but for policy, then the fastest of what may run.

    Empty where the first in the default order was not measured: nothing is known to beat it.
    """
    if not isinstance(case.problem, LinearProblem | MoEProblem):
        return []
    timed = {backend for backend, _ in timings.us}
    judged: dict[str, Candidate] = {}
    could: list[tuple[str, int | None]] = []
    for candidate in candidates:
        limit = None
        if candidate.reasons and candidate.backend in timed:
            candidate, limit = _for_few_tokens(candidate, kernels[candidate.backend], case)
        if not candidate.reasons or all(r.why is Why.POLICY for r in candidate.reasons):
            could.append((candidate.backend, limit))
            judged[candidate.backend] = candidate
    may = [able for able in could if not judged[able[0]].reasons]
    compilers = {backend: kernels[backend].spec.compiles for backend, _ in could}
    compiling = tuple(name for cost in COMPILERS for name in compilers if compilers[name] == cost)
    alone = tuple(backend for backend, _ in could if kernels[backend].spec.repacks)
    found: dict[Parts, tuple[Measured, Candidate]] = {}
    for able in (could, may) if len(may) < len(could) else (may,):
        first = next((backend for backend, limit in able if limit is None), None)
        parts: Parts = ()
        if first in timed:
            m_range = case.problem.m_range
            parts = best_split(timings, tuple(able), m_range, compiling, alone)
        if parts:
            measured = Measured(parts, timings.source)
            found[parts] = measured, _split(measured, judged)
    return list(found.values())


def _for_few_tokens(
    candidate: Candidate, kernel: _Kernel, case: _Case
) -> tuple[Candidate, int | None]:
    """The candidate as judged for the most tokens that its kernel takes in a call, and how many;
    itself and None for a kernel that takes any number."""
    problem = case.problem
    if not isinstance(problem, LinearProblem):
        return candidate, None
    limits = [s.max_tokens for s in kernel.specs if s.max_tokens and problem.format in s.formats]
    if not limits or limits[0] >= problem.m_range[1]:
        return candidate, None
    few = replace(problem, m_range=(min(problem.m_range[0], limits[0]), limits[0]))
    return _candidate(kernel, case._replace(problem=few)), limits[0]


def _split(measured: Measured, judged: Mapping[str, Candidate]) -> Candidate:
    """One candidate of the kernels in `measured`, each as judged for the tokens it would serve."""
    parts = [judged[backend] for _, backend in measured.parts]
    if len(parts) == 1:
        return parts[0]
    reasons = tuple(
        Reason(reason.why, f"{part.backend}: {reason.text}")
        for part in dict.fromkeys(parts)
        for reason in part.reasons
    )
    scales = next((part.scales for part in parts if part.is_lossy), parts[-1].scales)
    return Candidate(measured.name, parts[-1].act, reasons, scales, parts[-1].fit, measured.parts)


def _first_free(candidates: Sequence[Candidate]) -> str | None:
    return next((c.backend for c in candidates if not c.reasons), None)


def _origin_of(
    chosen: str | None,
    candidates: Sequence[Candidate],
    policy: Policy,
    problem: Problem,
    measured: Sequence[Measured],
) -> Origin:
    """Who made the choice what it is.

    An exclusion did where it alone kept a better liked kernel from running; a kernel that could
    not have run anyway was kept away by nobody.
    """
    deciders = []
    for candidate in candidates:
        if candidate.backend == chosen:
            break
        if candidate.reasons and all(r.why is Why.POLICY for r in candidate.reasons):
            names = {candidate.backend, *(backend for _, backend in candidate.parts)}
            deciders += [
                exclusion.origin
                for exclusion in policy.exclusions
                if exclusion.family == problem.family and exclusion.backend in names
            ]
    if deciders:
        return min(deciders, key=lambda origin: origin.rank)
    evidence = next((one.evidence for one in measured if one.name == chosen), None)
    return DEFAULT_ORDER if evidence is None else Origin(RANK_MEASURED, f"measured: {evidence}")


def version_key(version: str) -> tuple[int, ...]:
    """`0.6.13.post1` -> (0, 6, 13, 1): enough order for release numbers."""
    digits = "".join(c if c.isdigit() else " " for c in version)
    return tuple(int(part) for part in digits.split())


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))
