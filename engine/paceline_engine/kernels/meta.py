"""Where the new tokens of a pass stand, and in which blocks their sequences' keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline_engine.errors import InvalidValueError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMeta:
    """S sequences of a pass; s owns the query rows ``query_starts[s]`` to ``query_starts[s + 1] - 1``."""

    query_starts: Tensor
    """int32 [S + 1], from 0 to T, never falling."""
    positions: Tensor
    """int32 [S]: position of each sequence's first new token."""
    block_tables: Tensor
    """int32 [S, max_blocks]: the KV block of each ``block_size`` positions; what a sequence does not reach
    may hold anything."""

    def __post_init__(self) -> None:
        n_sequences = self.positions.shape[0]
        shapes = {
            "query_starts": (n_sequences + 1,),
            "positions": (n_sequences,),
            "block_tables": (n_sequences, self.block_tables.shape[-1]),
        }
        for name, shape in shapes.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
                raise InvalidValueError(
                    name,
                    observed=f"{tensor.dtype} {list(tensor.shape)}",
                    limit=f"contiguous int32 {list(shape)}",
                    remedy="build the metadata from the pass's slices",
                )
