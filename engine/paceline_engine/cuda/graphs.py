"""Decode steps captured once and replayed: one launch where a step of a small model has a thousand.

A captured step has fixed shapes, so there is one for each variant, number of sequences and length of block
table, in sizes that grow by a factor. A pass takes the smallest that holds it and fills the rest with rows
that write to a block of their own. Captures are made ahead, because one takes longer than a step may; a
pass that none holds runs as it would without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline_engine.cuda.attention import upload

_LOG = logging.getLogger(__name__)
_FIRST_TOKENS = 512
_TOKENS_FACTOR = 4
_MOST_SEQUENCES = 64
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """One new token of S sequences, on the device."""

    token_ids: Tensor
    """int64 [S]"""
    positions: Tensor
    """int64 [S]"""
    slots: Tensor
    """int64 [S]: ``block * block_size + offset`` of each token."""
    block_tables: Tensor
    """int64 [S, n_blocks]"""


class DecodeRow(Protocol):
    """One sequence's part of a decode step, as ``model.base.SequenceSlice``."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def position(self) -> int: ...

    @property
    def block_table(self) -> Sequence[int]: ...


Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Makes a function that runs the same work again, and gives the tensor that then holds the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The shapes that are captured."""

    n_sequences: tuple[int, ...]
    """Rising."""
    n_blocks: tuple[int, ...]
    """Lengths of the block tables, rising."""
    most_gathered_blocks: int
    """Largest product of the two: a step gathers that many blocks for each layer, used or not."""

    @classmethod
    def of(cls, *, max_sequences: int, max_blocks: int, block_size: int, most_gathered_blocks: int) -> Sizes:
        """Powers of two up to ``max_sequences``; block tables from 512 tokens on, by a factor of four."""
        return cls(
            n_sequences=tuple(_growing(1, min(max_sequences, _MOST_SEQUENCES), 2)),
            n_blocks=tuple(_growing(-(-_FIRST_TOKENS // block_size), max_blocks, _TOKENS_FACTOR)),
            most_gathered_blocks=most_gathered_blocks,
        )

    def fit(self, n_sequences: int, n_blocks: int) -> tuple[int, int] | None:
        """The smallest shape that holds a pass, or None."""
        rows = next((size for size in self.n_sequences if size >= n_sequences), None)
        length = next((size for size in self.n_blocks if size >= n_blocks), None)
        if rows is None or length is None or rows * length > self.most_gathered_blocks:
            return None
        return rows, length

    def all(self) -> list[tuple[int, int]]:
        """Every shape, the largest first: later captures then find room in what earlier ones freed."""
        shapes = [
            (rows, length)
            for rows in self.n_sequences
            for length in self.n_blocks
            if rows * length <= self.most_gathered_blocks
        ]
        return sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    buffer: Tensor
    """int64: token ids, positions, slots and block tables, one after the other."""
    replay: Callable[[], Tensor]


class DecodeGraphs(Generic[Key]):
    """Captured decode steps, by variant and shape.

    Args:
        step: runs one decode step of a variant, fp32 [S, hidden]; it must not wait for the device.
        scratch_block: a block that belongs to nobody, for rows that fill up a shape.
        capture: how to capture; ``cuda_capture`` makes one.
    """

    def __init__(
        self,
        step: Callable[[Key, DecodeInputs], Tensor],
        *,
        sizes: Sizes,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._step = step
        self._sizes = sizes
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._device = device
        self._capture = capture
        self._captured: dict[tuple[Key, int, int], _Captured] = {}

    @property
    def n_captured(self) -> int:
        return len(self._captured)

    def capture_all(self, key: Key) -> bool:
        """Capture every shape for a variant. Where one cannot be, the rest is left out: passes run without.

        Returns:
            whether all are captured.
        """
        for rows, length in self._sizes.all():
            buffer = upload(self._fill((), rows, length), self._device)
            inputs = _split(buffer, rows, length)
            try:
                replay = self._capture(lambda inputs=inputs: self._step(key, inputs))  # type: ignore[misc]
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                _LOG.warning("decode steps of %s run uncaptured from %d rows on: %s", key, rows, reason)
                return False
            self._captured[key, rows, length] = _Captured(buffer=buffer, replay=replay)
        return True

    def forget(self) -> None:
        """Give up all captures and the memory that they hold."""
        self._captured.clear()

    def run(self, key: Key, rows: Sequence[DecodeRow]) -> Tensor | None:
        """The result [len(rows), hidden] of a decode step, or None where no capture holds it."""
        n_blocks = max(-(-(row.position + 1) // self._block_size) for row in rows)
        shape = self._sizes.fit(len(rows), n_blocks)
        captured = None if shape is None else self._captured.get((key, *shape))
        if shape is None or captured is None:
            return None
        captured.buffer.copy_(_staged(self._fill(rows, *shape), self._device), non_blocking=True)
        # A copy, because the next replay overwrites what this one gives.
        return captured.replay()[: len(rows)].clone()

    def _fill(
        self, rows: Sequence[DecodeRow], n_rows: int, n_blocks: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """The buffer of one step: the given rows, then rows of token 0 at the scratch block's first place."""
        size = self._block_size
        buffer = np.zeros(n_rows * (3 + n_blocks), dtype=np.int64)
        token_ids, positions, slots, tables = _parts(buffer, n_rows)
        slots[:] = self._scratch_block * size
        tables[:] = self._scratch_block
        for index, row in enumerate(rows):
            count = row.position // size + 1
            token_ids[index] = row.token_ids[0]
            positions[index] = row.position
            slots[index] = row.block_table[count - 1] * size + row.position % size
            tables[index, :count] = row.block_table[:count]
        return buffer


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share one memory pool: they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Libraries set themselves up in their first call, which must not be captured.
        before = torch.cuda.current_stream(device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            work()
        before.wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may use the device meanwhile: only this one's calls are watched.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = work()
        finally:
            # Where a capture fails, torch leaves its stream the current one.
            torch.cuda.set_stream(before)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture


def _split(buffer: Tensor, n_rows: int, n_blocks: int) -> DecodeInputs:
    ids, positions, slots = (buffer[at * n_rows : (at + 1) * n_rows] for at in range(3))
    tables = buffer[3 * n_rows :].view(n_rows, n_blocks)
    return DecodeInputs(token_ids=ids, positions=positions, slots=slots, block_tables=tables)


def _parts(
    buffer: np.ndarray[tuple[int, ...], np.dtype[np.int64]], n_rows: int
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], ...]:
    vectors = buffer[: 3 * n_rows].reshape(3, n_rows)
    return vectors[0], vectors[1], vectors[2], buffer[3 * n_rows :].reshape(n_rows, -1)


def _staged(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _growing(first: int, last: int, factor: int) -> Iterable[int]:
    size = first
    while size < last:
        yield size
        size *= factor
    yield last
