"""The CPU platform: memory and threads of this machine, seen through its cgroup."""

import os
from pathlib import Path

from vllm.platforms.interface import Platform


class CpuPlatform(Platform):
    device_type = "cpu"


def available_memory() -> int:
    """Bytes this process may still take: the smaller of free RAM and the cgroup's remainder."""
    free = _meminfo_available()
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_value(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
