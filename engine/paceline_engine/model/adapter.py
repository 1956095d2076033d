"""LoRA adapters (Hu et al., 2021) over the weights of any variant, for the streams that ask for one.

The low-rank products are run beside the variant's own, in fp32 sums, and added: the weights stay as they
are, and streams with and without adapters share a pass. (S-LoRA, Sheng et al., 2023.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from paceline_engine.cuda.attention import upload
from paceline_engine.cuda.support import Support, place
from paceline_engine.errors import UnsupportedModelError
from paceline_engine.loading.adapter_files import AdapterTensors, LowRankTensors
from paceline_engine.mode import Variant
from paceline_engine.model.ops import linear
from paceline_engine.model.spec import ModelSpec
from paceline_engine.quant import layout
from paceline_engine.quant.matrix import Matrix, pack, to_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LowRank:
    """Added to some of a stacked matrix's outputs."""

    down: Matrix
    """[r, K]"""
    up: Matrix
    """[n, r]"""
    scale: float
    first: int
    """Of the outputs, where these n begin."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """An adapter's matrices on the runner's device. Never changed: a stream keeps the one it began with."""

    digest: str
    """Of the weights: what keys cached prefixes."""
    parts: Mapping[str, tuple[_LowRank, ...]]
    """By the part's name in ``quant.layout``."""

    @classmethod
    def build(
        cls, read: AdapterTensors, spec: ModelSpec, *, device: torch.device, support: Support | None
    ) -> Self:
        """Fit what was read to a model.

        Raises:
            UnsupportedModelError: it is for another model, or for matrices that take no adapter.
        """
        targets = _targets(spec)
        parts: dict[str, list[_LowRank]] = {}
        for name, update in read.updates.items():
            if name not in targets:
                raise UnsupportedModelError(
                    read.path,
                    tensor=name,
                    reason="is no projection of this model's layers, which alone take adapters",
                    remedy="use an adapter that was trained on this model's attention and feed-forward",
                )
            part, first, n_outputs = targets[name]
            _check_shape(read.path, name, update, n_outputs=n_outputs, n_inputs=part.shape[1])
            down, up = (_placed(each, device, support) for each in (update.down, update.up))
            parts.setdefault(part.name, []).append(
                _LowRank(down=down, up=up, scale=update.scale, first=first)
            )
        return cls(digest=read.digest, parts={name: tuple(found) for name, found in parts.items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdaptedRows:
    """The rows of a pass that one adapter changes."""

    adapter: Adapter
    rows: Tensor | None
    """int64; None for all."""

    def add_to(self, y: Tensor, x: Tensor, part: str) -> None:
        """Add the adapter's share to y = x @ part.T, in place."""
        for one in self.adapter.parts.get(part, ()):
            inputs = x if self.rows is None else x[self.rows]
            share = linear(linear(inputs, one.down).mul_(one.scale), one.up)
            outputs = y.narrow(1, one.first, share.shape[1])
            if self.rows is None:
                outputs += share
            else:
                outputs.index_add_(0, self.rows, share)


def adapted_rows(
    adapters: Sequence[Adapter | None],
    owner: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    device: torch.device,
) -> tuple[AdaptedRows, ...]:
    """Which rows each adapter changes.

    Args:
        adapters: of each sequence.
        owner: the sequence of each row.
    """
    found: list[AdaptedRows] = []
    for adapter in dict.fromkeys(each for each in adapters if each is not None):
        mine = np.array([each is adapter for each in adapters])[owner]
        if mine.any():
            rows = None if mine.all() else upload(np.flatnonzero(mine), device)
            found.append(AdaptedRows(adapter=adapter, rows=rows))
    return tuple(found)


def _targets(spec: ModelSpec) -> dict[str, tuple[layout.Part, int, int]]:
    """Tensors of the checkpoint that take adapters: the part they stand in, their first output, how many."""
    q_size, kv_size = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    found: dict[str, tuple[layout.Part, int, int]] = {}
    for part in layout.matrices(spec):
        if part.name == layout.OUTPUT:
            continue
        n_sources = len(part.sources)
        sizes = (q_size, kv_size, kv_size) if n_sources == 3 else (part.shape[0] // n_sources,) * n_sources
        first = 0
        for source, size in zip(part.sources, sizes, strict=True):
            found[source] = part, first, size
            first += size
    return found


def _check_shape(path: str, name: str, update: LowRankTensors, *, n_outputs: int, n_inputs: int) -> None:
    shape = update.up.shape[0], update.down.shape[1]
    if shape != (n_outputs, n_inputs):
        raise UnsupportedModelError(
            path,
            tensor=name,
            reason=f"is [{n_outputs}, {n_inputs}] in this model, the adapter's is {list(shape)}",
            remedy="use an adapter that was trained on this model",
        )


def _placed(values: Tensor, device: torch.device, support: Support | None) -> Matrix:
    """In bf16 where they are stored so, else in fp32, which holds every value exactly."""
    variant = Variant.BF16 if values.dtype == torch.bfloat16 else Variant.FP32
    matrix = to_device(pack(values, variant), variant, device)
    return matrix if support is None else place(matrix, support)
