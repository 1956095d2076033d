"""Speculating modes: offered, probed, predicted, learned."""

from __future__ import annotations

import json
import random
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


def probed(calibrated: Predictor, look: Snapshot, accepted: Sequence[int]) -> Profile:
    """The profile after twenty probes whose drafts all fared like this."""
    run = (DraftProbe(mode=BF16_SELF), look, drafted(BF16_SELF, accepted))
    return with_drafts(calibrated.profile, [run] * 20)


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


def test_probes_give_cost_and_acceptance(calibrated: Predictor, snapshot: Callable[..., Snapshot]) -> None:
    """The drafting pass has a cost of its own, and what became of each probe's drafts is kept."""
    probe = DraftProbe(mode=BF16_SELF)
    look = replace(snapshot(64), repetition=0.25)
    runs = [(probe, look, drafted(BF16_SELF, accepted)) for accepted in ([4, 4, 3, 4, 4, 2, 4, 4], [4] * 8)]
    profile = with_drafts(calibrated.profile, runs)
    draft = profile.variants[Variant.INT4].draft
    assert draft is not None
    assert draft.step_seconds(_step(Variant.INT4, 0, 1, tokens=1)) == pytest.approx(DRAFT_S)
    kept = profile.drafted["int4"]
    assert [each.share for each in kept] == [1.0, 1.0]
    assert [each.repetition for each in kept] == [0.25, 0.25]
    assert 0.9 < kept[0].rate < kept[1].rate == 1.0
    assert profile.variants[Variant.BF16].draft is None
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_a_speculating_mode_is_predicted_from_draft_verify_and_acceptance(
    calibrated: Predictor, snapshot: Callable[..., Snapshot]
) -> None:
    """TPOT = (verify pass + drafts) / tokens per pass, so that good drafts make bf16 faster than alone."""
    good = Predictor(probed(calibrated, snapshot(64), [4, 4, 3, 4] * 3))
    poor = Predictor(probed(calibrated, snapshot(64), [0, 0, 1, 0] * 3))

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
    predictor = Predictor(probed(calibrated, snapshot(64), [4, 4, 3, 4] * 3))
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
    assert [each.rate > 0.9 for each in profile.drafted["int4"]] == [True] * 12
    draft = profile.variants[Variant.INT4].draft
    assert draft is not None
    assert draft.step_seconds(_step(Variant.INT4, 0, 1, tokens=1)) == pytest.approx(DRAFT_S, rel=0.05)
    # What drafting errs by says nothing of the variant alone.
    assert profile.variants[Variant.BF16].samples == calibrated.profile.variants[Variant.BF16].samples
    assert profile.variants[Variant.BF16].decode_scale == 1.0


def test_prompts_that_repeat_themselves_alike_tell_of_each_other(
    calibrated: Predictor, snapshot: Callable[..., Snapshot]
) -> None:
    """Where repetitive prompts had their drafts accepted and others had not, each kind is told apart."""
    mode = Mode(variant=Variant.BF16, speculation=NGRAM)
    predictor = Predictor(calibrated.profile)
    prompts = [(0.4, [4] * 6), (0.1, [0, 0, 1, 0, 0, 0])]
    for number in range(40):
        repetition, accepted = prompts[number % 2]
        look = replace(snapshot(64), repetition=repetition)
        predictor.observe(mode, look, None, drafted(mode, accepted, start_s=10.0 * number))
    for repetition, accepted in prompts:
        look = replace(snapshot(64), repetition=repetition)
        line = drafted(mode, accepted)
        found = predictor.predict(mode, look, max_tokens=line.n_tokens).tpot
        assert found is not None
        assert found.p50_ms == pytest.approx(line.tpot_ms(), rel=0.1)
        assert found.p90_ms < 1.5 * found.p50_ms
    unlike = predictor.predict(mode, replace(snapshot(64), repetition=0.9), max_tokens=30).tpot
    assert unlike is not None
    assert unlike.p90_ms > 2 * unlike.p50_ms, "of such a prompt nothing is known"


def test_what_is_told_covers_what_comes(calibrated: Predictor, snapshot: Callable[..., Snapshot]) -> None:
    """Where acceptance varies at random, p90 covers nine in ten answers, and p50 half of them."""
    rng = random.Random(5)
    mode = Mode(variant=Variant.BF16, speculation=NGRAM)
    predictor = Predictor(calibrated.profile)
    below = {"p50": 0, "p90": 0}
    for number in range(260):
        look = replace(snapshot(64), repetition=rng.uniform(0.1, 0.3))
        accepted = [4 if rng.random() < look.repetition * 3 else 0 for _ in range(8)]
        line = drafted(mode, accepted, start_s=10.0 * number)
        found, measured = predictor.predict(mode, look, max_tokens=line.n_tokens).tpot, line.tpot_ms()
        assert found is not None
        assert measured is not None
        if number >= 60:
            below["p50"] += measured <= found.p50_ms
            below["p90"] += measured <= found.p90_ms
        predictor.observe(mode, look, None, line)
    assert 0.40 < below["p50"] / 200 < 0.65
    assert 0.85 < below["p90"] / 200 < 0.98


def test_drafts_do_not_touch_the_first_token(
    calibrated: Predictor, snapshot: Callable[..., Snapshot]
) -> None:
    """TTFT is predicted as without drafts, also where next to nothing is known of them."""
    mode = Mode(variant=Variant.BF16, speculation=NGRAM)
    look = replace(snapshot(64), repetition=0.3)
    plain = calibrated.predict(replace(mode, speculation=None), look, max_tokens=30)
    assert calibrated.predict(mode, look, max_tokens=30).ttft == plain.ttft
