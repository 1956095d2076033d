"""Attention over the paged cache on a GPU: a sequence's blocks are gathered, then a fused kernel runs.

torch's flash attention reads pages of 256 positions at least, so keys and values are gathered into rows
first; a layer with a sliding window gathers no more than its window reaches. What a pass needs is worked out
once (a plan) and serves all of its layers; nothing here waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

FLASH_HEAD_DIM = 256
"""The widest head of flash attention; widths are multiples of 8."""
Window = int | None
"""Positions that a token attends to, itself among them; None for all before it."""


def flash_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    used: Tensor,
    first: Tensor,
    *,
    n_rows: int,
    scale: float,
    window: Window,
) -> Tensor:
    """Attention of S sequences of ``n_rows`` queries each, over C gathered positions each.

    Args:
        q: [S * n_rows, n_heads, head_dim], bf16.
        keys, values: [S * C, n_kv_heads, head_dim], bf16.
        used: int32 [S]: how many of the C positions hold something; the last queries stand at their end.
        first: int64 [S]: where each first query stands among them; implied here by ``used``.

    Returns:
        as ``q``.
    """
    n_sequences = used.shape[0]
    n_context = keys.shape[0] // n_sequences
    steps = torch.arange(n_sequences + 1, dtype=torch.int32, device=q.device)
    return _flash(
        q,
        keys,
        values,
        starts=(steps * n_rows, steps * n_context),
        longest=(n_rows, n_context),
        used=used,
        scale=scale,
        window=window,
    )


def masked_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    used: Tensor,
    first: Tensor,
    *,
    n_rows: int,
    scale: float,
    window: Window,
) -> Tensor:
    """As ``flash_attention``, with a mask, for any type and device."""
    n_sequences, (n_heads, head_dim) = first.shape[0], q.shape[1:]
    n_kv_heads = keys.shape[1]
    group = n_heads // n_kv_heads
    rows = first[:, None] + torch.arange(n_rows, device=q.device)  # [S, n_rows]
    columns = torch.arange(keys.shape[0] // n_sequences, device=q.device)
    visible = columns <= rows[..., None]  # [S, n_rows, C]
    if window is not None:
        visible &= columns > rows[..., None] - window
    # The query heads of one key head become rows: fused kernels take a mask or grouped heads, not both.
    grouped = q.view(n_sequences, n_rows, n_kv_heads, group, head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    mask = visible[:, None] if n_rows == 1 else visible.repeat_interleave(group, dim=1)[:, None]
    keys, values = (
        part.view(n_sequences, -1, n_kv_heads, head_dim).transpose(1, 2) for part in (keys, values)
    )
    mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    mixed = mixed.view(n_sequences, n_kv_heads, n_rows, group, head_dim).permute(0, 2, 1, 3, 4)
    return mixed.reshape(q.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reach:
    """The part of every sequence's context that one window sees, in whole blocks."""

    blocks: Tensor
    """int64 [S, n]"""
    used: Tensor
    """int32 [S]"""
    first: Tensor
    """int64 [S]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UniformPlan:
    """Every sequence has the same number of new tokens, as in a decode step.

    All shapes follow from those of the inputs, and all values are computed on the device: a captured step
    replays it for other positions and blocks.
    """

    n_rows: int
    reaches: Mapping[Window, _Reach]
    flash: bool

    @classmethod
    def build(
        cls,
        block_tables: Tensor,
        positions: Tensor,
        *,
        n_rows: int,
        windows: Collection[Window],
        block_size: int,
        flash: bool,
    ) -> UniformPlan:
        """
        Args:
            block_tables: int64 [S, max_blocks]; what a sequence does not reach may be any block.
            positions: int64 [S]: of each sequence's first new token.
        """
        reaches: dict[Window, _Reach] = {}
        for window in windows:
            n_reached = block_tables.shape[1]
            if window is not None:
                # Rows see window + n_rows - 1 positions in all, which may begin at the end of a block.
                n_reached = min(n_reached, (window + n_rows + block_size - 3) // block_size + 1)
            if window is None or n_reached == block_tables.shape[1]:
                blocks, first = block_tables, positions
            else:
                begin = (positions - window + 1).clamp_(min=0) // block_size  # [S]
                places = begin[:, None] + torch.arange(n_reached, device=positions.device)
                blocks = block_tables.gather(1, places.clamp_(max=block_tables.shape[1] - 1))
                first = positions - begin * block_size
            reaches[window] = _Reach(blocks=blocks, used=(first + n_rows).int(), first=first)
        return cls(n_rows=n_rows, reaches=reaches, flash=flash)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float, window: Window) -> Tensor:
        """fp32 q [S * n_rows, n_heads, head_dim] over one layer's cache; fp32 in the same shape."""
        reach = self.reaches[window]
        keys, values = (cache[reach.blocks].flatten(0, 2) for cache in (k_cache, v_cache))
        use_flash = self.flash and keys.dtype == torch.bfloat16
        if not use_flash:
            # A mask adds minus infinity, and a NaN that an earlier sequence left would stay one.
            unused = self._unused(reach, keys.shape[0])
            keys, values = (part.masked_fill_(unused, 0.0) for part in (keys, values))
        mixed = (flash_attention if use_flash else masked_attention)(
            q.to(keys.dtype),
            keys,
            values,
            reach.used,
            reach.first,
            n_rows=self.n_rows,
            scale=scale,
            window=window,
        )
        return mixed.float()

    @staticmethod
    def _unused(reach: _Reach, n_gathered: int) -> Tensor:
        """bool [S * C, 1, 1]: the gathered positions that hold nothing of their sequence."""
        columns = torch.arange(n_gathered // reach.used.shape[0], device=reach.used.device)
        return (columns >= reach.used[:, None]).flatten()[:, None, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gathered:
    """What one window needs of a pass over unequal sequences."""

    slots: Tensor
    """int64 [K]: the positions that are seen, sequence after sequence."""
    starts: tuple[int, ...]
    """Of each sequence in ``slots``, and its end."""
    device_starts: Tensor
    """The same, int32 [S + 1]."""
    first: tuple[int, ...]
    """Where each sequence's first query stands among its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnequalPlan:
    """Sequences with different numbers of new tokens: prefills, and what runs beside them."""

    query_starts: tuple[int, ...]
    device_query_starts: Tensor
    """The same, int32 [S + 1]."""
    gathered: Mapping[Window, _Gathered]
    flash: bool

    @classmethod
    def build(
        cls,
        *,
        query_starts: Sequence[int],
        positions: Sequence[int],
        block_tables: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
        windows: Collection[Window],
        block_size: int,
        flash: bool,
        device: torch.device,
    ) -> UnequalPlan:
        """Everything is known here, on the host; one copy a tensor brings it over."""
        gathered = {
            window: _gather(query_starts, positions, block_tables, window, block_size, device)
            for window in windows
        }
        return cls(
            query_starts=tuple(query_starts),
            device_query_starts=upload(np.asarray(query_starts, dtype=np.int32), device),
            gathered=gathered,
            flash=flash,
        )

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float, window: Window) -> Tensor:
        """fp32 q [T, n_heads, head_dim] over one layer's cache; fp32 in the same shape."""
        part = self.gathered[window]
        keys, values = (cache.flatten(0, 1)[part.slots] for cache in (k_cache, v_cache))
        narrow = q.to(keys.dtype)
        if self.flash and keys.dtype == torch.bfloat16:
            return _flash(
                narrow,
                keys,
                values,
                starts=(self.device_query_starts, part.device_starts),
                longest=(_longest(self.query_starts), _longest(part.starts)),
                used=None,
                scale=scale,
                window=window,
            ).float()
        out = torch.empty_like(q)
        for index, first in enumerate(part.first):
            begin, end = self.query_starts[index], self.query_starts[index + 1]
            seen = slice(part.starts[index], part.starts[index + 1])
            at = torch.full((1,), first, device=q.device)
            out[begin:end] = masked_attention(
                narrow[begin:end],
                keys[seen],
                values[seen],
                at,
                at,
                n_rows=end - begin,
                scale=scale,
                window=window,
            )
        return out


def upload(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> Tensor:
    """The array on ``device``, without waiting for what runs there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _gather(
    query_starts: Sequence[int],
    positions: Sequence[int],
    block_tables: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    window: Window,
    block_size: int,
    device: torch.device,
) -> _Gathered:
    starts, first = [0], list[int]()
    slots: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    for index, position in enumerate(positions):
        begin = 0 if window is None else max(0, position - window + 1)
        seen = np.arange(begin, position + query_starts[index + 1] - query_starts[index])
        blocks = block_tables[index, seen // block_size].astype(np.int64)
        slots.append(blocks * block_size + seen % block_size)
        starts.append(starts[-1] + len(seen))
        first.append(position - begin)
    return _Gathered(
        slots=upload(np.concatenate(slots), device),
        starts=tuple(starts),
        device_starts=upload(np.asarray(starts, dtype=np.int32), device),
        first=tuple(first),
    )


def _flash(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    used: Tensor | None,
    scale: float,
    window: Window,
) -> Tensor:
    """Flash attention over packed sequences; the causal mask stands at the end of each one's keys.

    It is the operator under ``torch.nn.attention.varlen``, without what that adds to each call, and the same
    in versions of torch whose ``varlen`` has neither grouped heads nor ``used``.

    Args:
        starts, longest: of the queries, and of the keys.
    """
    before = -1 if window is None else window - 1
    # A single query at the end sees all: said so, the heads of a group share the keys that are read, and
    # long contexts are split between multiprocessors.
    after = -1 if window is None and longest[0] == 1 else 0
    result: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward.default(
        q,
        keys,
        values,
        *starts,
        *longest,
        0.0,  # dropout
        window is None and after == 0,  # causal
        False,  # return the mask
        scale=scale,
        window_size_left=before,
        window_size_right=after,
        seqused_k=used,
    )
    return result[0]


def _longest(starts: Sequence[int]) -> int:
    return max(end - start for start, end in itertools.pairwise(starts))
