"""Which kernels run: the best compiled instruction set that this processor has and that proves right.

``PACELINE_KERNELS`` chooses one by name (``avx512``, ``avx2``, ``generic``) or turns all off (``off``). A set
that this processor lacks is an error; one that does not prove right gives way to the next best.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline_engine.errors import UnknownOptionError
from paceline_engine.kernels.native import NativeKernels
from paceline_engine.kernels.selfcheck import first_wrong

INSTRUCTION_SETS = ("avx512", "avx2", "generic")
"""Best first."""

_LIBRARY = Path(__file__).with_name("_native.so")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The kernels to use, or why there are none."""

    kernels: NativeKernels | None
    reason: str


def native_for(x: Tensor) -> NativeKernels | None:
    """The compiled kernels, where they run and can read ``x``."""
    kernels = selected().kernels
    return kernels if kernels is not None and x.is_cpu and x.dtype == torch.float32 else None


def describe() -> str:
    """Which instruction set the kernels use, or why the torch fallbacks run instead."""
    return selected().reason


def identity() -> str:
    """What runs and the build that it is of: kernels of another identity may take another time."""
    chosen = selected()
    if chosen.kernels is None:
        return "PyTorch's operators"
    # Less than half a megabyte: its digest takes a millisecond.
    return f"{chosen.reason}, build {hashlib.sha256(_LIBRARY.read_bytes()).hexdigest()[:12]}"


@functools.cache
def selected() -> Selection:
    """The choice for this process, made on first use."""
    return select(os.environ.get("PACELINE_KERNELS"))


def select(wanted: str | None) -> Selection:
    """Choose kernels; ``wanted`` is an instruction set's name, ``off``, or None for the best.

    Raises:
        UnknownOptionError: there is no such instruction set, or it does not run here.
    """
    if wanted == "off":
        return Selection(kernels=None, reason="torch fallbacks: PACELINE_KERNELS=off")
    if wanted and wanted not in INSTRUCTION_SETS:
        raise UnknownOptionError(
            "PACELINE_KERNELS",
            observed=wanted,
            limit=f"one of off, {', '.join(INSTRUCTION_SETS)}",
            remedy="unset it to use the best that the processor has",
        )
    try:
        library = open_library()
    except OSError as error:
        return Selection(kernels=None, reason=f"torch fallbacks: {error}")
    runnable = sets_that_run(library)
    if wanted and wanted not in runnable:
        raise UnknownOptionError(
            "PACELINE_KERNELS",
            observed=wanted,
            limit=f"one that this processor runs ({', '.join(runnable) or 'none'})",
            remedy="unset it to use the best of them",
        )
    for name in runnable[runnable.index(wanted) :] if wanted else runnable:
        kernels = NativeKernels(library, name)
        wrong = first_wrong(kernels)
        if wrong is None:
            threads = "" if library.pk_has_threads() else " (built without OpenMP: one thread)"
            return Selection(kernels=kernels, reason=f"native kernels: {name}{threads}")
        _logger.warning(
            "the %s kernels are not used: %s differs from its reference on this machine", name, wrong
        )
    return Selection(kernels=None, reason="torch fallbacks: no compiled instruction set runs here")


def open_library() -> ctypes.CDLL:
    """The compiled library, bound to the OpenMP runtime that torch uses.

    Raises:
        OSError: it was not built, or cannot be loaded.
    """
    if not _LIBRARY.exists():
        raise OSError("the kernels were not built with this installation")
    for runtime in _openmp_runtimes():
        try:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        break
    return ctypes.CDLL(str(_LIBRARY))


def _openmp_runtimes() -> Iterable[str]:
    """Candidates, the one in use by torch first: two runtimes would mean two pools of threads."""
    if sys.platform.startswith("linux"):
        mapped = Path("/proc/self/maps").read_text()
        yield from sorted(set(re.findall(r"/\S*lib(?:gomp|iomp5|omp)\b\S*\.so\S*", mapped)))
    folder = Path(torch.__file__).parent
    for found in (*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")):
        yield str(found)
    yield "libgomp.so.1"


def sets_that_run(library: ctypes.CDLL) -> tuple[str, ...]:
    """The compiled sets whose instructions this processor and its system offer, best first."""
    return tuple(name for name in INSTRUCTION_SETS if _runs(library, name))


def _runs(library: ctypes.CDLL, name: str) -> bool:
    try:
        supports = library[f"pk_supports_{name}"]
    except AttributeError:
        return False
    return bool(supports())
