"""Facts about a machine: its chip and its libraries, as printable values that parse back."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from vllm.errors import ConfigError
from vllm.utils.dataclasses import dataclass


class DeviceCapability(NamedTuple):
    """CUDA compute capability; comparable with a plain tuple."""

    major: int
    minor: int

    def to_int(self) -> int:
        """`major * 10 + minor`: 90 for 9.0, 121 for 12.1."""
        return self.major * 10 + self.minor

    @property
    def family(self) -> int:
        """`capability // 10 * 10`: 12.1 belongs to family 120 and never to family 100."""
        return self.major * 10

    @classmethod
    def parse(cls, capability: "int | tuple[int, int]") -> "DeviceCapability":
        """From 90, 121 or (9, 0)."""
        return cls(*(capability if isinstance(capability, tuple) else divmod(capability, 10)))

    def runs(self, arch: str) -> bool:
        """Whether code compiled for `arch` runs here: `121a` on 12.1 alone, `120f` on 12.0 and
        12.1, a plain `80` on 8.0 and later of the same major version."""
        number, chip = int(arch.rstrip("af")), self.to_int()
        return chip == number if arch.endswith("a") else number <= chip < number // 10 * 10 + 10

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True)
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

    def runs(self, arch: str) -> bool:
        """Whether code compiled for the CUDA architecture `arch` runs on this chip."""
        return self.capability is not None and self.capability.runs(arch)

    @classmethod
    def parse(cls, text: str) -> "Device":
        """From `cpu`, `cpu:avx512`, `sm_90`, `cuda:sm_121a`."""
        if match := re.fullmatch(r"cpu(?::(portable|avx2|avx512|avx512_bf16))?", text):
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


# Chips that exist, and GPUs that have them.
CHIPS = {
    "sm_70": "V100",
    "sm_75": "T4, RTX 20xx",
    "sm_80": "A100, A800, A30",
    "sm_86": "A10, A40, RTX A6000, RTX 30xx",
    "sm_87": "Jetson Orin",
    "sm_89": "L4, L20, L40, L40S, RTX 6000 Ada, RTX 40xx",
    "sm_90": "H100, H200, H20, H800, GH200",
    "sm_100": "B200, GB200",
    "sm_103": "B300, GB300",
    "sm_110": "Jetson Thor",
    "sm_120": "RTX 50xx, RTX PRO 6000",
    "sm_121": "GB10, DGX Spark",
}

# This build, as two libraries: the native library with what it was compiled for (`kernel/90a`, or
# `90a` for every kernel), and the kernels that have code here (`family/backend/format`).
NATIVE = "native"
BUILD = "build"


@dataclass(frozen=True)
class Lib:
    """State of one library: a version with the architectures it carries, or why it is broken.

    builds: `kernel:build id` where a version alone does not say which code it is.
    """

    name: str
    version: str = ""
    archs: tuple[str, ...] = ()
    broken: str = ""
    builds: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.broken:
            return f"{self.name}=broken: {self.broken}"
        version = "+".join((self.version, *self.archs, *self.builds))
        return f"{self.name}={version}" if version else self.name


@dataclass(frozen=True)
class Quarantined:
    """A kernel that failed when it was tried here, for one `size_key` of its problems.

    why, text: of the Reason that the selector gives.
    """

    backend: str
    size_key: str
    why: str
    text: str


@dataclass(frozen=True)
class Libs:
    """The libraries of a machine in any order; one that is not listed is absent.

    Where `build` is not listed, every declared backend counts as built. quarantined: kernels that
    failed on this machine with these libraries.
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

    def get(self, name: str) -> Lib | None:
        return next((lib for lib in self.libs if lib.name == name), None)

    def __str__(self) -> str:
        return ",".join(sorted(map(str, self.libs))) or "none"


def arch_key(arch: str) -> tuple[int, str]:
    """Orders `90a` before `100f`."""
    return int("".join(filter(str.isdecimal, arch)) or 0), arch
