"""Versions of libraries that are known to hang, or to compute what they should not."""

from collections.abc import Iterator
from typing import Any

from vllm.machine import Device, Lib, Libs
from vllm.utils.dataclasses import dataclass
from vllm.utils.versions import version_key


@dataclass(frozen=True)
class KnownBad:
    """Versions of a library that hang, or compute what they should not.

    since, until: of the first bad and the first good version, "" for open. revision: of the
    library's source, where no version says it. chips: families or single ones, empty for all.
    beside: (library, since, until) that must be there too. source: who says so.
    """

    lib: str
    what: str
    source: str
    since: str = ""
    until: str = ""
    revision: str = ""
    chips: tuple[str, ...] = ()
    beside: tuple[tuple[str, str, str], ...] = ()

    def text(self, device: Device, libs: Libs) -> str:
        """What is known against the library here; "" for nothing, as where no version is known."""
        lib = libs.get(self.lib)
        is_meant = not self.chips or {device.family, device.arch} & set(self.chips)
        if lib is None or not is_meant or not self._means(lib):
            return ""
        others = [(libs.get(name), since, until) for name, since, until in self.beside]
        if not all(other and _is_within(other.version, *span) for other, *span in others):
            return ""
        version = self.revision or lib.version
        beside = "".join(f" with {other}" for other, *_ in others).replace("=", " ")
        return f"{self.lib} {version}{beside} {self.what} ({self.source})"

    def _means(self, lib: Lib) -> bool:
        if self.revision:
            return self.revision in lib.archs
        return _is_within(lib.version, self.since, self.until)


def _is_within(version: str, since: str, until: str) -> bool:
    key = version_key(version)
    return bool(key) and key >= version_key(since) and (not until or key < version_key(until))


def known_bad_of(entries: list[dict[str, Any]]) -> Iterator[KnownBad]:
    """From JSON objects with the fields of KnownBad."""
    for entry in entries:
        yield KnownBad(**{name: _frozen(value) for name, value in entry.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
