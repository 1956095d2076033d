"""How many threads a step should use: the physical cores that this process may run on."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(*, sysfs: Path = Path("/sys")) -> int:
    """Physical cores within the affinity mask and the cgroup's CPU quota; at least 1.

    Sibling hyper-threads count once: they share the units that a matrix product saturates.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if not cpus:
        return max(1, os.cpu_count() or 1)
    cores = {_core(cpu, sysfs) for cpu in cpus}
    quota = _cgroup_quota(sysfs)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def _core(cpu: int, sysfs: Path) -> str:
    """Name of the core that ``cpu`` is a thread of; the CPU itself where the kernel does not tell."""
    siblings = _read(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings if siblings is not None else str(cpu)


def _cgroup_quota(sysfs: Path) -> float | None:
    """CPUs that a container may use (cgroup v2 ``cpu.max``); None where there is no limit."""
    words = (_read(sysfs / "fs/cgroup/cpu.max") or "").split()
    try:
        return int(words[0]) / int(words[1])
    except (IndexError, ValueError, ZeroDivisionError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
