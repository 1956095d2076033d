from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from paceline_engine.backends.embedded.loop import load_policy
from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Variant
from paceline_policies.pacing import STEP_POLICY, Pacer, StepNumbers, make_step_policy
from paceline_policies.profile import Profile, VariantProfile
from paceline_policies.step_model import StepModel


def test_numbers_survive_the_way_to_the_worker(kit: Any) -> None:
    """What JSON or a pickle carries is read back as it was."""
    numbers = replace(
        kit.numbers(), drafts=kit.numbers(0.5).variants, acceptance={"bf16+int4": 0.7}, proposed={"x": 0.5}
    )
    assert StepNumbers.from_dict(json.loads(json.dumps(numbers.to_dict()))) == numbers
    assert StepNumbers.from_dict({}) == StepNumbers()


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, "fast", None])
def test_impossible_numbers_are_refused(kit: Any, value: object) -> None:
    """A duration that is no finite number of 0 or more is named, and no policy is made."""
    data = kit.numbers().to_dict()
    data["variants"]["bf16"]["step"]["fixed_s"] = value
    with pytest.raises(InvalidValueError, match="step_policy_numbers"):
        make_step_policy(data)


def test_the_named_factory_is_importable() -> None:
    """The worker finds the factory by its name and makes a policy without numbers."""
    policy = load_policy(STEP_POLICY, {})
    assert policy is not None
    assert isinstance(policy._policy, Pacer)


def test_a_guess_is_no_number() -> None:
    """Variants that were never measured are left out of a profile's numbers."""
    known, guess = (
        VariantProfile(step=StepModel(fixed_s=0.1), decode_scale=2.0),
        VariantProfile(step=StepModel(fixed_s=0.1), assumed=True),
    )
    profile = Profile(
        fingerprint="f", device="d", variants={Variant.BF16: known, Variant.INT4: guess}, gap_s=0.001
    )
    numbers = StepNumbers.of_profile(profile)
    assert set(numbers.variants) == {Variant.BF16}
    assert numbers.variants[Variant.BF16].pass_s(prefill=0, decode=1, context=9, pairs=9) == 0.2
    assert numbers.gap_s == 0.001


def test_how_far_numbers_have_moved(kit: Any) -> None:
    """The largest relative change of a typical pass; none for the same, infinite for other variants."""
    numbers = kit.numbers()
    assert numbers.moved_from(kit.numbers()) == 0.0
    assert kit.numbers(1.1).moved_from(numbers) == pytest.approx(0.1 / 1.1)
    assert numbers.moved_from(StepNumbers()) == math.inf
    assert replace(numbers, acceptance={"a": 0.3}).moved_from(numbers) == 0.3
