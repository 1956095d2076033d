from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline_engine.backends.base import ModelInfo
from paceline_engine.errors import InvalidValueError
from paceline_engine.mode import Mode, Variant
from paceline_engine.timeline import Timeline, TokenTime
from paceline_policies.calibration import Probe, fit_profile, probes
from paceline_policies.modes import candidate_modes
from paceline_policies.predictor import Predictor
from paceline_policies.profile import Profile


@pytest.mark.parametrize("quick", [False, True])
def test_probes_cover_and_are_small(info: ModelInfo, quick: bool) -> None:
    """Each variant gets prompts from one token to many, alone and four at once, repeated sizes included."""
    found = probes(info, quick)
    for variant in info.variants:
        own = [each for each in found if each.variant is variant]
        assert min(each.prompt_tokens for each in own) == 1
        assert max(each.prompt_tokens for each in own) >= (300 if quick else 1000)
        assert {each.concurrency for each in own} == {1, 4}
        assert sum(each.prompt_tokens * each.concurrency for each in own) < 2300
        assert sum(each.max_tokens for each in own) < 100


@pytest.mark.parametrize("context", [1, 2, 9, 64, 300])
def test_probes_fit_the_context(info: ModelInfo, context: int) -> None:
    """No probe needs more than the context holds."""
    for each in probes(replace(info, context_tokens=max(2, context))):
        assert each.prompt_tokens >= 1
        assert each.max_tokens >= 1
        assert each.prompt_tokens + each.max_tokens <= max(2, context)


def test_reference_precision_is_probed_only_alone(info: ModelInfo) -> None:
    """fp32 is left out beside other variants, and is all there is where it stands alone."""
    both = replace(info, variants=(Variant.FP32, Variant.BF16))
    assert {each.variant for each in probes(both)} == {Variant.BF16}
    alone = replace(info, variants=(Variant.FP32,))
    assert {each.variant for each in probes(alone)} == {Variant.FP32}
    assert [each.variant for each in candidate_modes(alone)] == [Variant.FP32]
    assert [each.variant for each in candidate_modes(both)] == [Variant.BF16]


def test_errors_are_seeded(calibrated: Predictor) -> None:
    """Each variant starts with enough left-out errors for a 0.9 quantile of its own."""
    for each in calibrated.profile.variants.values():
        assert len(each.samples) >= 9
        assert 0 < each.step.error < 0.1
    assert calibrated.profile.fitted_error < 0.1
    assert calibrated.profile.read_bytes_per_s[Variant.BF16] > 1e9


def test_one_stalled_probe_does_not_rule_p90(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """A probe that the machine stalled twentyfold leaves the fit and the first p90 usable."""
    machine = make_machine(seed=5)
    runs = []
    for each in probes(info):
        machine.slowdown = 20.0 if each.prompt_tokens == 128 else 1.0
        runs.append((each, machine.probe(each)))
    for variant in fit_profile(info, runs).variants.values():
        assert len(variant.samples) >= 8
        assert all(0.5 < sample[2] < 2 for sample in variant.samples)


def test_phases_alone_calibrate(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """Probes of a backend without step records are fitted from their phases."""
    machine = make_machine(seed=3)
    runs = [
        (each, replace(machine.probe(each), steps=(), started_at_s=None))
        for each in probes(info)
        if each.concurrency == 1
    ]
    profile = fit_profile(info, runs)
    assert set(profile.variants) == set(info.variants)
    assert profile.fitted_error < 0.2


def test_one_probe_is_enough_and_none_is_refused(make_machine: Callable[..., Any], info: ModelInfo) -> None:
    """A single timeline gives a profile; none, or none that made a token, is refused."""
    probe = Probe(variant=Variant.BF16, prompt_tokens=10, max_tokens=1)
    assert Variant.BF16 in fit_profile(info, [(probe, make_machine().probe(probe))]).variants
    with pytest.raises(InvalidValueError):
        fit_profile(info, [])
    with pytest.raises(InvalidValueError):
        fit_profile(info, [(probe, Timeline(mode=Mode(variant=Variant.BF16), submitted_at_s=0.0))])
    instant = Timeline(
        mode=Mode(variant=Variant.BF16),
        submitted_at_s=1.0,
        tokens=(TokenTime(made_at_s=1.0),),
        prompt_tokens=1,
    )
    with pytest.raises(InvalidValueError):
        fit_profile(info, [(probe, instant)])


def test_profile_round_trip(calibrated: Predictor, info: ModelInfo) -> None:
    """A profile survives JSON unchanged and knows what it was measured with."""
    profile = calibrated.profile
    again = Profile.from_dict(json.loads(json.dumps(profile.to_dict(), allow_nan=False)))
    assert again == profile
    assert again.matches(info, version="1")
    assert not again.matches(info, version="2")
    assert not again.matches(replace(info, fingerprint="other"), version="1")
    assert not again.matches(replace(info, device_name="other"), version="1")


def test_a_profile_tells_what_has_changed_since(calibrated: Predictor, info: ModelInfo) -> None:
    """Each fact that differs is named with both values; long digests are cut short, equal facts left out."""
    digest, other = "a" * 64, "b" * 64
    profile = replace(calibrated.profile, speed_facts={"model": digest, "kernels": "avx2", "old": "x"})
    now = replace(info, speed_facts={"model": other, "kernels": "avx2", "new": "y"})
    assert profile.changes(now, version="2") == (
        "version was 1, is 2",
        "model was aaaaaaaaaaaa…, is bbbbbbbbbbbb…",
        "old counts no more",
        "new counts too",
    )
    same = replace(info, speed_facts=profile.speed_facts)
    assert profile.changes(same, version="1") == ()


def paths(data: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The path of every value in nested dicts and lists."""
    if isinstance(data, dict):
        return [found for key, value in data.items() for found in [(*path, key), *paths(value, (*path, key))]]
    if isinstance(data, list):
        return [found for i, value in enumerate(data[:2]) for found in paths(value, (*path, i))]
    return [path]


@pytest.mark.parametrize("wrong", [None, "x", -1.0, float("nan"), float("inf"), [], {"x": 1}, True])
def test_damage_anywhere_is_refused_or_harmless(calibrated: Predictor, wrong: object) -> None:
    """Any value of a saved profile replaced by nonsense gives one clear error, or a usable profile."""
    whole = json.dumps(calibrated.profile.to_dict())
    refused = 0
    for path in paths(json.loads(whole)):
        data = json.loads(whole)
        at = data
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = wrong
        try:
            Predictor(Profile.from_dict(data))
        except InvalidValueError as error:
            refused += "calibration" in error.remedy
    assert refused > 20


@pytest.mark.parametrize("data", [None, [], "", {}, {"format": 0}, {"format": 99}, {"format": 1}])
def test_foreign_data_is_refused(data: object) -> None:
    """What is no profile of this format is refused with the advice to calibrate again."""
    with pytest.raises(InvalidValueError, match="calibration"):
        Profile.from_dict(data)
