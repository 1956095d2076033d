"""The paged KV cache (Kwon et al., 2023, https://arxiv.org/abs/2309.06180) that all variants share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from paceline_engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKV:
    """Keys (after RoPE) and values of every layer, in blocks of ``block_size`` positions.

    A token's *slot* is ``block * block_size + offset``.
    """

    keys: Tensor
    """[n_layers, n_blocks, block_size, n_kv_heads, head_dim]"""
    values: Tensor
    """[n_layers, n_blocks, block_size, n_kv_heads, head_dim]"""
    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values of each layer: views, made once because a decode step has no time to make them."""

    @classmethod
    def allocate(
        cls, spec: ModelSpec, *, n_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Zeroed blocks; on Linux their memory is taken only as they are written."""
        shape = (spec.n_layers, n_blocks, block_size, spec.n_kv_heads, spec.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys=keys, values=values, layers=tuple(zip(keys.unbind(), values.unbind(), strict=True)))

    @property
    def n_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def n_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's keys and values in all layers."""
        for cache in (self.keys, self.values):
            cache[:, target] = cache[:, source]
