"""`select`: the one place where a kernel is chosen. Pure: no torch, environment, clock, globals."""

from collections.abc import Iterable

from vllm.kernels.spec import (
    DEFAULT_ORDER,
    Candidate,
    Decision,
    Device,
    KernelSpec,
    Libs,
    LinearProblem,
    Policy,
    Problem,
    Reason,
    Why,
)


def select(
    problem: Problem,
    device: Device,
    libs: Libs,
    policy: Policy,
    specs: Iterable[KernelSpec],
    layer: str = "",
) -> Decision:
    """Chooses the first of `specs` that nothing speaks against; keeps all reasons.

    A forced backend is either chosen or the decision has `chosen=None`: it never falls back.
    """
    forced = policy.forced(problem.family, layer)
    candidates = []
    for spec in specs:
        if spec.family != problem.family:
            continue
        reasons = unmet(spec, problem, device, libs)
        if forced and spec.backend != forced.backend:
            reasons.append(Reason(Why.POLICY, f"{forced.origin.text} asks for {forced.backend}"))
        act = next((scheme for scheme in problem.act if scheme in spec.act), None)
        candidates.append(Candidate(spec.backend, act, tuple(reasons)))
    chosen = next((c.backend for c in candidates if not c.reasons), None)
    origin = forced.origin if forced else DEFAULT_ORDER
    return Decision(problem, device, libs, chosen, origin, tuple(candidates))


def unmet(spec: KernelSpec, problem: Problem, device: Device, libs: Libs) -> list[Reason]:
    """Every requirement of `spec` that the problem, the device or the libraries do not meet."""
    reasons = []
    if device.family not in spec.devices:
        reasons.append(Reason(Why.DEVICE, f"runs on {_names(spec.devices)}, not on {device}"))
    for name, minimum in spec.libs:
        reasons += _lib_reasons(name, minimum, libs)
    if problem.format not in spec.formats:
        reasons.append(Reason(Why.FORMAT, f"takes {_names(spec.formats)}, not {problem.format}"))
    if problem.dtype not in spec.dtypes:
        reasons.append(Reason(Why.DTYPE, f"computes in {_names(spec.dtypes)}, not {problem.dtype}"))
    if not any(scheme in spec.act for scheme in problem.act):
        reasons.append(
            Reason(
                Why.NUMERICS,
                f"quantises activations as {_names(spec.act)}; allowed: {_names(problem.act)}",
            )
        )
    if isinstance(problem, LinearProblem):
        for axis, size, align in (("N", problem.n, spec.n_align), ("K", problem.k, spec.k_align)):
            if size % align:
                reasons.append(Reason(Why.SHAPE, f"{axis} = {size} is not a multiple of {align}"))
    if spec.check:
        reasons += spec.check(problem, device, libs)
    return reasons


def _lib_reasons(name: str, minimum: str, libs: Libs) -> list[Reason]:
    lib = libs.get(name)
    if lib is None:
        return [Reason(Why.LIBRARY, f"{name} is not installed")]
    if lib.broken:
        return [Reason(Why.LIBRARY, f"{name} is broken: {lib.broken}")]
    if minimum and version_key(lib.version) < version_key(minimum):
        return [Reason(Why.LIBRARY, f"{name} {lib.version} is older than {minimum}")]
    return []


def version_key(version: str) -> tuple[int, ...]:
    """`0.6.13.post1` -> (0, 6, 13, 1): enough order for release numbers."""
    digits = "".join(c if c.isdigit() else " " for c in version)
    return tuple(int(part) for part in digits.split())


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))
