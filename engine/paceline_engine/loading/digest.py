"""A digest of a model's files that is cheap for files of any size.

Hashed are each file's name and size, the whole of its table (which names, types and places every tensor),
the first page of every tensor, and 128 pages spread evenly over the file; files of up to 16 MiB are hashed
whole. Training, quantizing or converting a model again changes every page of the tensors that it touches,
and a changed tokenizer or spec stands in the table. What may go unnoticed is a change by hand of a few bytes
within a tensor of a large file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
N_PAGES = 128
WHOLE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPart:
    """One file of a model: hash ``head_bytes`` from its start whole, and sample the rest."""

    path: Path
    head_bytes: int
    tensor_starts: tuple[int, ...] = ()


def files_digest(parts: Iterable[DigestPart]) -> str:
    """SHA-256 over the parts, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        size = part.path.stat().st_size
        digest.update(f"{part.path.name}\0{size}\0{part.head_bytes}\0".encode())
        with part.path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            digest.update(file.read(part.head_bytes))
            span = max(0, size - PAGE_BYTES - part.head_bytes)
            even = (part.head_bytes + span * index // (N_PAGES - 1) for index in range(N_PAGES))
            for offset in sorted({*part.tensor_starts, *even}):
                file.seek(offset)
                digest.update(file.read(PAGE_BYTES))
    return digest.hexdigest()
