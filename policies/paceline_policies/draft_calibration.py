"""What speculation costs and what it brings, measured briefly, so that the first decision knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Mode, Speculation, Variant
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import StepTime, Timeline
from paceline_policies.modes import candidate_modes
from paceline_policies.predictor import Predictor
from paceline_policies.profile import Profile
from paceline_policies.step_model import fit

PROBE_TOKENS = 32
"""Output of each probe: some ten passes, from which acceptance is known to about a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProbe:
    """A request in a speculating mode, after ordinary text: what is accepted depends on what is said."""

    mode: Mode
    max_tokens: int = PROBE_TOKENS


def draft_probes(info: ModelInfo) -> tuple[DraftProbe, ...]:
    """One probe for each speculation that the model offers, with the best variant that it can serve.

    Other targets of the same drafter are predicted from it until traffic tells them apart.
    """
    found: dict[Speculation, DraftProbe] = {}
    for mode in candidate_modes(info, prefix_cache=False):
        if mode.speculation is not None:
            found.setdefault(mode.speculation, DraftProbe(mode=mode))
    return tuple(found.values())


def with_drafts(profile: Profile, runs: Sequence[tuple[DraftProbe, Snapshot, Timeline]]) -> Profile:
    """The profile with the cost of drafting passes, and with what became of the drafts of each run."""
    drafting: dict[Variant, list[StepTime]] = {}
    for _, _, line in runs:
        for step in line.steps:
            if step.drafting:
                drafting.setdefault(step.variant, []).append(step)
    variants = dict(profile.variants)
    for variant, steps in drafting.items():
        if variant in variants and (usable := _usable(steps)):
            variants[variant] = replace(variants[variant], draft=fit(usable), draft_scale=1.0)
    predictor = Predictor(replace(profile, variants=variants))
    for probe, snapshot, line in runs:
        predictor.observe(probe.mode, snapshot, None, line)
    return predictor.profile


def _usable(steps: Sequence[StepTime]) -> list[StepTime]:
    """Without the first, which pays for first allocations, where others are left."""
    timed = [step for step in steps if step.ended_at_s > step.started_at_s]
    return timed[1:] if len(timed) > 2 else timed
