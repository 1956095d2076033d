"""A digest of a model's files that is cheap for files of any size.

Hashed are each file's name and size, the whole of its table (which names, types and places every tensor),
and 128 pages spread evenly over the rest. Retraining, quantizing or converting a model again touches every
tensor and so every page, and a changed tokenizer or spec stands in the table. What may go unnoticed is a
change made by hand to a few bytes of one tensor that leaves the size and the table as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
N_PAGES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPart:
    """One file of a model: hash ``head_bytes`` from its start whole, and sample the rest."""

    path: Path
    head_bytes: int


def files_digest(parts: Iterable[DigestPart]) -> str:
    """SHA-256 over the parts, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        size = part.path.stat().st_size
        digest.update(f"{part.path.name}\0{size}\0{part.head_bytes}\0".encode())
        with part.path.open("rb") as file:
            digest.update(file.read(part.head_bytes))
            last = max(part.head_bytes, size - PAGE_BYTES)
            for index in range(N_PAGES):
                offset = part.head_bytes + (last - part.head_bytes) * index // (N_PAGES - 1)
                file.seek(offset)
                digest.update(file.read(PAGE_BYTES))
    return digest.hexdigest()
