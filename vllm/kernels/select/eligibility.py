"""What speaks against a kernel: the machine, the problem's sizes, and numerics."""

from collections.abc import Iterable, Iterator

from vllm.formats.act_scheme import ActScheme
from vllm.formats.partial_blocks import Fit
from vllm.formats.scales import Requant, Scales, estimated
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import (
    LinearProblem,
    MoEProblem,
    Problem,
    Traits,
    WeightProblem,
    traits_of,
)
from vllm.kernels.select.reason import RANK_VARIABLE, Origin, Reason, Why
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import BUILD, NATIVE, Device, Libs
from vllm.utils.versions import version_key


def is_meant(spec: KernelSpec, device: Device) -> bool:
    """Whether the kernel was written for this chip."""
    return device.family in spec.devices or device.arch in spec.devices


def machine_reasons(spec: KernelSpec, device: Device, libs: Libs) -> list[Reason]:
    """What the chip and the libraries say against `spec`, whatever the problem."""
    reasons = []
    if not is_meant(spec, device):
        reasons.append(Reason(Why.DEVICE, f"runs on {names(spec.devices)}, not on {device}"))
    build = libs.get(BUILD)
    made = {f"{spec.family}/{spec.backend}/{weight_format}" for weight_format in spec.formats}
    if build is not None and made.isdisjoint(build.archs):
        reasons.append(Reason(Why.LIBRARY, "backend not in this build"))
    for name, minimum in spec.libs:
        reasons += _lib_reasons(name, minimum, libs)
    reasons += missing_code(spec, device, libs)
    bad = (one.text(device, libs) for one in spec.known_bad)
    reasons += [Reason(Why.LIBRARY, text) for text in bad if text]
    if spec.native_archs and not reasons:
        reasons += _native_reasons(spec, device, libs)
    return reasons


def missing_code(spec: KernelSpec, device: Device, libs: Libs) -> Iterator[Reason]:
    """What libraries that work here lack of what `spec` needs of them on this chip."""
    here = {lib.name: lib for lib in libs.libs if not lib.broken}
    for family, name, arch in spec.carries:
        if family == device.family and name in here and arch not in here[name].archs:
            version = here[name].version or "(any version)"
            yield Reason(Why.DEVICE, f"{name} {version} carries no {arch} kernels")
    for chips, name, module in spec.prebuilt:
        is_meant = chips in (device.family, device.arch) and name in here
        if is_meant and module not in here[name].archs:
            command = f"python -m vllm.kernels.jit.{name} {module}"
            yield Reason(Why.LIBRARY, f"{name} has no {module} yet: {command} builds it")


def _lib_reasons(name: str, minimum: str, libs: Libs) -> Iterator[Reason]:
    lib = libs.get(name)
    if lib is None:
        yield Reason(Why.LIBRARY, f"{name} is not installed")
    elif lib.broken:
        yield Reason(Why.LIBRARY, f"{name} is broken: {lib.broken}")
    elif minimum and lib.version and version_key(lib.version) < version_key(minimum):
        yield Reason(Why.LIBRARY, f"{name} {lib.version} is older than {minimum}")


def _native_reasons(spec: KernelSpec, device: Device, libs: Libs) -> Iterable[Reason]:
    """Our own CUDA kernel must have been compiled for an architecture that runs on the chip."""
    native = libs.get(NATIVE)
    if native is None or native.broken:
        return _lib_reasons(NATIVE, "", libs)
    wanted = [arch for arch in sorted(spec.native_archs) if device.runs(arch)]
    carried = {f"{kernel}/{arch}" for kernel in spec.native for arch in wanted}
    if not carried.isdisjoint(native.archs) or not set(wanted).isdisjoint(native.archs):
        return ()
    text = f"this build has no {' or '.join(wanted)} code of {' or '.join(spec.native)}"
    return (Reason(Why.LIBRARY, text if wanted else f"has no code for {device}"),)


def quarantine_reasons(spec: KernelSpec, problem: Problem, libs: Libs) -> list[Reason]:
    """How this kernel failed here before, for this very problem."""
    keys = [problem.size_key]
    if isinstance(problem, LinearProblem):
        # Entries from before activation schemes were in the key hold for all of them.
        keys.append(problem.size_key.rpartition(" ")[0])
    own = (q for q in libs.quarantined if q.backend == spec.backend and q.size_key in keys)
    return [Reason(Why(q.why), q.text) for q in own]


def problem_reasons(spec: KernelSpec, problem: Problem, fit: Fit | None) -> list[Reason]:
    """Every requirement of `spec` that the problem does not meet."""
    return trait_reasons(spec, traits_of(problem)) + size_reasons(spec, problem, fit)


def trait_reasons(spec: KernelSpec, traits: Traits) -> list[Reason]:
    """The same but for sizes."""
    reasons = []
    if traits.family == LinearProblem.family:
        if traits.bias and not spec.takes_bias:
            reasons.append(Reason(Why.SHAPE, "takes no bias"))
        if spec.max_tokens is not None and traits.most_tokens > spec.max_tokens:
            text = f"serves up to {spec.max_tokens} tokens, not {traits.most_tokens}"
            reasons.append(Reason(Why.SHAPE, text))
    if traits.family == MoEProblem.family:
        if traits.layout not in spec.layouts:
            text = f"takes {names(spec.layouts)} activations, not {traits.layout}"
            reasons.append(Reason(Why.SHAPE, text))
        if traits.activation not in spec.activation_functions:
            functions = names(spec.activation_functions)
            text = f"computes experts with {functions}, not {traits.activation}"
            reasons.append(Reason(Why.NUMERICS, text))
        if traits.bias and not spec.takes_expert_bias:
            reasons.append(Reason(Why.NUMERICS, "takes no biases of experts"))
    if others := traits.variants - spec.variants:
        reasons.append(Reason(Why.NUMERICS, f"computes plain attention, not {names(others)}"))
    if spec.blocks and traits.scale == "block" and traits.block not in spec.blocks:
        accepted = ", ".join(f"{rows}x{columns}" for rows, columns in sorted(spec.blocks))
        text = f"takes blocks of {accepted}, not {traits.block[0]}x{traits.block[1]}"
        reasons.append(Reason(Why.FORMAT, text))
    return reasons


def size_reasons(spec: KernelSpec, problem: Problem, fit: Fit | None) -> list[Reason]:
    """Every requirement of `spec` on sizes that the problem does not meet."""
    reasons: list[Reason] = []
    if isinstance(problem, LinearProblem):
        n, k = fit.sizes if fit is not None else problem.sizes
        weight = problem.weight
        if weight.scale == "group" and problem.k % weight.block[1] and weight.kind in spec.formats:
            text = f"K = {problem.k} is not whole groups of {weight.block[1]}"
            reasons.append(Reason(Why.SHAPE, text))
        if n % spec.n_align or k % spec.k_align:
            reasons += _unaligned(("N", n, spec.n_align), ("K", k, spec.k_align))
    elif isinstance(problem, MoEProblem):
        inner, hidden = fit.sizes if fit is not None else problem.sizes
        align = spec.k_align
        if inner % align or hidden % align:
            reasons += _unaligned(("hidden", hidden, align), ("intermediate", inner, align))
    return reasons if spec.check is None else reasons + spec.check(problem)


def _unaligned(*sizes: tuple[str, int, int]) -> Iterator[Reason]:
    """sizes: (name, size, what it has to be a multiple of)."""
    for name, size, align in sizes:
        if size % align:
            yield Reason(Why.SHAPE, f"{name} = {size} is not a multiple of {align}")


def is_native(spec: KernelSpec, problem: Problem, act: ActScheme | None) -> bool:
    """No emulation, and not weight-only where activations are to be quantised."""
    wants_quantised = problem.act[0] is not ActScheme.NONE
    return not spec.is_emulation and not (wants_quantised and act is ActScheme.NONE)


def scale_form(spec: KernelSpec, device: Device, e8m0: bool | None) -> str:
    """The form of scales this kernel would take on this chip under this policy."""
    forms = dict(spec.scales)
    form = forms.get(device.family) or forms.get("*") or ""
    if form == Scales.FLOAT32 and e8m0 and _depends_on_chip(spec):
        return Scales.FLOAT32_CEIL_UE8M0
    return form


def _depends_on_chip(spec: KernelSpec) -> bool:
    """Whether VLLM_USE_DEEP_GEMM_E8M0 speaks to this kernel: its scale form depends on the chip."""
    return "*" not in dict(spec.scales)


def requant_of(problem: WeightProblem, scales: str) -> Requant:
    """What scales of the form `scales`, another than the stored one, cost this weight: as known of
    it, else as estimated."""
    known = problem.requant_error
    return estimated(scales, problem.dtype) if known is None else Requant(known)


def requant_reasons(
    spec: KernelSpec, device: Device, policy: Policy, scales: str, requant: Requant
) -> Iterator[Reason]:
    """What was asked for that speaks against bringing the weight to scales of the form `scales`."""
    if scales == Scales.UE8M0 and policy.e8m0 is False and _depends_on_chip(spec):
        origin = Origin(RANK_VARIABLE, "VLLM_USE_DEEP_GEMM_E8M0=0")
        text = f"takes UE8M0 scales only on {device.family}, and {origin.text}"
        yield Reason(Why.NUMERICS, text, origin)
        return
    form = "scales of the activations' type" if scales == Scales.ACTIVATION else "UE8M0"
    grade = " (estimated from the format)" if requant.is_estimated else ""
    for budget in policy.budgets:
        if requant.error > budget.error and (not budget.forms or scales in budget.forms):
            text = f"re-quantising to {form} costs {requant.error:.2%}{grade}"
            yield Reason(Why.NUMERICS, f"{text}: {budget.origin.text}", budget.origin)


def names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))
