"""The first use of a grammar is no fact about a mode."""

from __future__ import annotations

from dataclasses import replace

from paceline_engine.backends.base import ModelInfo
from paceline_engine.mode import Mode, Variant
from paceline_engine.snapshot import Snapshot
from paceline_engine.timeline import Timeline, TokenTime
from paceline_policies.calibration import assumed_profile
from paceline_policies.forecast import Prediction
from paceline_policies.predictor import Predictor


def test_predictions_do_not_learn_the_wait_for_a_grammar(info: ModelInfo) -> None:
    """Timelines that waited for a grammar leave the same predictions as those that did not."""
    mode, snapshot = Mode(variant=Variant.INT8), Snapshot(taken_at_s=0.0, prompt_tokens=40)
    plain = Timeline(
        mode=mode,
        submitted_at_s=5.0,
        started_at_s=5.01,
        tokens=tuple(TokenTime(made_at_s=5.1 + 0.03 * i) for i in range(20)),
        finished_at_s=5.1 + 0.03 * 19,
        prompt_tokens=40,
    )
    waited = replace(plain, submitted_at_s=3.0, queued_at_s=5.0)
    found: list[Prediction] = []
    for line in (plain, waited):
        predictor = Predictor(assumed_profile(info))
        for _ in range(30):
            predictor.observe(mode, snapshot, None, line)
        found.append(predictor.predict(mode, snapshot, max_tokens=20))
    assert found[0] == found[1]
