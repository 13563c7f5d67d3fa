"""The CPU platform: memory and threads of this machine, seen through its cgroup."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm.platforms.interface import Platform

_CGROUPS = Path("/sys/fs/cgroup")
# Version 1 writes the largest number of pages for "no limit".
_UNLIMITED = 1 << 60


class CpuPlatform(Platform):
    device_type = "cpu"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """As its vendor calls it; "CPU" where Linux does not say."""
    return _cpuinfo("model name") or "CPU"


def cpu_flags() -> list[str]:
    """Extensions of its instruction set, as Linux names them."""
    return _cpuinfo("flags").split()


def _cpuinfo(name: str) -> str:
    """Of the first core; "" where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


def memory_limit() -> int:
    """Bytes that this process and those it starts may have: of the machine or of its cgroups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((total, *(limit for limit, _ in _cgroup_limits())))


def available_memory() -> int:
    """Bytes this process may still take: the least of free RAM, what its cgroups leave, and its
    own limit of address space (ulimit -v)."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    left = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min((free, *left, *_left_of_address_space()))


def _left_of_address_space() -> list[int]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return []
    with suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        return [max(0, soft - used)]
    return []


def _cgroup_limits() -> list[tuple[int, int]]:
    """Limit and use in bytes of every cgroup with a limit that this process is in, those above it
    included: version 2, and the memory controller of version 1."""
    found = []
    for folder, limit_name, used_name in _cgroup_folders():
        limit, used = _cgroup_value(folder / limit_name), _cgroup_value(folder / used_name)
        if limit is not None and used is not None:
            # Pages of files count as used, and are given back for others.
            found.append((limit, max(0, used - _reclaimable(folder))))
    return found


def _cgroup_folders() -> Iterator[tuple[Path, str, str]]:
    """Folders with the names of the files of limit and use."""
    own = {2: "/", 1: "/"}
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                own[2] = path
            elif "memory" in controllers.split(","):
                own[1] = path
    for root, path, names in (
        (_CGROUPS, own[2], ("memory.max", "memory.current")),
        (_CGROUPS / "memory", own[1], ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        # In a container its own group is the root, whatever its path is called outside.
        place = root / path.strip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(root) and (folder / names[0]).exists():
                yield folder, *names


def _reclaimable(folder: Path) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def _cgroup_value(path: Path) -> int | None:
    """None for no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None
