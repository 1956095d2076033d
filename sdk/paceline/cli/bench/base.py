"""What a benchmark reports, and the facts of the machine that it ran on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

_DRIVER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure that the project promises."""

    name: str
    value: float
    goal: float
    better: Literal["lower", "higher"]

    @property
    def met(self) -> bool:
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "goal": self.goal,
            "better": self.better,
            "met": self.met,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the command line asked for."""

    model: str
    data: Path | None
    quick: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One benchmark's result."""

    name: str
    runs: int
    results: dict[str, dict[str, Any]]
    """Each figure by name: minimum, median, maximum, n, or facts in words."""
    goals: tuple[Goal, ...] = ()
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "name": self.name,
            "machine": machine(),
            "versions": versions(),
            "runs": self.runs,
            "results": self.results,
            "goals": [goal.to_dict() for goal in self.goals],
            **({"details": self.details} if self.details else {}),
        }


def summary(values: Sequence[float], unit: str) -> dict[str, Any]:
    """Minimum, median and maximum of a figure's runs."""
    return {
        "unit": unit,
        "minimum": min(values),
        "median": statistics.median(values),
        "maximum": max(values),
        "n": len(values),
    }


def machine() -> dict[str, Any]:
    """Cores, instruction sets, memory speed, measured now, and graphics cards where there are any."""
    cards = graphics_cards()
    return {
        "cores": cores(),
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "instruction_sets": instruction_sets(),
        "memory_gb_per_s": round(memory_speed_gb_per_s(), 1),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        **({"graphics_cards": cards} if cards else {}),
    }


def versions() -> dict[str, str]:
    """Versions of Python, Paceline and what decides its speed."""
    found = {"python": platform.python_version()}
    for package in ("paceline", "torch", "numpy", "tokenizers", "opentelemetry-api"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def graphics_cards() -> list[str]:
    """Names of NVIDIA's cards, as their driver's own tool tells them."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_DRIVER_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.stdout.splitlines() if line.strip()]


def instruction_sets() -> list[str]:
    """Those that matter to the kernels, as the system names them."""
    flags = set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())
    known = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni")
    return [name for name in (*known, "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm") if name in flags]


def say(text: str) -> None:
    """Tell how far a benchmark is, beside what it prints."""
    print(text, file=sys.stderr, flush=True)


def memory_speed_gb_per_s(megabytes: int = 256) -> float:
    """Best of a few reads of a buffer larger than the caches, by one thread a core."""
    import numpy as np

    n_threads = cores()
    parts = np.array_split(np.ones(megabytes * 2**20 // 8), n_threads)
    best = float("inf")
    for _ in range(5):
        threads = [threading.Thread(target=np.add.reduce, args=(part,)) for part in parts]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - started)
    return megabytes * 2**20 / best / 1e9


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
