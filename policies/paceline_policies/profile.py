"""What was learned of one model on one machine, ready to be saved and read back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline_engine.backends.base import ModelInfo
from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant
from paceline_policies.conformal import Sample
from paceline_policies.drafting import Drafted
from paceline_policies.quality import Quality
from paceline_policies.step_model import StepModel

FORMAT = 3
"""Rises when what a saved profile means changes; others are refused."""

_STEP_FIELDS = ("fixed_s", "chunk_s", "small_s", "large_s", "decode_s", "kv_s", "pair_s", "knee", "error")
_QUALITY_FIELDS = ("value", "deviation", "perplexity_ratio", "kl_nats", "top1_agreement", "n_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantProfile:
    """One variant's speed."""

    step: StepModel
    prefill_scale: float = 1.0
    """How much slower than the fit steps that prefill run of late."""
    decode_scale: float = 1.0
    verify_scale: float = 1.0
    """Of passes that verify drafts: several tokens of one sequence."""
    samples: tuple[Sample, ...] = ()
    """Recent ratios measured / predicted, oldest first."""
    assumed: bool = False
    """The step model is a guess that traffic has yet to replace."""
    draft: StepModel | None = None
    """What a pass that only drafts costs: cheaper than a full one, since its output matrix is reduced."""
    draft_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was learned of one model on one machine."""

    fingerprint: str
    """Of the model, from ``ModelInfo.fingerprint``."""
    device: str
    """The processor's name where it is known, else its kind."""
    version: str = ""
    """Of Paceline: another version may run the same model at another speed."""
    speed_facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """From ``ModelInfo.speed_facts``, for telling what has changed since."""
    variants: Mapping[Variant, VariantProfile] = field(default_factory=dict[Variant, VariantProfile])
    qualities: Mapping[Variant, Quality] = field(default_factory=dict[Variant, Quality])
    overhead_s: float = 0.0
    """From submission to the first step of an idle engine."""
    gap_s: float = 0.0
    """Between two steps of an idle engine."""
    drafted: Mapping[str, tuple[Drafted, ...]] = field(default_factory=dict[str, "tuple[Drafted, ...]"])
    """Recent answers with drafts, by drafter, oldest first."""
    read_bytes_per_s: Mapping[Variant, float] = field(default_factory=dict[Variant, float])
    """Weights read per second by a decode step of one sequence."""

    @property
    def fitted_error(self) -> float:
        """The worst of the variants' median relative errors over their calibration steps."""
        return max((each.step.error for each in self.variants.values()), default=0.0)

    def matches(self, info: ModelInfo, *, version: str) -> bool:
        """Whether it was measured with this model, on this processor, by this version."""
        device = info.device_name or info.device
        return (self.fingerprint, self.device, self.version) == (info.fingerprint, device, version)

    def changes(self, info: ModelInfo, *, version: str) -> tuple[str, ...]:
        """What is no longer as it was measured, in words; empty where ``matches``."""
        now = {"version": version, "processor": info.device_name or info.device, **info.speed_facts}
        before = {"version": self.version, "processor": self.device, **self.speed_facts}
        return tuple(
            f"{name} was {_brief(before[name])}, is {_brief(now[name])}"
            if name in before and name in now
            else f"{name} counts too"
            if name in now
            else f"{name} counts no more"
            for name in dict.fromkeys((*before, *now))
            if before.get(name) != now.get(name)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "device": self.device,
            "version": self.version,
            "speed_facts": dict(self.speed_facts),
            "variants": {str(name): _variant_to_dict(each) for name, each in self.variants.items()},
            "qualities": {
                str(name): {field: getattr(each, field) for field in _QUALITY_FIELDS}
                for name, each in self.qualities.items()
            },
            "overhead_s": self.overhead_s,
            "gap_s": self.gap_s,
            "drafted": {
                name: [[each.repetition, each.rate, each.share, each.ratio] for each in found]
                for name, found in self.drafted.items()
            },
            "read_bytes_per_s": {str(name): value for name, value in self.read_bytes_per_s.items()},
        }

    @classmethod
    def from_dict(cls, data: object) -> Profile:
        """Read what ``to_dict`` gave.

        Raises:
            InvalidValueError: damaged, or written in another format. Calibrate again.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            seen = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise _damaged(seen, limit=f"a saved profile of format {FORMAT}")
        try:
            return cls(
                fingerprint=_text(data["fingerprint"]),
                device=_text(data["device"]),
                version=_text(data["version"]),
                speed_facts={_text(k): _text(v) for k, v in data.get("speed_facts", {}).items()},
                variants={Variant(k): _variant_from_dict(v) for k, v in data["variants"].items()},
                qualities={Variant(name): _quality(each) for name, each in data["qualities"].items()},
                overhead_s=_number(data["overhead_s"]),
                gap_s=_number(data["gap_s"]),
                drafted={_text(k): tuple(map(_drafted, found)) for k, found in data["drafted"].items()},
                read_bytes_per_s={Variant(k): _number(v) for k, v in data["read_bytes_per_s"].items()},
            )
        except InvalidValueError as error:
            raise _damaged(error.observed, limit=str(error.limit)) from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise _damaged(error, limit="complete and of the right types") from error


def _variant_to_dict(each: VariantProfile) -> dict[str, Any]:
    return {
        "step": _step_to_dict(each.step),
        "prefill_scale": each.prefill_scale,
        "decode_scale": each.decode_scale,
        "verify_scale": each.verify_scale,
        "samples": [list(sample) for sample in each.samples],
        "assumed": each.assumed,
        "draft": None if each.draft is None else _step_to_dict(each.draft),
        "draft_scale": each.draft_scale,
    }


def _step_to_dict(step: StepModel) -> dict[str, float]:
    return {name: getattr(step, name) for name in _STEP_FIELDS}


def _variant_from_dict(data: Mapping[str, Any]) -> VariantProfile:
    draft = data.get("draft")
    return VariantProfile(
        step=_step_from_dict(data["step"]),
        prefill_scale=_positive(data["prefill_scale"]),
        decode_scale=_positive(data["decode_scale"]),
        verify_scale=_positive(data["verify_scale"]),
        samples=_samples(data["samples"]),
        assumed=bool(data["assumed"]),
        draft=None if draft is None else _step_from_dict(draft),
        draft_scale=_positive(data.get("draft_scale", 1.0)),
    )


def _step_from_dict(data: Mapping[str, Any]) -> StepModel:
    step = {name: _number(data[name]) for name in _STEP_FIELDS if name != "knee"}
    return StepModel(**step, knee=int(_number(data["knee"])))


def _samples(data: Sequence[Any]) -> tuple[Sample, ...]:
    return tuple(
        (_positive(ttft), None if tpot is None else _positive(tpot), _positive(e2e))
        for ttft, tpot, e2e in data
    )


def _drafted(row: Sequence[Any]) -> Drafted:
    repetition, rate, share, ratio = row
    return Drafted(
        repetition=None if repetition is None else _number(repetition),
        rate=min(1.0, _number(rate)),
        share=min(1.0, _number(share)),
        ratio=_positive(ratio),
    )


def _quality(data: Mapping[str, Any]) -> Quality:
    def known(name: str) -> float | None:
        return None if data.get(name) is None else _number(data[name])

    return Quality(
        value=_number(data["value"]),
        deviation=_number(data["deviation"]),
        perplexity_ratio=known("perplexity_ratio"),
        kl_nats=known("kl_nats"),
        top1_agreement=known("top1_agreement"),
        n_tokens=int(_number(data.get("n_tokens", 0))),
    )


def _brief(text: str) -> str:
    """A digest is known by its beginning."""
    return f"{text[:12]}…" if len(text) >= 32 and text.isalnum() else text


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _damaged(value, limit="text where text belongs")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _damaged(value, limit="a number where a number belongs")
    if not (math.isfinite(value) and value >= 0):
        raise _damaged(value, limit="made of finite numbers, 0 or more")
    return float(value)


def _positive(value: Any) -> float:
    if (number := _number(value)) == 0:
        raise _damaged(value, limit="made of ratios above 0")
    return number


def _damaged(observed: object, *, limit: str) -> InvalidValueError:
    return InvalidValueError(
        "profile", observed=observed, limit=limit, remedy="drop it and run the calibration again"
    )
