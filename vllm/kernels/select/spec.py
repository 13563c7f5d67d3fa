"""The vocabulary of kernel selection: problems, devices, libraries, kernels, policy, decisions.

Frozen values only, standard library only: a choice for any chip can be computed and explained
on a machine that has neither torch nor a GPU.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vllm.errors import ConfigError, VllmError
from vllm.formats.weight_format import ActScheme
from vllm.kernels.select.problem import Problem
from vllm.platforms.interface import DeviceCapability

if TYPE_CHECKING:
    from vllm.kernels.select.fit import Fit


class Why(StrEnum):
    """What kind of fact rejects a candidate. Tests match on this, never on the text."""

    DEVICE = "device"
    LIBRARY = "library"
    FORMAT = "format"
    SHAPE = "shape"
    DTYPE = "dtype"
    POLICY = "policy"
    NUMERICS = "numerics"


@dataclass(frozen=True, slots=True)
class Reason:
    why: Why
    text: str

    def __str__(self) -> str:
        return f"{self.why}: {self.text}"


# ---------------------------------------------------------------- where it runs


@dataclass(frozen=True, slots=True)
class Device:
    """A chip: `cpu:avx2` (kind and instruction set) or `cuda:sm_121` (kind and architecture).

    An architecture suffix (`sm_121a`) is accepted and kept; it says nothing about the chip.
    """

    kind: str
    capability: DeviceCapability | None = None
    suffix: str = ""
    isa: str = ""

    @property
    def arch(self) -> str:
        """`cpu` or `sm_121`."""
        return f"sm_{self.capability.to_int()}" if self.capability else self.kind

    @property
    def family(self) -> str:
        """`cpu` or the capability family: 12.1 is of `sm_12x`, and never of `sm_10x`."""
        return f"sm_{self.capability.major}x" if self.capability else self.kind

    @classmethod
    def parse(cls, text: str) -> "Device":
        """From `cpu`, `cpu:avx512`, `sm_90`, `cuda:sm_121a`."""
        if match := re.fullmatch(r"cpu(?::(portable|avx2|avx512))?", text):
            return cls("cpu", isa=match[1] or "")
        if match := re.fullmatch(r"(?:cuda:)?sm_?(\d{2,3})([af]?)", text):
            return cls("cuda", DeviceCapability.parse(int(match[1])), match[2])
        raise ConfigError(
            f"unknown device {text!r}: it takes cpu, cpu:avx2, sm_90, cuda:sm_121a and the like"
        )

    def __str__(self) -> str:
        if self.capability:
            return f"{self.kind}:{self.arch}{self.suffix}"
        return f"{self.kind}:{self.isa}" if self.isa else self.kind


def serves(arch: str, device: Device) -> bool:
    """Whether code compiled for `arch` runs on the chip: `121a` on 12.1 alone, `120f` on 12.0 and
    12.1, a plain `80` on 8.0 and later of the same major version."""
    if device.capability is None:
        return False
    number, chip = int(arch.rstrip("af")), device.capability.to_int()
    if arch.endswith("a"):
        return chip == number
    return chip // 10 == number // 10 and chip >= number


@dataclass(frozen=True, slots=True)
class Lib:
    """State of one library: a version with the architectures it carries, or why it is broken.

    builds: `kernel:build id` where a version alone does not say which code it is.
    """

    name: str
    version: str = ""
    archs: tuple[str, ...] = ()
    broken: str = ""
    builds: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Lib":
        """From `deep_gemm=2.6+sm120`, `flashinfer==0.6.13`, `deep_gemm=broken: its error`."""
        name, _, rest = text.partition("=")
        if not re.fullmatch(r"\w[\w-]*", name):
            raise ConfigError(
                f"{text!r} is no library: it takes a name with an optional version and what it "
                f"carries, as deep_gemm==2.6+sm120"
            )
        if rest.startswith("broken:"):
            return cls(name, broken=rest.removeprefix("broken:").strip())
        version, *items = rest.lstrip("=").split("+")
        archs = tuple(item for item in items if ":" not in item)
        return cls(name, version, archs, builds=tuple(item for item in items if ":" in item))

    def __str__(self) -> str:
        if self.broken:
            return f"{self.name}=broken: {self.broken}"
        version = "+".join((self.version, *self.archs, *self.builds))
        return f"{self.name}={version}" if version else self.name


# What this build itself holds, as libraries: the native library with what it was compiled for
# (`kernel/90a`, or `90a` for every kernel), and the kernels whose code is here, as
# `family/backend/format`.
NATIVE = "native"
BUILD = "build"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A kernel that failed when it was tried here, for one `size_key` of its problems."""

    backend: str
    size_key: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Libs:
    """The libraries of a machine; one that is not listed is absent. Order does not matter.

    Where `build` is not listed, every declared backend counts as built. quarantined: kernels that
    failed on this machine with these very libraries.
    """

    libs: frozenset[Lib] = frozenset()
    quarantined: frozenset[Quarantined] = frozenset()

    @classmethod
    def of(cls, libs: Iterable[Lib]) -> "Libs":
        """ConfigError where one name comes with two states."""
        states = frozenset(libs)
        names = [lib.name for lib in states]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"library {twice[0]!r} is given twice: leave one out")
        return cls(states)

    @classmethod
    def parse(cls, text: str) -> "Libs":
        """From what `str` gives: `deep_gemm=2.6+sm120,triton`, `none`."""
        parts = re.split(r",(?=\w[\w-]*(?:=|,|$))", text)
        return cls.of([] if text == "none" else [Lib.parse(part) for part in parts])

    def get(self, name: str) -> Lib | None:
        return next((lib for lib in self.libs if lib.name == name), None)

    def __str__(self) -> str:
        return ",".join(sorted(map(str, self.libs))) or "none"


# ---------------------------------------------------------------- what can compute it


class Scales(StrEnum):
    """In which form a kernel takes scales of weights (see NUMERICS in docs/kernels.md); ACTIVATION:
    in the type of the activations."""

    FLOAT32 = "float32"
    FLOAT32_CEIL_UE8M0 = "float32-ceil-ue8m0"
    UE8M0 = "ue8m0"
    ACTIVATION = "activation-type"


COMPILERS = ("flashinfer", "humming", "nvcc", "triton")
"""Values of `KernelSpec.compiles`, by the seconds that a kernel costs: tens, several kernels of
nvcc's for every size of a weight, three, one."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """What one kernel of a backend supports of one problem family, as data; compared by identity.

    A backend may have several per family, for different formats. devices: families (`sm_9x`) or
    single chips (`sm_89`). libs: names and lowest versions ("" for any). native_archs: what our
    own CUDA kernel `native` (its name in arch_manifest.json) is compiled for; the native library
    must carry one that serves the chip. carries:
    (device family, library, architecture): on that family the library must list that architecture.
    prebuilt: (device family or chip, library, module): there the library must list that module,
    which takes too long to build at a first call.
    blocks: scale blocks of `-block` formats it takes; empty for any. scales: form of scales by
    device family. layouts: activation layouts of a MoE kernel. max_tokens: most tokens of a call,
    None for any number. compiles: which of COMPILERS makes its kernels where they run, "" for one
    that is built ahead of time. repacks: it keeps the weight in a layout of its own, so that no
    other kernel can share it. waits: on a GPU the host waits for it in each call, so that no CUDA
    graph can hold a step with it. check: for what data cannot say.
    """

    backend: str
    family: str
    devices: frozenset[str]
    formats: frozenset[str]
    dtypes: frozenset[str]
    act: frozenset[ActScheme] = frozenset({ActScheme.NONE})
    libs: tuple[tuple[str, str], ...] = ()
    native: tuple[str, ...] = ()
    native_archs: frozenset[str] = frozenset()
    carries: tuple[tuple[str, str, str], ...] = ()
    prebuilt: tuple[tuple[str, str, str], ...] = ()
    blocks: frozenset[tuple[int, int]] = frozenset()
    scales: tuple[tuple[str, Scales], ...] = ()
    n_align: int = 1
    k_align: int = 1
    max_tokens: int | None = None
    compiles: str = ""
    repacks: bool = False
    waits: bool = False
    layouts: frozenset[str] = frozenset({"standard"})
    takes_bias: bool = True
    is_emulation: bool = False
    guarantees: frozenset[str] = frozenset()
    check: Callable[[Problem], list[Reason]] | None = None


def missing_code(spec: KernelSpec, device: Device, libs: Libs) -> list[Reason]:
    """What libraries that work here lack of what `spec` wants of them on this chip."""
    here = {lib.name: lib for lib in libs.libs if not lib.broken}
    reasons = []
    for family, name, arch in spec.carries:
        if family == device.family and name in here and arch not in here[name].archs:
            version = here[name].version or "(any version)"
            reasons.append(Reason(Why.DEVICE, f"{name} {version} carries no {arch} kernels"))
    for chips, name, module in spec.prebuilt:
        is_meant = chips in (device.family, device.arch) and name in here
        if is_meant and module not in here[name].archs:
            command = f"python -m vllm.kernels.jit.{name} {module}"
            reasons.append(Reason(Why.LIBRARY, f"{name} has no {module} yet: {command} builds it"))
    return reasons


# ---------------------------------------------------------------- what was asked for


@dataclass(frozen=True, slots=True)
class Origin:
    """Who decided. Rank 1 is the strongest (docs/kernels.md lists the ranks)."""

    rank: int
    text: str


RANK_LAYER, RANK_FLAG, RANK_VARIABLE, RANK_CONFIG, RANK_MODEL_RULE, RANK_MEASURED = range(1, 7)
DEFAULT_ORDER = Origin(7, "default order")


@dataclass(frozen=True, slots=True)
class Override:
    """`backend` is to serve the layers of `family` whose name matches the glob `pattern`.

    formats: only problems in these weight formats are meant; empty for all that the backend has a
    kernel for. yields_to: a layer that the backend cannot take for these kinds of reasons alone
    goes to the next kernel, with the reasons recorded.
    """

    family: str
    backend: str
    origin: Origin
    pattern: str = "*"
    formats: frozenset[str] = frozenset()
    yields_to: frozenset[Why] = frozenset()

    def matches(self, layer: str) -> bool:
        return self.pattern == "*" or fnmatchcase(layer, self.pattern)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """`backend` is not to serve `family`."""

    family: str
    backend: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that was asked for. e8m0: VLLM_USE_DEEP_GEMM_E8M0, None for automatic.

    max_requant_error: most relative Frobenius error that re-quantising a weight may cause.
    """

    overrides: tuple[Override, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    falls_back: bool = False
    requires_native: bool = False
    e8m0: bool | None = None
    max_requant_error: float | None = None


# ---------------------------------------------------------------- what was measured


@dataclass(frozen=True, slots=True)
class Timings:
    """What was measured for one problem on one kind of chip.

    us: by backend, microseconds of one call with as many rows as the entry of `tokens` (ascending)
    says; None where that was not measured. source: which table says so, and how old it is. stale:
    (backend, what was measured, what is here) where that is another version or build.
    """

    source: str
    tokens: tuple[int, ...]
    us: tuple[tuple[str, tuple[float | None, ...]], ...]
    stale: tuple[tuple[str, str, str], ...] = ()


Parts = tuple[tuple[int | None, str], ...]
"""(largest M, backend), ascending; the last has None for no limit."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The backends that measured fastest for one problem, split by the number of tokens."""

    parts: Parts
    evidence: str

    @property
    def name(self) -> str:
        """`skinny<=16|deep_gemm`."""
        return "|".join(
            backend if limit is None else f"{backend}<={limit}" for limit, backend in self.parts
        )


# ---------------------------------------------------------------- what was decided


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that was considered; no reasons against it means it could run.

    scales: the form of block scales it would take, "" where that does not matter. fit: how it
    takes scale blocks that a shard cuts. parts: of a split, (largest M, backend).
    """

    backend: str
    act: ActScheme | None
    reasons: tuple[Reason, ...] = ()
    scales: str = ""
    fit: "Fit | None" = None
    parts: Parts = ()

    @property
    def is_lossy(self) -> bool:
        """Whether its scale form may re-round weights that are quantised already."""
        return self.scales not in ("", Scales.FLOAT32)


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for one problem, with every candidate in order of preference.

    timings: what a table says about this problem on this chip, None where nobody measured.
    is_emulated: `device` is not at hand; the chosen kernel's numbers are computed on what is.
    """

    problem: Problem
    device: Device
    chosen: str | None
    origin: Origin
    candidates: tuple[Candidate, ...] = field(default=())
    timings: Timings | None = None
    is_emulated: bool = False

    @property
    def kernel(self) -> str | None:
        """The chosen one for people, with the chip whose numbers it computes where that is far."""
        is_far = self.is_emulated and self.chosen is not None
        return f"{self.chosen} of {self.device}, emulated" if is_far else self.chosen

    @property
    def winner(self) -> Candidate:
        """The chosen candidate; only where there is one."""
        return next(c for c in self.candidates if c.backend == self.chosen)


class NoKernelError(VllmError):
    """No kernel can serve a problem, or the one that was forced cannot."""

    def __init__(self, message: str, decision: Decision):
        super().__init__(message)
        self.decision = decision

    def __reduce__(self) -> tuple[type["NoKernelError"], tuple[str, Decision]]:
        """A process that fails can hand it to the one that started it."""
        return type(self), (str(self), self.decision)
