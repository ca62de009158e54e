"""How many CPUs and how much memory this process may use, containers included."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_cpus", "available_memory"]


def available_cpus() -> int:
    """CPUs that this process may run on: its affinity mask, and its cgroup's quota rounded down.

    More threads than that are ruinous: llama.cpp's threads wait for each other by spinning.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, int(quota)) if quota is not None else count)


def _cgroup_quota() -> float | None:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping (MemAvailable, the cgroup's limit); None if unknown."""
    found = [n for n in (_mem_available(), _cgroup_memory()) if n is not None]
    return min(found) if found else None


def _mem_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_memory() -> int | None:
    try:
        folder = Path("/sys/fs/cgroup")
        limit = (folder / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
