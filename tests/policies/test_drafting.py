"""Acceptance: read from answers, and what its means say of a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_engine.mode import Drafter, Mode, Speculation, Variant
from paceline_engine.timeline import Timeline, TokenTime
from paceline_policies.drafting import (
    KEPT,
    Drafted,
    Drafting,
    TypicalDrafting,
    acceptance_of,
    expected_tokens,
)

NGRAM = Mode(variant=Variant.INT8, speculation=Speculation(drafter=Drafter.NGRAM, max_draft_tokens=4))
SELF = Mode(
    variant=Variant.INT8,
    speculation=Speculation(drafter=Drafter.SELF, max_draft_tokens=4, draft_variant=Variant.INT4),
)


def answer(*chunks: int, drafted: int = 0) -> Timeline:
    """An answer whose chunks after the first bring so many tokens."""
    tokens = (TokenTime(made_at_s=0.0), *(TokenTime(made_at_s=1.0, n_tokens=each) for each in chunks))
    return Timeline(mode=NGRAM, submitted_at_s=0.0, tokens=tokens, drafted_tokens=drafted)


def outcome(rate: float, *, share: float = 0.5, repetition: float | None = None) -> Drafted:
    return Drafted(repetition=repetition, rate=rate, share=share, ratio=1.0)


@pytest.mark.parametrize("per_pass", [1, 2, 3, 5])
def test_the_rate_explains_the_tokens_of_a_pass(per_pass: int) -> None:
    """With the rate that is read from an answer, a pass is expected to bring what its passes brought."""
    found = acceptance_of(NGRAM, answer(*[per_pass] * 6, drafted=4 * 6))
    assert found is not None
    rate, share = found
    assert expected_tokens(rate, 4) == pytest.approx(per_pass, rel=0.01)
    assert share == 1.0


def test_a_lookup_that_finds_little_verifies_little() -> None:
    """The share is what passes got to verify of the longest draft."""
    found = acceptance_of(NGRAM, answer(1, 1, 5, 1, 1, 1, drafted=4))
    assert found is not None
    assert found[1] == pytest.approx(4 / 24)


def test_too_short_an_answer_tells_nothing() -> None:
    """Without passes after the first, or with few tokens, acceptance is not read."""
    assert acceptance_of(NGRAM, answer()) is None
    assert acceptance_of(NGRAM, answer(1, 1, drafted=2)) is None
    assert acceptance_of(replace(NGRAM, speculation=None), answer(1, 1, 1, 1, 1)) is None


def test_drafters_are_told_apart_and_targets_are_not() -> None:
    """What n-grams bring is learned over all targets, and apart from what a model drafts."""
    drafting = Drafting({})
    drafting.add(NGRAM, outcome(0.9))
    other_target = replace(NGRAM, variant=Variant.BF16)
    assert len(drafting.outcomes(other_target, None).ratios) == 1
    assert len(drafting.outcomes(SELF, None).ratios) == 0


def test_only_recent_answers_are_kept() -> None:
    """The oldest give way, and what is kept can be handed on."""
    drafting = Drafting({"ngram": [outcome(0.1)]})
    for _ in range(KEPT):
        drafting.add(NGRAM, outcome(0.9))
    assert {each.rate for each in drafting.known["ngram"]} == {0.9}
    assert Drafting(drafting.known).known == drafting.known


def test_an_answer_weighs_by_how_alike_its_prompt_is() -> None:
    """An equal prompt weighs 1, a different one next to nothing, one of unknown repetition 1."""
    drafting = Drafting({"ngram": [outcome(0.5, repetition=each) for each in (0.2, 0.8, None)]})
    assert drafting.outcomes(NGRAM, 0.2).weights[:3] == pytest.approx([1.0, 0.0, 1.0], abs=1e-9)
    assert drafting.outcomes(NGRAM, None).weights[:3] == pytest.approx([1.0, 1.0, 1.0])


def test_means_stand_in_where_the_prompt_is_not_seen() -> None:
    """Known means are used, an assumed rate before anything is known, and one token without drafts."""
    typical = TypicalDrafting.of({"ngram": (outcome(1.0, share=0.5), outcome(1.0, share=1.0))})
    assert typical.tokens_per_pass(NGRAM) == 5.0
    assert typical.drafts_per_pass(NGRAM) == 3.0
    assert 1.0 < typical.tokens_per_pass(SELF) < 5.0
    plain = replace(NGRAM, speculation=None)
    assert (typical.tokens_per_pass(plain), typical.drafts_per_pass(plain)) == (1.0, 0.0)
