"""The header and tensor table of a GGUF file, checked before any tensor is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Sizes are compared as Python integers, so
no product of counts can wrap around. Long arrays of strings are walked, and decoded only when asked for.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline_engine.errors import ModelLoadError, UnsupportedModelError

MAX_METADATA = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 255
MAX_KEY_BYTES = 65_535
MAX_ALIGNMENT = 1 << 20
FETCH_AGAIN = "the file is damaged or incomplete, fetch it again"

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    6: ("Q5_0", 32, 22),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Type id to its name, values per block and bytes per block."""

_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor stands in the file."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    """[out, in] for matrices: the file's dimensions reversed."""
    start: int
    """Byte offset from the start of the file."""
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StringArray:
    """An array of strings that is decoded only when asked for."""

    count: int
    raw: bytes

    def decode(self) -> list[str]:
        """All strings.

        Raises:
            UnicodeDecodeError: one of them is not UTF-8.
        """
        found: list[str] = []
        position = 0
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            start = position + 8
            position = start + length_at(self.raw, position)[0]
            found.append(self.raw[start:position].decode())
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What stands before the tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    n_bytes: int
    """Bytes before the first tensor."""
    metadata_bytes: int
    """Bytes before the tensor table."""

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of ``key``, of type ``kind``; the default where the key is absent.

        Raises:
            ModelLoadError: it is absent without a default, or of another type.
        """
        value = self.metadata.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if value is None:
            raise ModelLoadError(
                str(self.path), reason=f"metadata '{key}' is missing", remedy="convert the model again"
            )
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise ModelLoadError(
                str(self.path),
                reason=f"metadata '{key}' is {str(value)[:40]!r} and not a valid {kind.__name__}",
                remedy="convert the model again",
            )
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings.

        Raises:
            ModelLoadError: it is absent, of another type or not UTF-8.
        """
        try:
            return self.get(key, StringArray).decode()
        except UnicodeDecodeError as error:
            raise ModelLoadError(
                str(self.path), reason=f"metadata '{key}' is not UTF-8 ({error})", remedy=FETCH_AGAIN
            ) from error


def read_header(path: Path) -> GgufHeader:
    """Read and check all that stands before the tensors.

    Raises:
        ModelLoadError: the file is damaged or does not fit its own table.
        UnsupportedModelError: a version or tensor type that is not read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelLoadError(str(path), reason=f"only {size} bytes long", remedy=FETCH_AGAIN)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path=path, data=data).header()
    except OSError as error:
        raise ModelLoadError(
            str(path), reason=f"cannot be read ({error})", remedy="check the path and its permissions"
        ) from error


@dataclass(slots=True, kw_only=True)
class _Reader:
    path: Path
    data: mmap.mmap
    position: int = 0
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    def header(self) -> GgufHeader:
        n_tensors, n_metadata = self._preamble()
        for _ in range(n_metadata):
            key = self._text("a metadata key", MAX_KEY_BYTES)
            if key in self.metadata:
                raise self._damaged(f"metadata '{key}' stands twice")
            self.metadata[key] = self._value(key)
        metadata_bytes = self.position
        self._refuse_splits()
        entries = [self._entry() for _ in range(n_tensors)]
        alignment = self._alignment()
        start = -(-self.position // alignment) * alignment
        return GgufHeader(
            path=self.path,
            metadata=self.metadata,
            tensors=self._placed(entries, start, alignment),
            n_bytes=min(start, len(self.data)),
            metadata_bytes=metadata_bytes,
        )

    def _preamble(self) -> tuple[int, int]:
        if self.data[:4] != b"GGUF":
            raise self._damaged(f"starts with {self.data[:4]!r} and not with b'GGUF'")
        self.position = 4
        (version,) = self._unpack("<I", "the version")
        if version not in (2, 3):
            raise UnsupportedModelError(
                str(self.path),
                reason=f"GGUF version {version} (byte order or format) is not read",
                remedy="use a little-endian GGUF of version 2 or 3",
            )
        n_tensors, n_metadata = self._unpack("<QQ", "the counts")
        for what, count, limit in (
            ("tensors", n_tensors, MAX_TENSORS),
            ("metadata entries", n_metadata, MAX_METADATA),
        ):
            if count > limit:
                raise self._damaged(f"claims {count} {what}, at most {limit} are read")
        if n_tensors == 0:
            raise self._damaged("holds no tensors")
        return n_tensors, n_metadata

    def _value(self, key: str) -> Any:
        (kind,) = self._unpack("<I", f"the type of '{key}'")
        if kind in _SCALARS:
            return self._unpack(f"<{_SCALARS[kind]}", f"'{key}'")[0]
        if kind == _STRING:
            return self._text(f"'{key}'", len(self.data))
        if kind == _ARRAY:
            return self._array(key)
        raise self._damaged(f"metadata '{key}' has the unknown type {kind}")

    def _array(self, key: str) -> Any:
        kind, count = self._unpack("<IQ", f"the array '{key}'")
        if kind in _SCALARS:
            width = struct.calcsize(f"<{_SCALARS[kind]}")
            self._need(count * width, f"the array '{key}'")
            return self._unpack(f"<{count}{_SCALARS[kind]}", f"the array '{key}'")
        if kind != _STRING:
            raise self._damaged(f"metadata '{key}' is an array of the unknown type {kind}")
        self._need(count * 8, f"the array '{key}'")
        start = position = self.position
        length_at, end = struct.Struct("<Q").unpack_from, len(self.data) - 8
        for _ in range(count):
            if position > end:
                raise self._damaged(f"ends within the array '{key}'")
            position += 8 + length_at(self.data, position)[0]
        if position > len(self.data):
            raise self._damaged(f"ends within the array '{key}'")
        self.position = position
        return StringArray(count=count, raw=self.data[start:position])

    def _entry(self) -> TensorEntry:
        """One row of the table; ``start`` is still relative to the data section."""
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        fail = self._failure(name)
        (n_dims,) = self._unpack("<I", f"the shape of tensor '{name}'")
        if not name or not 1 <= n_dims <= 4:
            raise fail(f"has {n_dims} dimensions, 1 to 4 are possible")
        dims: tuple[int, ...] = self._unpack(f"<{n_dims}Q", f"the shape of tensor '{name}'")
        kind, offset = self._unpack("<IQ", f"the place of tensor '{name}'")
        if kind not in TENSOR_TYPES:
            raise UnsupportedModelError(
                str(self.path),
                tensor=name,
                reason=f"has type id {kind}, which is not read",
                remedy=f"use a file of {', '.join(known[0] for known in TENSOR_TYPES.values())}",
            )
        type_name, per_block, block_bytes = TENSOR_TYPES[kind]
        if min(dims) < 1 or dims[0] % per_block:
            raise fail(f"has shape {list(dims)}, whose rows do not divide into blocks of {per_block}")
        return TensorEntry(
            name=name,
            type_name=type_name,
            shape=dims[::-1],
            start=offset,
            n_bytes=math.prod(dims) // per_block * block_bytes,
        )

    def _placed(self, entries: list[TensorEntry], start: int, alignment: int) -> dict[str, TensorEntry]:
        placed: dict[str, TensorEntry] = {}
        taken_to, taken_by = 0, ""
        for entry in sorted(entries, key=lambda entry: entry.start):
            fail = self._failure(entry.name)
            if entry.name in placed:
                raise fail("stands twice in the table")
            if entry.start % alignment:
                raise fail(f"offset {entry.start} is no multiple of the alignment {alignment}")
            if start + entry.start + entry.n_bytes > len(self.data):
                raise fail(
                    f"{entry.type_name} {list(entry.shape)} at offset {entry.start} ends at byte "
                    f"{start + entry.start + entry.n_bytes} of a file of {len(self.data)}"
                )
            if entry.start < taken_to:
                raise fail(f"offset {entry.start} lies within tensor '{taken_by}'")
            taken_to, taken_by = entry.start + entry.n_bytes, entry.name
            placed[entry.name] = TensorEntry(
                name=entry.name,
                type_name=entry.type_name,
                shape=entry.shape,
                start=start + entry.start,
                n_bytes=entry.n_bytes,
            )
        return placed

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(
                f"general.alignment is {alignment!r}, a power of two up to {MAX_ALIGNMENT} is possible"
            )
        return alignment

    def _refuse_splits(self) -> None:
        parts = self.metadata.get("split.count", 0)
        if parts not in (0, 1):
            raise UnsupportedModelError(
                str(self.path),
                reason=f"is one part of {parts}",
                remedy="join the parts first: llama-gguf-split --merge",
            )

    def _text(self, what: str, limit: int) -> str:
        (length,) = self._unpack("<Q", f"the length of {what}")
        if length > limit:
            raise self._damaged(f"{what} claims {length} bytes, at most {limit} are possible")
        self._need(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8 ({error})") from error

    def _unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        width = struct.calcsize(layout)
        self._need(width, what)
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += width
        return values

    def _need(self, n_bytes: int, what: str) -> None:
        if self.position + n_bytes > len(self.data):
            raise self._damaged(f"ends within {what}")

    def _failure(self, tensor: str) -> Callable[[str], ModelLoadError]:
        return lambda reason: ModelLoadError(str(self.path), tensor=tensor, reason=reason, remedy=FETCH_AGAIN)

    def _damaged(self, reason: str) -> ModelLoadError:
        return ModelLoadError(str(self.path), reason=reason, remedy=FETCH_AGAIN)
