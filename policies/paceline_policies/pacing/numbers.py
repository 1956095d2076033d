"""The numbers that a step policy is made from: a machine's speed, as the predictor knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant
from paceline_policies.drafting import TypicalDrafting
from paceline_policies.profile import Profile
from paceline_policies.step_model import StepModel

_REPRESENTATIVE = ((0, 1, 512), (64, 0, 64), (256, 1, 512))
"""(prefill tokens, decode tokens, context): the passes by which two sets of numbers are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantNumbers:
    """One variant's speed."""

    step: StepModel
    prefill_scale: float = 1.0
    """How much slower than the fit passes that prefill run of late."""
    decode_scale: float = 1.0

    def pass_s(self, *, prefill: int, decode: float, context: float, pairs: float) -> float:
        """Predicted seconds of one pass."""
        seconds = self.step.pass_seconds(prefill=prefill, decode=decode, context=context, pairs=pairs)
        return seconds * (self.prefill_scale if prefill else self.decode_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """All of them; empty where nothing is known yet."""

    variants: Mapping[Variant, VariantNumbers] = field(default_factory=dict[Variant, VariantNumbers])
    drafts: Mapping[Variant, VariantNumbers] = field(default_factory=dict[Variant, VariantNumbers])
    """The cost of a pass that only drafts, by the variant that drafts."""
    acceptance: Mapping[str, float] = field(default_factory=dict[str, float])
    """Probability that a drafted token is accepted, by drafter (see ``drafting``)."""
    proposed: Mapping[str, float] = field(default_factory=dict[str, float])
    """Share of the longest draft that a pass verifies, by drafter."""
    gap_s: float = 0.0
    """Between two steps."""

    @classmethod
    def of_profile(cls, profile: Profile) -> StepNumbers:
        """What a profile says; variants whose speed is still a guess are left out."""
        known = {name: each for name, each in profile.variants.items() if not each.assumed}
        typical = TypicalDrafting.of(profile.drafted)
        return cls(
            variants={
                name: VariantNumbers(
                    step=each.step, prefill_scale=each.prefill_scale, decode_scale=each.decode_scale
                )
                for name, each in known.items()
            },
            drafts={
                name: VariantNumbers(step=each.draft, decode_scale=each.draft_scale)
                for name, each in known.items()
                if each.draft is not None
            },
            acceptance=typical.rates,
            proposed=typical.shares,
            gap_s=profile.gap_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the worker."""
        return {
            "variants": {str(name): _plain(each) for name, each in self.variants.items()},
            "drafts": {str(name): _plain(each) for name, each in self.drafts.items()},
            "acceptance": dict(self.acceptance),
            "proposed": dict(self.proposed),
            "gap_s": self.gap_s,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepNumbers:
        """Read what ``to_dict`` gave; an empty mapping is a machine that nothing is known of.

        Raises:
            InvalidValueError: another form, or numbers that are no finite durations.
        """
        try:
            return cls(
                variants={Variant(k): _read(v) for k, v in data.get("variants", {}).items()},
                drafts={Variant(k): _read(v) for k, v in data.get("drafts", {}).items()},
                acceptance={str(k): min(1.0, _number(v)) for k, v in data.get("acceptance", {}).items()},
                proposed={str(k): min(1.0, _number(v)) for k, v in data.get("proposed", {}).items()},
                gap_s=_number(data.get("gap_s", 0.0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidValueError(
                "step_policy_numbers",
                observed=data,
                limit="what StepNumbers.to_dict gives, with finite numbers of 0 or more",
                remedy=f"mend this: {type(error).__name__}: {error}",
            ) from error

    def moved_from(self, other: StepNumbers) -> float:
        """The largest relative change of what typical passes cost, or of an acceptance; 0 for none.

        Infinite where the variants differ.
        """
        if self.variants.keys() != other.variants.keys() or self.drafts.keys() != other.drafts.keys():
            return math.inf
        pairs = [(self.variants[name], other.variants[name]) for name in self.variants]
        pairs += [(self.drafts[name], other.drafts[name]) for name in self.drafts]
        changes = [_change(new, old) for new, old in pairs]
        kinds = self.acceptance.keys() | other.acceptance.keys()
        changes += [abs(self.acceptance.get(kind, 0.0) - other.acceptance.get(kind, 0.0)) for kind in kinds]
        return max(changes, default=0.0)


def _change(new: VariantNumbers, old: VariantNumbers) -> float:
    def costs(each: VariantNumbers) -> list[float]:
        return [
            each.pass_s(prefill=prefill, decode=decode, context=context, pairs=(prefill + decode) * context)
            for prefill, decode, context in _REPRESENTATIVE
        ]

    pairs = zip(costs(new), costs(old), strict=True)
    return max(abs(after - before) / max(after, before, 1e-9) for after, before in pairs)


def _plain(each: VariantNumbers) -> dict[str, Any]:
    return {
        "step": {item.name: getattr(each.step, item.name) for item in fields(StepModel)},
        "prefill_scale": each.prefill_scale,
        "decode_scale": each.decode_scale,
    }


def _read(data: Mapping[str, Any]) -> VariantNumbers:
    step = {item.name: _number(data["step"][item.name]) for item in fields(StepModel)}
    knee = int(step.pop("knee"))
    return VariantNumbers(
        step=StepModel(**step, knee=knee),
        prefill_scale=_number(data["prefill_scale"]),
        decode_scale=_number(data["decode_scale"]),
    )


def _number(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r} is no finite number of 0 or more")
    return number
