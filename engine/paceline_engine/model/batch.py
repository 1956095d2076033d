"""The slices of one pass, packed into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline_engine.cuda.attention import FLASH_HEAD_DIM, UnequalPlan, UniformPlan, upload
from paceline_engine.kernels import AttentionMeta
from paceline_engine.model.adapter import AdaptedRows, adapted_rows
from paceline_engine.model.base import Logits, SequenceSlice
from paceline_engine.model.ops import AttentionPlan
from paceline_engine.model.spec import LayerKind, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """T tokens of S sequences, one sequence after the other."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    slots: Tensor
    """int64 [T]: where each token's KV goes, ``block * block_size + offset``."""
    meta: AttentionMeta | AttentionPlan
    logit_rows: Tensor | None
    """int64 [R]: the tokens whose logits are asked for; None where all are."""
    adapted: tuple[AdaptedRows, ...] = ()
    """Of the T tokens."""
    adapted_logits: tuple[AdaptedRows, ...] = ()
    """Of the R tokens."""

    @classmethod
    def pack(
        cls,
        slices: Sequence[SequenceSlice],
        *,
        block_size: int,
        device: torch.device,
        attention: PlannedAttention | None = None,
    ) -> PackedBatch:
        """Lay the slices out; ``attention`` is given where it is planned and not run by the CPU's kernel."""
        lengths = np.array([len(item.token_ids) for item in slices], dtype=np.int64)
        assert len(slices) > 0
        assert lengths.min() > 0, "a slice without tokens"
        starts = np.zeros(len(slices) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        firsts = np.array([item.position for item in slices], dtype=np.int64)

        n_tokens = int(starts[-1])
        sequence = np.repeat(np.arange(len(slices)), lengths)
        positions = np.arange(n_tokens) - starts[sequence] + firsts[sequence]
        tables = _block_tables(slices, block_size)
        slots = tables[sequence, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        meta: AttentionMeta | AttentionPlan
        if attention is not None:
            meta = attention.plan(starts, firsts, tables, block_size=block_size, device=device)
        else:
            meta = AttentionMeta(
                query_starts=upload(starts.astype(np.int32), device),
                positions=upload(firsts.astype(np.int32), device),
                block_tables=upload(tables, device),
            )
        rows = _logit_rows(slices, starts)
        adapters = [item.adapter for item in slices]
        token_ids = np.concatenate([np.asarray(item.token_ids, dtype=np.int64) for item in slices])
        return cls(
            token_ids=upload(token_ids, device),
            positions=upload(positions, device),
            slots=upload(slots, device),
            meta=meta,
            logit_rows=None if len(rows) == n_tokens else upload(rows, device),
            adapted=adapted_rows(adapters, sequence, device),
            adapted_logits=adapted_rows(adapters, sequence[rows], device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttention:
    """How passes are planned where attention is not the CPU's kernel."""

    windows: frozenset[int | None]
    """Those of the model's layers."""
    flash: bool

    @classmethod
    def of(cls, spec: ModelSpec, *, flash: bool) -> PlannedAttention:
        kinds = set(spec.layer_kinds or (LayerKind.FULL,))
        windows = {spec.sliding_window if kind is LayerKind.SLIDING else None for kind in kinds}
        fits = spec.head_dim % 8 == 0 and spec.head_dim <= FLASH_HEAD_DIM
        return cls(windows=frozenset(windows), flash=flash and fits)

    def plan(
        self,
        starts: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        tables: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
        *,
        block_size: int,
        device: torch.device,
    ) -> AttentionPlan:
        return UnequalPlan.build(
            query_starts=starts.tolist(),
            positions=positions.tolist(),
            block_tables=tables,
            windows=self.windows,
            block_size=block_size,
            flash=self.flash,
            device=device,
        )

    def plan_uniform(
        self, block_tables: Tensor, positions: Tensor, *, block_size: int, n_rows: int = 1
    ) -> AttentionPlan:
        """For as many new tokens in each sequence; block_tables int64 [S, n], positions int64 [S]."""
        return UniformPlan.build(
            block_tables,
            positions,
            n_rows=n_rows,
            windows=self.windows,
            block_size=block_size,
            flash=self.flash,
        )


def _block_tables(
    slices: Sequence[SequenceSlice], block_size: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """int32 [S, max_blocks], filled up with 0 where a sequence has fewer blocks."""
    counts = [-(-(item.position + len(item.token_ids)) // block_size) for item in slices]
    tables = np.zeros((len(slices), max(counts)), dtype=np.int32)
    for row, (item, count) in enumerate(zip(slices, counts, strict=True)):
        assert len(item.block_table) >= count, "the block table does not cover the slice"
        tables[row, :count] = item.block_table[:count]
    return tables


def _logit_rows(
    slices: Sequence[SequenceSlice], starts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    rows: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    for index, item in enumerate(slices):
        end = starts[index + 1]
        match item.logits:
            case Logits.ALL:
                rows.append(np.arange(starts[index], end))
            case Logits.LAST:
                rows.append(np.arange(end - 1, end))
            case Logits.NONE:
                pass
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
