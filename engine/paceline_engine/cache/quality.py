"""Whose KV may serve whom. The order of the variants' quality stands here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_engine.mode import Variant

BEST_FIRST: tuple[Variant, ...] = (
    Variant.FP32,
    Variant.BF16,
    Variant.INT8,
    Variant.FP8,
    Variant.INT4,
)
_RANK = {variant: rank for rank, variant in enumerate(BEST_FIRST)}


def serves(written_by: Variant, asked_by: Variant) -> bool:
    """Whether KV of ``written_by`` is good enough for a request that runs as ``asked_by``."""
    return _RANK[written_by] <= _RANK[asked_by]


def worst(variants: Iterable[Variant]) -> Variant:
    """The lowest quality among ``variants``: that of KV computed on top of all of them."""
    return max(variants, key=_RANK.__getitem__)


def best(variants: Iterable[Variant]) -> Variant:
    """The highest quality among ``variants``."""
    return min(variants, key=_RANK.__getitem__)
