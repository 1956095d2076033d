"""The modes that a model offers, best quality first."""

from __future__ import annotations

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Mode, Speculation, Variant


def candidate_modes(
    info: ModelInfo,
    *,
    speculations: tuple[Speculation, ...] | None = None,
    prefix_cache: bool = True,
    batch_cap: int = 8,
) -> tuple[Mode, ...]:
    """Each variant that the model serves, alone and with every kind of speculation.

    ``speculations`` are those that the model offers, unless given. A variant that drafts for itself or for
    a lower one would only add work, so such pairs are left out.
    """
    variants = offered_variants(info)
    drafters = info.speculations if speculations is None else speculations
    return tuple(
        Mode(variant=variant, speculation=speculation, prefix_cache=prefix_cache, batch_cap=batch_cap)
        for rank, variant in enumerate(variants)
        for speculation in (None, *drafters)
        if speculation is None or speculation.draft_variant not in variants[: rank + 1]
    )


def offered_variants(info: ModelInfo) -> tuple[Variant, ...]:
    """The variants to choose from, best first. fp32, the reference for tests, only where it is alone."""
    return tuple(each for each in info.variants if each is not Variant.FP32) or info.variants
