from __future__ import annotations

import pytest

from paceline_engine.mode import Drafter, Variant
from paceline_engine.speculate.acceptance import Acceptance
from paceline_engine.speculate.costs import PassCosts, PassKind
from paceline_engine.speculate.proposal import Evidence
from paceline_engine.timeline import StepTime

WEAK, STRONG = (Evidence(drafter=Drafter.SELF, level=level) for level in (0, 5))


def step(seconds: float, n_tokens: int, *, drafting: bool = False, prefill: int = 0) -> StepTime:
    return StepTime(
        started_at_s=10.0,
        ended_at_s=10.0 + seconds,
        variant=Variant.INT4 if drafting else Variant.BF16,
        prefill_tokens=prefill,
        decode_tokens=n_tokens,
        n_sequences=1,
        context_tokens=100,
        attended_pairs=100,
        drafting=drafting,
    )


def test_acceptance_moves_from_the_prior_to_what_was_seen() -> None:
    """Each kind of evidence is learned by itself."""
    acceptance = Acceptance(lambda _: 0.5, prior_weight=4, memory=1000)
    assert acceptance.estimate(WEAK) == 0.5
    for index in range(200):
        acceptance.learn(WEAK, index % 5 == 0)
        acceptance.learn(STRONG, True)
    assert acceptance.estimate(WEAK) == pytest.approx(0.2, abs=0.02)
    assert acceptance.estimate(STRONG) > 0.97


def test_a_stream_that_gave_up_comes_back() -> None:
    """Without new drafts the estimate returns to its prior, so that drafting is tried again."""
    acceptance = Acceptance(lambda _: 0.8, prior_weight=4, memory=16)
    for _ in range(30):
        acceptance.learn(WEAK, False)
    low = acceptance.estimate(WEAK)
    for _ in range(100):
        acceptance.fade()
    assert low < 0.15
    assert acceptance.estimate(WEAK) > 0.7


def test_costs_fit_a_line() -> None:
    """A pass of any size is predicted from passes of some sizes, each kind by itself."""
    costs = PassCosts()
    for _ in range(40):
        for n_tokens in (1, 3, 5):
            costs.observe(step(0.055 + 0.005 * n_tokens, n_tokens))
        costs.observe(step(0.02, 1, drafting=True))
    verify = PassKind(variant=Variant.BF16)
    draft = PassKind(variant=Variant.INT4, drafting=True)
    assert costs.predict(verify, 8, target=Variant.BF16) == pytest.approx(0.095, rel=0.1)
    assert costs.predict(draft, 1, target=Variant.BF16) == pytest.approx(0.02, rel=0.05)


def test_costs_start_from_guesses_and_ignore_stalls_and_prompts() -> None:
    """A draft pass not seen yet costs a part of the target's; a stall and a prefill teach nothing."""
    costs = PassCosts()
    verify = PassKind(variant=Variant.BF16)
    for _ in range(20):
        costs.observe(step(0.06, 1))
    costs.observe(step(9.0, 256, prefill=255))
    costs.observe(step(5.0, 1))
    assert costs.predict(verify, 1, target=Variant.BF16) == pytest.approx(0.06, rel=0.2)
    drafting = costs.predict(PassKind(variant=Variant.INT4, drafting=True), 1, target=Variant.BF16)
    assert 0.01 < drafting < 0.06
    assert costs.predict(verify, 5, target=Variant.BF16) > costs.predict(verify, 1, target=Variant.BF16)
