"""The modes that a model offers, best quality first."""

from __future__ import annotations

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Mode, Speculation, Variant


def candidate_modes(
    info: ModelInfo,
    *,
    speculations: tuple[Speculation, ...] = (),
    prefix_cache: bool = True,
    batch_cap: int = 8,
) -> tuple[Mode, ...]:
    """One mode for each variant that the model serves, then each with every kind of speculation.

    A variant that drafts for itself would only add work, so such pairs are left out.
    """
    return tuple(
        Mode(variant=variant, speculation=speculation, prefix_cache=prefix_cache, batch_cap=batch_cap)
        for variant in offered_variants(info)
        for speculation in (None, *speculations)
        if speculation is None or speculation.draft_variant is not variant
    )


def offered_variants(info: ModelInfo) -> tuple[Variant, ...]:
    """The variants to choose from, best first. fp32, the reference for tests, only where it is alone."""
    return tuple(each for each in info.variants if each is not Variant.FP32) or info.variants
