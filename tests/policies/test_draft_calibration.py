"""Speculating modes: offered, probed, predicted, learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import StepTime, Timeline, TokenTime
from paceline_policies.decide import BackendState, Remaining, decide
from paceline_policies.draft_calibration import DraftProbe, draft_probes, with_drafts
from paceline_policies.drift import Acceptance
from paceline_policies.modes import candidate_modes
from paceline_policies.predictor import Predictor
from paceline_policies.profile import Profile
from paceline_policies.slo import SLO

SELF = Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=Variant.INT4)
NGRAM = Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4)
BF16_SELF = Mode(variant=Variant.BF16, speculation=SELF)
DRAFT_S = 0.004


def drafted(
    mode: Mode, accepted: Sequence[int], *, verify_s: float = 0.040, start_s: float = 0.0
) -> Timeline:
    """A timeline whose passes each accept so many of four drafts."""
    spec = mode.speculation
    assert spec is not None
    at, steps, tokens = start_s, [], [TokenTime(made_at_s=start_s)]
    for count in accepted:
        if spec.draft_variant is not None:
            for _ in range(spec.max_draft_tokens):
                steps.append(_step(spec.draft_variant, at, DRAFT_S, tokens=1, drafting=True))
                at += DRAFT_S
        steps.append(_step(mode.variant, at, verify_s, tokens=1 + spec.max_draft_tokens))
        at += verify_s
        tokens.append(TokenTime(made_at_s=at, n_tokens=count + 1))
    return Timeline(
        mode=mode,
        submitted_at_s=start_s - 0.1,
        started_at_s=start_s - 0.1,
        tokens=tuple(tokens),
        finished_at_s=at,
        steps=tuple(steps),
        prompt_tokens=64,
        drafted_tokens=4 * len(accepted),
        accepted_tokens=sum(accepted),
    )


def _step(variant: Variant, at_s: float, seconds: float, *, tokens: int, drafting: bool = False) -> StepTime:
    return StepTime(
        started_at_s=at_s,
        ended_at_s=at_s + seconds,
        variant=variant,
        prefill_tokens=0,
        decode_tokens=tokens,
        n_sequences=1,
        context_tokens=80,
        attended_pairs=80 * tokens,
        drafting=drafting,
    )


def offering(info: ModelInfo) -> ModelInfo:
    return replace(info, speculations=(SELF, NGRAM))


def test_what_the_backend_can_draft_is_offered(info: ModelInfo) -> None:
    """Each variant is offered with each drafter below it, and with none where the backend offers none."""
    assert [mode.label for mode in candidate_modes(offering(info))] == [
        "bf16",
        "bf16+int4x4",
        "bf16+ngramx4",
        "int8",
        "int8+int4x4",
        "int8+ngramx4",
        "int4",
        "int4+ngramx4",
    ]
    assert all(mode.speculation is None for mode in candidate_modes(info))


def test_one_probe_for_each_way_to_draft(info: ModelInfo) -> None:
    """Each speculation is probed once, with the best variant; none where nothing is offered."""
    assert [probe.mode.label for probe in draft_probes(offering(info))] == ["bf16+int4x4", "bf16+ngramx4"]
    assert draft_probes(info) == ()


def test_probes_give_cost_and_acceptance(calibrated: Predictor) -> None:
    """The drafting pass has a cost of its own, and the measured acceptance replaces the assumed one."""
    probe = DraftProbe(mode=BF16_SELF)
    runs = [(probe, drafted(BF16_SELF, [4, 4, 3, 4, 4, 2, 4, 4])), (probe, drafted(BF16_SELF, [4] * 8))]
    profile = with_drafts(calibrated.profile, runs)
    draft = profile.variants[Variant.INT4].draft
    assert draft is not None
    assert draft.step_seconds(_step(Variant.INT4, 0, 1, tokens=1)) == pytest.approx(DRAFT_S)
    assert profile.acceptance["bf16+int4"] > 0.85
    assert profile.proposed["bf16+int4"] == 1.0
    assert profile.variants[Variant.BF16].draft is None
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_a_speculating_mode_is_predicted_from_draft_verify_and_acceptance(
    calibrated: Predictor, snapshot: Callable[..., Snapshot]
) -> None:
    """TPOT = (verify pass + drafts) / tokens per pass, so that good drafts make bf16 faster than alone."""
    probe = DraftProbe(mode=BF16_SELF)
    good = Predictor(with_drafts(calibrated.profile, [(probe, drafted(BF16_SELF, [4, 4, 3, 4] * 3))]))
    poor = Predictor(with_drafts(calibrated.profile, [(probe, drafted(BF16_SELF, [0, 0, 1, 0] * 3))]))

    def tpot(predictor: Predictor, mode: Mode) -> float:
        found = predictor.predict(mode, snapshot(), max_tokens=50).tpot
        assert found is not None
        return found.p50_ms

    plain = tpot(good, Mode(variant=Variant.BF16))
    assert tpot(good, BF16_SELF) < 0.6 * plain
    assert tpot(poor, BF16_SELF) > plain


def test_lossless_speculation_wins_over_lower_quality(
    calibrated: Predictor, info: ModelInfo, snapshot: Callable[..., Snapshot]
) -> None:
    """Where bf16 alone is too slow, bf16 with drafts that are accepted is taken before int8."""
    probe = DraftProbe(mode=BF16_SELF)
    predictor = Predictor(with_drafts(calibrated.profile, [(probe, drafted(BF16_SELF, [4, 4, 3, 4] * 3))]))
    offered = offering(info)
    state = BackendState(
        name="b",
        snapshot=snapshot(),
        predictor=predictor,
        info=offered,
        modes=candidate_modes(offered),
    )
    slo = SLO(ttft_ms=None, tpot_ms=28, e2e_ms=None)
    decision = decide(slo, Remaining(tpot_ms=28), [state], max_tokens=50, now_s=0.0)
    assert decision.chosen is not None
    assert decision.chosen.mode == BF16_SELF
    assert decision.chosen.quality == 1.0
    assert decision.plan is not None
    assert decision.plan.fallback_variants == (Variant.INT8, Variant.INT4)


def test_nothing_is_drafted_where_nothing_is_decoded(
    calibrated: Predictor, info: ModelInfo, snapshot: Callable[..., Snapshot]
) -> None:
    """A choice among options, and an answer of one token, consider no speculating mode."""
    offered = offering(info)
    state = BackendState(
        name="b",
        snapshot=snapshot(),
        predictor=calibrated,
        info=offered,
        modes=candidate_modes(offered),
    )
    for fields in ({"kind": "choose", "option_tokens": (2, 3)}, {}):
        arguments: dict[str, Any] = {"max_tokens": 1, "now_s": 0.0} | fields
        decision = decide(SLO(), Remaining(), [state], **arguments)
        assert all(each.mode.speculation is None for each in decision.candidates)


def test_acceptance_and_draft_cost_are_learned_from_traffic(
    info: ModelInfo, calibrated: Predictor, snapshot: Callable[..., Snapshot]
) -> None:
    """Without any probe, some answers teach the cost of drafting passes and what is accepted."""
    predictor = Predictor(calibrated.profile)
    for number in range(12):
        line = drafted(BF16_SELF, [4, 3, 4, 4, 4, 4], start_s=10.0 * number)
        predictor.observe(BF16_SELF, snapshot(64), None, line)
    profile = predictor.profile
    assert profile.acceptance["bf16+int4"] > 0.8
    draft = profile.variants[Variant.INT4].draft
    assert draft is not None
    assert draft.step_seconds(_step(Variant.INT4, 0, 1, tokens=1)) == pytest.approx(DRAFT_S, rel=0.05)
    assert len(profile.speculation_samples["bf16+int4"]) == 12
    # What speculation errs by says nothing of the variant alone.
    assert profile.variants[Variant.BF16].samples == calibrated.profile.variants[Variant.BF16].samples


def test_a_lookup_that_finds_little_verifies_little(snapshot: Callable[..., Snapshot]) -> None:
    """The share of proposed tokens is learned, so that passes without drafts are not charged for them."""
    mode = Mode(variant=Variant.BF16, speculation=NGRAM)
    acceptance = Acceptance({})
    before = acceptance.drafts_per_pass(mode)
    line = replace(drafted(mode, [0, 0, 4, 0, 0, 0]), drafted_tokens=4)
    for _ in range(20):
        acceptance.observe(mode, line)
    assert acceptance.drafts_per_pass(mode) == pytest.approx(4 / 6, abs=0.05)
    assert acceptance.drafts_per_pass(mode) < before


def test_another_target_of_the_same_drafter_stands_in() -> None:
    """What int4 drafts for bf16 tells what it may draft for int8, before anything else does."""
    acceptance = Acceptance({"bf16+int4": 0.9})
    assert acceptance.rate(Mode(variant=Variant.INT8, speculation=SELF)) == 0.9
    assert acceptance.rate(Mode(variant=Variant.INT8, speculation=NGRAM)) == 0.2
