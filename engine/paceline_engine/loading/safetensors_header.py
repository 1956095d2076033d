"""The header of a safetensors file, checked before any tensor is read.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_engine.errors import ModelLoadError, UnsupportedModelError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
FETCH_AGAIN = "the file is damaged or incomplete, fetch it again"

READ_TYPES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Type to bytes per value."""
_OTHER_TYPES = frozenset(
    (
        "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "I16", "U16",
        "I32", "U32", "F64", "I64", "U64", "C64",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsEntry:
    """Where one tensor stands."""

    path: Path
    name: str
    type_name: str
    shape: tuple[int, ...]
    start: int
    """Byte offset from the start of the file."""
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    path: Path
    tensors: Mapping[str, SafetensorsEntry]
    n_bytes: int
    """Bytes before the first tensor."""


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the table of one file.

    Raises:
        ModelLoadError: the file is damaged or does not fit its own table.
        UnsupportedModelError: a tensor type that is not read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelLoadError(
                    str(path),
                    reason=f"claims a header of {length} bytes in a file of {size}",
                    remedy=FETCH_AGAIN,
                )
            raw = file.read(length)
    except OSError as error:
        raise ModelLoadError(
            str(path), reason=f"cannot be read ({error})", remedy="check the path and its permissions"
        ) from error
    entries = [
        _entry(path, name, value, 8 + length)
        for name, value in _parsed(path, raw).items()
        if name != "__metadata__"
    ]
    _check_places(path, entries, 8 + length, size)
    return SafetensorsHeader(path=path, tensors={entry.name: entry for entry in entries}, n_bytes=8 + length)


def _parsed(path: Path, raw: bytes) -> dict[str, Any]:
    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=without_twins)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(
            str(path), reason=f"the header is no valid JSON ({error})", remedy=FETCH_AGAIN
        ) from error
    if not isinstance(header, dict):
        raise ModelLoadError(str(path), reason="the header is no JSON object", remedy=FETCH_AGAIN)
    return header


def _entry(path: Path, name: str, value: Any, data_start: int) -> SafetensorsEntry:
    fail = _failure(path, name)
    if not isinstance(value, dict):
        raise fail("its entry is no object")
    type_name: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(type_name, str) or type_name not in READ_TYPES:
        if isinstance(type_name, str) and type_name in _OTHER_TYPES:
            raise UnsupportedModelError(
                str(path),
                tensor=name,
                reason=f"has type {type_name}, which is not read",
                remedy=f"use a checkpoint of {', '.join(READ_TYPES)}",
            )
        raise fail(f"has the unknown type {str(type_name)[:40]!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise fail("its shape or offsets are no lists of sizes")
    start, end = offsets
    n_bytes = math.prod(shape) * READ_TYPES[type_name]
    if end - start != n_bytes:
        raise fail(f"{type_name} {shape} needs {n_bytes} bytes, its offsets span {end - start}")
    return SafetensorsEntry(
        path=path,
        name=name,
        type_name=type_name,
        shape=tuple(shape),
        start=data_start + start,
        n_bytes=n_bytes,
    )


def _check_places(path: Path, entries: list[SafetensorsEntry], data_start: int, size: int) -> None:
    taken_to, taken_by = data_start, ""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.n_bytes)):
        fail = _failure(path, entry.name)
        end = entry.start + entry.n_bytes
        if end > size:
            raise fail(f"ends at byte {end} of a file of {size}")
        if entry.start < taken_to:
            raise fail(f"byte {entry.start} lies within tensor '{taken_by}'")
        taken_to, taken_by = end, entry.name


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 63 for one in value)


def _failure(path: Path, tensor: str) -> Callable[[str], ModelLoadError]:
    return lambda reason: ModelLoadError(str(path), tensor=tensor, reason=reason, remedy=FETCH_AGAIN)
