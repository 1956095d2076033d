"""What drafts bring, told from recent answers to prompts that repeat themselves as much as this one.

How many drafts are accepted depends on what is said: an answer that copies from a repetitive conversation
takes nearly all of them, one in new words nearly none. So one mean foretells neither. Each recent answer is
kept as it was, and a prediction weighs them by how alike the prompts are (localized conformal prediction;
Guan, 2023), so that its spread is that of answers to such prompts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from paceline_engine.mode import Drafter, Mode
from paceline_engine.timeline import Timeline
from paceline_policies.conformal import FloatArray

Rate = TypeVar("Rate", float, FloatArray)

KEPT = 96
"""Answers kept for each drafter."""
_ALIKE = 0.08
"""Prompts whose repetition differs by this much count 0.6 of one that is equal, by twice as much 0.14."""
_ASSUMED_WEIGHT = 1.0
"""What assumed outcomes weigh together where no like prompt was seen; after n such, 1 / (1 + n) of it."""
_ASSUMED = 8
_LEAST_SHARE = 0.25
_FEWEST_TOKENS = 5
"""A shorter answer says too little of acceptance."""
_RATES: FloatArray = np.linspace(0.0, 1.0, 257)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What became of the drafts of one answer."""

    repetition: float | None
    """Of its prompt, see ``Snapshot.repetition``."""
    rate: float
    """Probability that a drafted token is accepted, given that those before it are."""
    share: float
    """Of the longest draft, that an average pass got to verify."""
    ratio: float
    """TPOT measured divided by predicted, given the two numbers above."""


class Outcomes(NamedTuple):
    """Possible outcomes of an answer's drafts, as arrays of one length; those assumed come last."""

    tokens_per_pass: FloatArray
    drafts_per_pass: FloatArray
    weights: FloatArray
    """1 for an answer to an equal prompt."""
    ratios: FloatArray
    """Of the answers seen; those assumed have none."""


class Drafting:
    """Recent answers with drafts, by drafter: the text decides more than the target does."""

    __slots__ = ("_arrays", "_recent")

    def __init__(self, known: Mapping[str, Sequence[Drafted]]) -> None:
        self._recent = {name: deque(found, maxlen=KEPT) for name, found in known.items()}
        self._arrays: dict[str, tuple[FloatArray, FloatArray]] = {}
        """By drafter: rows of (repetition, rate, share), NaN where the first is not known, and the ratios."""

    @property
    def known(self) -> dict[str, tuple[Drafted, ...]]:
        """What is kept, by drafter, oldest first."""
        return {name: tuple(found) for name, found in self._recent.items()}

    def add(self, mode: Mode, drafted: Drafted) -> None:
        name = drafter_name(mode)
        self._recent.setdefault(name, deque(maxlen=KEPT)).append(drafted)
        self._arrays.pop(name, None)

    def outcomes(self, mode: Mode, repetition: float | None) -> Outcomes:
        """What the drafts of a speculating mode may bring to an answer.

        Beside the answers seen stand assumed outcomes, from nothing accepted to everything: they are all
        there is where no such prompt was seen, and give way as such prompts come.
        """
        assert mode.speculation is not None
        most = mode.speculation.max_draft_tokens
        facts, ratios = self._arrays_of(drafter_name(mode))
        weights = np.ones(len(facts))
        if repetition is not None:
            weights = np.exp(-0.5 * ((facts[:, 0] - repetition) / _ALIKE) ** 2)
            weights[np.isnan(weights)] = 1.0
        assumed = (most + 1.0) ** ((np.arange(_ASSUMED) + 0.5) / _ASSUMED)
        # An engine drafts less where less is accepted, but never stops trying.
        drafts = _LEAST_SHARE * most + (1 - _LEAST_SHARE) * (assumed - 1)
        assumed_weight = _ASSUMED_WEIGHT / (1.0 + float(weights.sum())) / _ASSUMED
        return Outcomes(
            tokens_per_pass=np.concatenate([expected_tokens(facts[:, 1], most), assumed]),
            drafts_per_pass=np.concatenate([most * facts[:, 2], drafts]),
            weights=np.concatenate([weights, np.full(_ASSUMED, assumed_weight)]),
            ratios=ratios,
        )

    def _arrays_of(self, name: str) -> tuple[FloatArray, FloatArray]:
        if name not in self._arrays:
            seen = self._recent.get(name, ())
            facts = [
                (math.nan if each.repetition is None else each.repetition, each.rate, each.share)
                for each in seen
            ]
            self._arrays[name] = (
                np.array(facts, dtype=np.float64).reshape(-1, 3),
                np.array([each.ratio for each in seen], dtype=np.float64),
            )
        return self._arrays[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalDrafting:
    """Mean acceptance and share of each drafter, for who cannot look at the prompt."""

    rates: Mapping[str, float]
    shares: Mapping[str, float]

    @classmethod
    def of(cls, known: Mapping[str, Sequence[Drafted]]) -> TypicalDrafting:
        """The means of the latest answers."""
        recent = {name: found[-16:] for name, found in known.items() if found}
        return cls(
            rates={name: sum(each.rate for each in found) / len(found) for name, found in recent.items()},
            shares={name: sum(each.share for each in found) / len(found) for name, found in recent.items()},
        )

    def tokens_per_pass(self, mode: Mode) -> float:
        """Expected tokens of one pass of the target."""
        if mode.speculation is None:
            return 1.0
        prior = 0.5 if mode.speculation.drafter is Drafter.SELF else 0.2
        rate = self.rates.get(drafter_name(mode), prior)
        return expected_tokens(rate, mode.speculation.max_draft_tokens)

    def drafts_per_pass(self, mode: Mode) -> float:
        """Expected draft tokens that a pass verifies."""
        if mode.speculation is None:
            return 0.0
        prior = 1.0 if mode.speculation.drafter is Drafter.SELF else 0.5
        return mode.speculation.max_draft_tokens * self.shares.get(drafter_name(mode), prior)


def drafter_name(mode: Mode) -> str:
    """What acceptance is learned by: ``ngram``, or the variant that drafts."""
    assert mode.speculation is not None
    return str(mode.speculation.draft_variant or mode.speculation.drafter)


def acceptance_of(mode: Mode, timeline: Timeline) -> tuple[float, float] | None:
    """(rate, share) that an answer shows; None where it is too short to tell."""
    passes = len(timeline.tokens) - 1
    if mode.speculation is None or passes < 1 or timeline.n_tokens < _FEWEST_TOKENS:
        return None
    drafts = mode.speculation.max_draft_tokens
    per_pass = (timeline.n_tokens - timeline.tokens[0].n_tokens) / passes
    rate = float(np.interp(per_pass, expected_tokens(_RATES, drafts), _RATES))
    share = min(1.0, timeline.drafted_tokens / (passes * drafts))
    if not timeline.drafted_tokens and per_pass > 1:
        share = 1.0  # a backend that does not count its drafts
    return rate, share


def expected_tokens(rate: Rate, drafts: int) -> Rate:
    """Tokens of one pass: (1 - a^(k+1)) / (1 - a) for k drafts, each accepted with probability a.

    Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding, 2023; summed as
    1 + a (1 + a (1 + ...)), which holds for a = 1 too.
    """
    tokens = rate * 0 + 1
    for _ in range(drafts):
        tokens = 1 + rate * tokens
    return tokens
