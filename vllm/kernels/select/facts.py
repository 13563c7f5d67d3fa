"""Facts about a machine: its chip and its libraries, as printable values that parse back."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vllm.errors import ConfigError
from vllm.kernels.select.reason import Reason
from vllm.utils.capability import DeviceCapability


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
    return chip == number if arch.endswith("a") else number <= chip < number // 10 * 10 + 10


# This build, as two libraries: the native library with what it was compiled for (`kernel/90a`, or
# `90a` for every kernel), and the kernels that have code here (`family/backend/format`).
NATIVE = "native"
BUILD = "build"


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


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A kernel that failed when it was tried here, for one `size_key` of its problems."""

    backend: str
    size_key: str
    reason: Reason


@dataclass(frozen=True, slots=True)
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

    @classmethod
    def parse(cls, text: str) -> "Libs":
        """From what `str` gives: `deep_gemm=2.6+sm120,triton`, `none`."""
        parts = re.split(r",(?=\w[\w-]*(?:=|,|$))", text)
        return cls.of([] if text == "none" else [Lib.parse(part) for part in parts])

    def get(self, name: str) -> Lib | None:
        return next((lib for lib in self.libs if lib.name == name), None)

    def __str__(self) -> str:
        return ",".join(sorted(map(str, self.libs))) or "none"
