"""The CPU platform: memory and threads of this machine, seen through its cgroup."""

import os
from contextlib import suppress
from pathlib import Path

from vllm.platforms.interface import Platform


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
    """Bytes that this process and those it starts may have: of the machine or of its cgroup."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _cgroup_value("memory.max") or total)


def available_memory() -> int:
    """Bytes this process may still take: the smaller of free RAM and the cgroup's remainder."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _cgroup_value(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
