"""The vocabulary of kernel selection: problems, devices, libraries, kernels, decisions.

Frozen values only, standard library only: a choice for any chip can be computed and explained
on a machine that has neither torch nor a GPU.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import ClassVar

from vllm.errors import ConfigError, VllmError
from vllm.platforms.interface import DeviceCapability


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
    """A chip: `cpu:avx2` (kind and instruction set) or `cuda:sm_121a` (kind and architecture)."""

    kind: str
    capability: DeviceCapability | None = None
    suffix: str = ""
    isa: str = ""

    @property
    def family(self) -> str:
        """`cpu` or `sm_<family>`: sm_121 is of family `sm_120`."""
        return f"sm_{self.capability.family}" if self.capability else self.kind

    @classmethod
    def parse(cls, text: str) -> "Device":
        """From `cpu`, `cpu:avx512`, `sm_90`, `cuda:sm_121a`."""
        if match := re.fullmatch(r"cpu(?::(portable|avx2|avx512))?", text):
            return cls("cpu", isa=match[1] or "")
        if match := re.fullmatch(r"(?:cuda:)?sm_?(\d{2,3})([af]?)", text):
            return cls("cuda", DeviceCapability.parse(int(match[1])), match[2])
        raise ConfigError(
            f"unknown device {text!r}: it takes cpu, cpu:avx2, sm_90, cuda:sm_121a and the like."
        )

    def __str__(self) -> str:
        if self.capability:
            return f"{self.kind}:sm_{self.capability.to_int()}{self.suffix}"
        return f"{self.kind}:{self.isa}" if self.isa else self.kind


@dataclass(frozen=True, slots=True)
class Lib:
    """State of one library: a version with the architectures it carries, or why it is broken."""

    name: str
    version: str = ""
    archs: tuple[str, ...] = ()
    broken: str = ""

    @classmethod
    def parse(cls, text: str) -> "Lib":
        """From `deep_gemm=2.6+sm120`, `flashinfer`, `deep_gemm=broken: its error`."""
        name, _, rest = text.partition("=")
        if rest.startswith("broken:"):
            return cls(name, broken=rest.removeprefix("broken:").strip())
        version, *archs = rest.lstrip("=").split("+")
        return cls(name, version, tuple(archs))

    def __str__(self) -> str:
        if self.broken:
            return f"{self.name}=broken: {self.broken}"
        version = "+".join((self.version, *self.archs))
        return f"{self.name}={version}" if version else self.name


@dataclass(frozen=True, slots=True)
class Libs:
    """The libraries of a machine; one that is not listed is absent. Order does not matter."""

    libs: frozenset[Lib] = frozenset()

    @classmethod
    def of(cls, libs: Iterable[Lib]) -> "Libs":
        return cls(frozenset(libs))

    def get(self, name: str) -> Lib | None:
        return next((lib for lib in self.libs if lib.name == name), None)

    def __str__(self) -> str:
        return ",".join(sorted(map(str, self.libs))) or "none"


# ---------------------------------------------------------------- what is to be computed


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight is stored: element type, and the granularity of its scales.

    `str()` is the short name used everywhere: `bf16`, `fp8-tensor`, `fp8-channel`,
    `fp8-block[128x128]` (rows x columns of a [N, K] weight that share one scale).
    """

    element: str
    scale: str = "none"
    block: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """The name without block sizes: what a kernel declares to support."""
        return self.element if self.scale == "none" else f"{self.element}-{self.scale}"

    @classmethod
    def parse(cls, text: str) -> "WeightFormat":
        if match := re.fullmatch(r"(\w+)-block\[(\d+)x(\d+)\]", text):
            return cls(match[1], "block", (int(match[2]), int(match[3])))
        if match := re.fullmatch(r"(\w+)-(tensor|channel)", text):
            return cls(match[1], match[2])
        if re.fullmatch(r"\w+", text):
            return cls(text)
        raise ConfigError(
            f"unknown weight format {text!r}: it takes bf16, fp8-tensor, fp8-channel, "
            f"fp8-block[128x128] and the like."
        )

    def __str__(self) -> str:
        return (
            f"{self.kind}[{self.block[0]}x{self.block[1]}]" if self.scale == "block" else self.kind
        )


class ActScheme(StrEnum):
    """How a kernel quantises its activations; NONE multiplies them as they are (weight-only)."""

    NONE = "none"
    STATIC_TENSOR = "static-tensor"
    DYNAMIC_TENSOR = "dynamic-tensor"
    DYNAMIC_TOKEN = "dynamic-token"
    DYNAMIC_GROUP128 = "dynamic-group128"


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """y[M, n] = x[M, k] @ W[n, k].T (+ bias), per rank.

    `act` lists the activation schemes the checkpoint allows, best liked first; `dtype` is that
    of x and y; `m_range` the token counts to expect.
    """

    family: ClassVar[str] = "linear"

    n: int
    k: int
    weight: WeightFormat
    act: tuple[ActScheme, ...] = (ActScheme.NONE,)
    dtype: str = "bf16"
    bias: bool = False
    m_range: tuple[int, int] = (1, 8192)

    @property
    def format(self) -> str:
        return self.weight.kind

    def __str__(self) -> str:
        return f"linear {self.weight}:{self.n}x{self.k} {self.dtype}" + (" bias" * self.bias)


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Causal attention over a paged KV cache; `format` is the element type of the cache."""

    family: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    format: str
    dtype: str = "bf16"
    sliding_window: int = 0

    act: ClassVar[tuple[ActScheme, ...]] = (ActScheme.NONE,)

    def __str__(self) -> str:
        window = f" window={self.sliding_window}" if self.sliding_window else ""
        return (
            f"attention {self.num_heads}/{self.num_kv_heads} heads of {self.head_dim} "
            f"{self.dtype}, {self.format} cache{window}"
        )


Problem = LinearProblem | AttentionProblem


# ---------------------------------------------------------------- what can compute it


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What one backend supports of one problem family, as data.

    `devices` are device families (`cpu`, `sm_90`, `sm_120`); `libs` the libraries it needs with
    the lowest version that works ("" for any). `check` is for what data cannot say and returns
    every reason against a problem.
    """

    backend: str
    family: str
    devices: frozenset[str]
    formats: frozenset[str]
    dtypes: frozenset[str]
    act: frozenset[ActScheme] = frozenset({ActScheme.NONE})
    libs: tuple[tuple[str, str], ...] = ()
    n_align: int = 1
    k_align: int = 1
    guarantees: frozenset[str] = frozenset()
    check: Callable[[Problem, Device, Libs], list[Reason]] | None = None


# ---------------------------------------------------------------- what was asked for


@dataclass(frozen=True, slots=True)
class Origin:
    """Who decided. Rank 1 is the strongest (see docs/kernels.md)."""

    rank: int
    text: str


DEFAULT_ORDER = Origin(7, "default order")


@dataclass(frozen=True, slots=True)
class Override:
    """`backend` is to serve the layers of `family` whose name matches the glob `pattern`."""

    family: str
    backend: str
    origin: Origin
    pattern: str = "*"


@dataclass(frozen=True, slots=True)
class Policy:
    overrides: tuple[Override, ...] = ()

    def forced(self, family: str, layer: str) -> Override | None:
        """The strongest override for this layer."""
        matching = [
            o for o in self.overrides if o.family == family and fnmatchcase(layer, o.pattern)
        ]
        return min(matching, key=lambda o: o.origin.rank, default=None)


# ---------------------------------------------------------------- what was decided


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that was considered; no reasons against it means it could run."""

    backend: str
    act: ActScheme | None
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for one problem, with every candidate in order of preference."""

    problem: Problem
    device: Device
    libs: Libs
    chosen: str | None
    origin: Origin
    candidates: tuple[Candidate, ...] = field(default=())

    @property
    def act(self) -> ActScheme:
        """The activation scheme of the chosen kernel."""
        chosen = next(c for c in self.candidates if c.backend == self.chosen)
        assert chosen.act is not None
        return chosen.act


class NoKernelError(VllmError):
    """No kernel can serve a problem, or the one that was forced cannot."""

    def __init__(self, message: str, decision: Decision):
        super().__init__(message)
        self.decision = decision
